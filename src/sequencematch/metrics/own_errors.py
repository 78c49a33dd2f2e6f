"""A policy's own errors: how many of the wrong tokens that it wrote it deleted, and how many of the right ones."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

from sequencematch.core.mdp import Trajectory
from sequencematch.metrics.bootstrap import METHOD, check_some, interval_of_ratio
from sequencematch.metrics.measure import Measure, signature

Kind = Literal["wrong", "right"]


def own_errors(trajectories: Sequence[Trajectory], references: Sequence[Sequence[int]]) -> tuple[Measure, Measure]:
    """Of the wrong tokens that the policy wrote, the share it deleted; and the same of the right tokens. For one right answer.

    `references` holds the right sequence of each trajectory, prompt and answer, without `<eos>`. A token is right if the state
    with it is a prefix of the reference, and wrong if only the state before it is. Tokens after a wrong one are neither. Tokens
    of data, prompt or noise are not the policy's, and `<eos>` is not counted, since nothing can delete it.

    Deletions and tokens are summed over all trajectories before dividing. The interval resamples whole trajectories. A share of
    no tokens is NaN, measured on 0 samples.
    """
    check_some("trajectories", len(trajectories))
    if len(trajectories) != len(references):
        raise ValueError(
            f"`trajectories` and `references` must have one entry per row. Got {len(trajectories)} and {len(references)}."
        )
    counts = [count_tokens(*pair) for pair in zip(trajectories, references, strict=True)]
    return _share("own errors deleted", "wrong", counts), _share("right tokens deleted", "right", counts)


def count_tokens(trajectory: Trajectory, reference: Sequence[int]) -> tuple[Counter[Kind | None], Counter[Kind | None]]:
    """The tokens that the policy wrote and those of them that were deleted, by kind; None for those after a wrong one."""
    written, deleted = Counter[Kind | None](), Counter[Kind | None]()
    is_prefix = [True]  # of the reference: for each depth of the stack
    kinds: list[Kind | None] = []

    def push(token: int, is_own: bool) -> None:
        depth = len(kinds)
        fits = is_prefix[-1] and depth < len(reference) and token == reference[depth]
        kinds.append(("right" if fits else "wrong") if is_own and is_prefix[-1] else None)
        is_prefix.append(fits)

    for token in trajectory.initial:
        push(token, is_own=False)
    for chosen, executed, by_policy in zip(
        trajectory.chosen[:-1], trajectory.executed[:-1], trajectory.policy_chosen[:-1], strict=True
    ):
        if executed != trajectory.space.bkspc:
            push(executed, is_own=by_policy and chosen == executed)
            written[kinds[-1]] += 1
        elif len(kinds) > trajectory.floor:
            is_prefix.pop()
            deleted[kinds.pop()] += 1
    return written, deleted


def _share(name: str, kind: Kind, counts: Sequence[tuple[Counter[Kind | None], Counter[Kind | None]]]) -> Measure:
    with_some = [(float(deleted[kind]), float(written[kind])) for written, deleted in counts if written[kind]]
    facts = {
        "of": f"{kind} tokens written by the policy",
        "ratio": "sums over trajectories",
        "tokens": int(sum(written for _, written in with_some)),
        "left out": f"{len(counts) - len(with_some)} without such tokens" if len(with_some) < len(counts) else None,
        "n": len(with_some),
        "interval": METHOD,
    }
    text = signature(name, facts)
    if not with_some:
        return Measure(name, math.nan, math.nan, math.nan, 0, text)
    deleted, written = np.array(with_some).T
    low, high = interval_of_ratio(deleted, written)
    return Measure(name, float(deleted.sum() / written.sum()), low, high, len(with_some), text)
