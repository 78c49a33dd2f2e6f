"""A few generations as samples, with their deletions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sequencematch.core.mdp import Trajectory
from sequencematch.data.pieces import Decode, Piece, pieces, text_behind
from sequencematch.evaluation.cases import Case, answer, tokenizer_decode
from sequencematch.evaluation.registry import Evidence
from sequencematch.policy.display import decoder

#: Samples of each kind: from plain prompts, and from prompts with a mistake.
SAMPLES = 5


@dataclass(frozen=True)
class Sample:
    """One generation as text. `given` is the text after the question in the prompt: a correct prefix and a mistake, or nothing.

    `written` is everything written, in order, after the deleted part of the prompt, if any. `final` is the final text after the
    question, or the whole final text if the question was altered. `is_plausible` says whether the mistake was.
    """

    question: str
    given: str
    written: tuple[Piece, ...]
    final: str
    reference: str
    is_right: bool | None
    is_plausible: bool = False


def samples(evidence: Evidence, *, judge: bool) -> tuple[Sample, ...]:
    """Samples of the first rows, without and with mistakes. With `judge`, each is marked right or wrong."""
    show = decoder(evidence.policy.tokenizer)
    found = [
        _sample(evidence, case, trajectory, show, judge=judge)
        for trajectories in (evidence.trajectories, evidence.recovered)
        for case, trajectory in list(zip(evidence.cases, trajectories, strict=False))[:SAMPLES]
    ]
    found += [
        replace(_sample(evidence, case, trajectory, show, judge=judge), is_plausible=True)
        for case, trajectory in list(zip(evidence.cases, evidence.recovered_plausible, strict=False))[:SAMPLES]
    ]
    return tuple(found)


def _sample(evidence: Evidence, case: Case, trajectory: Trajectory, show: Decode, *, judge: bool) -> Sample:
    policy, decode = evidence.policy, tokenizer_decode(evidence.policy)
    found = answer(policy, case, trajectory)
    completion = case.row.get("completion")

    def show_whole(tokens: Sequence[int]) -> str:
        start = int(tokens[0] == policy.space.bos)
        return text_behind(decode, tokens[:start], tokens[start:])

    return Sample(
        question=show_whole(case.prompt),
        given=text_behind(decode, case.prompt, trajectory.initial[len(case.prompt) :]),
        written=tuple(Piece(t, "kept" if fate == "replacement" else fate) for t, fate in pieces(trajectory, show)),
        final=show_whole(trajectory.final_state.tokens[:-1]) if found is None else found,
        reference=completion if isinstance(completion, str) else text_behind(decode, case.prompt, case.reference),
        is_right=found is not None and evidence.task.is_right(found, case.row) if judge else None,
    )
