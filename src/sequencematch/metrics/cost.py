"""What a right answer costs, in actions and in forward passes."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from sequencematch.core.mdp import Trajectory
from sequencematch.metrics.bootstrap import METHOD, check_some, interval_of_ratio
from sequencematch.metrics.measure import Measure, signature


def cost(trajectories: Sequence[Trajectory], is_right: Sequence[bool]) -> tuple[Measure, Measure]:
    """Actions per right answer, and forward passes per right answer: Σ over all rows / number of right rows.

    Rows whose answer is wrong cost as well. Actions are all that the policy chose, `<bkspc>` and `<eos>` included. Each token that
    it pushed takes a forward pass, and so does the prompt; `<bkspc>` and `<eos>` take none. Both numbers are infinite if no answer
    is right. The interval resamples whole rows.
    """
    check_some("trajectories", len(trajectories))
    if len(trajectories) != len(is_right):
        raise ValueError(
            f"`trajectories` and `is_right` must have one entry per row. Got {len(trajectories)} and {len(is_right)}."
        )
    if not all(all(trajectory.policy_chosen) for trajectory in trajectories):
        raise ValueError(
            "`trajectories` must be rollouts, whose actions were all chosen by the policy. Got a demonstration or a scored prompt."
        )
    actions = [len(trajectory) for trajectory in trajectories]
    # One for the prompt and one for each push. The last executed action, always <eos>, takes the place of the prompt in the count.
    passes = [sum(action != t.space.bkspc for action in t.executed) for t in trajectories]
    right = np.array(is_right, dtype=np.float64)
    return (
        per_right("actions per right answer", np.array(actions, dtype=np.float64), right),
        per_right("forward passes per right answer", np.array(passes, dtype=np.float64), right),
    )


def per_right(name: str, spent: Float[np.ndarray, "sample"], right: Float[np.ndarray, "sample"]) -> Measure:
    """What was spent on all rows / number of right rows; infinite if none is right. The interval resamples whole rows."""
    # The interval is that of right answers per unit, turned over: a resample without right answers then divides by no zero.
    low, high = (1 / share if share else math.inf for share in reversed(interval_of_ratio(right, spent)))
    facts = {"ratio": "sums over rows", "right": int(right.sum()), "n": len(right), "interval": METHOD}
    value = float(spent.sum() / right.sum()) if right.any() else math.inf
    return Measure(name, value, low, high, len(right), signature(name, facts))
