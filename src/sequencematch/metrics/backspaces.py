"""How often a policy deletes."""

from collections.abc import Sequence

import numpy as np

from sequencematch.core.mdp import Trajectory
from sequencematch.metrics.bootstrap import METHOD, check_some, interval_of_ratio
from sequencematch.metrics.measure import Measure, signature


def backspace_rate(trajectories: Sequence[Trajectory]) -> Measure:
    """The share of `<bkspc>` among the actions the policy chose and executed, `<eos>` included.

    Tokens of data or prompt, noise, and the last action of a cut sequence, which `<eos>` replaced, are not counted. Both counts
    are summed over all trajectories before dividing; a mean of rates would give the actions of short trajectories more weight.
    The interval resamples whole trajectories, since the actions of one depend on each other.
    """
    check_some("trajectories", len(trajectories))
    counts = np.array([_count(trajectory) for trajectory in trajectories], dtype=np.float64)
    counts = counts[counts[:, 1] > 0]
    if not len(counts):
        raise ValueError(
            "`trajectories` must hold an action that a policy chose and executed. Got none. Pass rollouts: "
            "no policy chose the actions of a demonstration."
        )
    deletions, actions = counts.T
    low, high = interval_of_ratio(deletions, actions)
    without = len(trajectories) - len(counts)
    facts = {
        "of": "actions chosen and executed",
        "ratio": "sums over trajectories",
        "left out": f"{without} without such actions" if without else None,
        "n": len(counts),
        "interval": METHOD,
    }
    value = float(deletions.sum() / actions.sum())
    return Measure("backspace rate", value, low, high, len(counts), signature("backspace rate", facts))


def _count(trajectory: Trajectory) -> tuple[int, int]:
    """(`<bkspc>`s, all) among the actions the policy chose and executed."""
    visits = zip(trajectory.chosen, trajectory.executed, trajectory.policy_chosen, strict=True)
    own = [chosen for chosen, executed, by_policy in visits if by_policy and chosen == executed]
    return own.count(trajectory.space.bkspc), len(own)
