"""A few generations to look at, deletions in sight."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sequencematch.core.mdp import Trajectory
from sequencematch.evaluation.cases import Case, answer, text_behind
from sequencematch.evaluation.measuring import Evidence
from sequencematch.policy.display import Decode, decoder, struck

if TYPE_CHECKING:
    from rich.text import Text

#: How many there are of each kind: from prompts as they are, and from those with a mistake.
SAMPLES = 5
#: A piece of what was written: its text, and what became of it.
Fate = Literal["kept", "deleted", "end"]
_FATES: dict[str, Fate] = {"": "kept", "green": "kept", "red strike": "deleted", "dim": "end"}


@dataclass(frozen=True)
class Sample:
    """One generation for people. `handed` is what stood behind the question already: a right beginning and a mistake.

    `written` is all that was ever written, in order; what was deleted of prompt and mistake is in front. `final` is what
    stands behind the question in the end, or the whole text where the question is no longer what it was.
    """

    question: str
    handed: str
    written: tuple[tuple[str, Fate], ...]
    final: str
    reference: str
    is_right: bool | None


def samples(evidence: Evidence, *, judge: bool) -> tuple[Sample, ...]:
    """The first rows, and the first with a mistake; `judge` says whether the task knows right from wrong."""
    show = decoder(evidence.policy.tokenizer)
    return tuple(
        _sample(evidence, case, trajectory, show, judge=judge)
        for trajectories in (evidence.trajectories, evidence.recovered)
        for case, trajectory in list(zip(evidence.cases, trajectories, strict=False))[:SAMPLES]
    )


def _sample(evidence: Evidence, case: Case, trajectory: Trajectory, show: Decode, *, judge: bool) -> Sample:
    policy = evidence.policy
    found = answer(policy, case, trajectory)
    completion = case.row.get("completion")

    def show_whole(tokens: Sequence[int]) -> str:
        start = int(tokens[0] == policy.space.bos)
        return text_behind(policy, tokens[:start], tokens[start:])

    return Sample(
        question=show_whole(case.prompt),
        handed=text_behind(policy, case.prompt, trajectory.initial[len(case.prompt) :]),
        written=tuple((text, _FATES[style]) for text, style in _pieces(struck("", trajectory, show))),
        final=show_whole(trajectory.final_state.tokens[:-1]) if found is None else found,
        reference=completion if isinstance(completion, str) else text_behind(policy, case.prompt, case.reference),
        is_right=found is not None and evidence.task.is_right(found, case.row) if judge else None,
    )


def _pieces(text: "Text") -> list[tuple[str, str]]:
    """The pieces of a rich text, each with its style."""
    styles = {span.start: (span.end, str(span.style)) for span in text.spans}
    starts = sorted({0, *styles, *(end for end, _ in styles.values())} - {len(text)})
    ends = [*starts[1:], len(text)]
    return [(text.plain[a:b], styles.get(a, (b, ""))[1]) for a, b in zip(starts, ends, strict=True)]
