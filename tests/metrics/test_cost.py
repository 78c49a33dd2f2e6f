"""What a right answer costs."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sequencematch.core.mdp import Trajectory
from sequencematch.metrics.cost import cost
from tests.strategies import BK, SPACE, rollouts

EOS = SPACE.eos
#: 1 <bkspc> 2 <eos>: 4 actions; passes for the prompt, 1 and 2. And 1 2 3 and a last action that was cut: 4 actions, 4 passes.
DELETING, CUT = (Trajectory.rollout(SPACE, (4, 4), actions) for actions in ((1, BK, 2, EOS), (1, 2, 3, 3)))


def test_wrong_rows_cost_as_well() -> None:
    """(4 + 4) / 1 actions and (3 + 4) / 1 passes. Resamples have 0, 1 or 2 right rows: infinity, 8, or 8 / 2 = 4."""
    actions, passes = cost([DELETING, CUT], [True, False])
    assert (actions.name, actions.value, actions.low, actions.high, actions.count) == (
        "actions per right answer",
        8.0,
        4.0,
        math.inf,
        2,
    )
    assert (passes.name, passes.value, passes.low) == ("forward passes per right answer", 7.0, 3.0)
    assert str(actions) == "actions per right answer 8.000 [4.000, inf]"
    assert actions.signature.startswith(
        "actions per right answer|ratio:sums over rows|right:1|n:2|interval:bootstrap 95%"
    )


def test_without_a_right_answer_the_cost_is_infinite() -> None:
    for measure in cost([DELETING, CUT], [False, False]):
        assert (measure.value, measure.low, measure.high) == (math.inf,) * 3


def test_if_all_are_right_the_cost_is_the_mean() -> None:
    actions, passes = cost([DELETING, CUT], [True, True])
    assert (actions.value, passes.value) == (4.0, 3.5)
    assert (passes.low, passes.high) == (3.0, 4.0)


@settings(max_examples=30)
@given(st.lists(st.tuples(rollouts(), st.booleans()), min_size=1, max_size=6))
def test_costs_equal_a_count_by_hand(rows: list[tuple[Trajectory, bool]]) -> None:
    """The oracle: a pass for the prompt and one per token pushed, which is what a trajectory has nodes for, less <eos>."""
    trajectories, is_right = [row[0] for row in rows], [row[1] for row in rows]
    actions, passes = cost(trajectories, is_right)
    count = sum(is_right)
    if count:
        assert actions.value == pytest.approx(sum(len(t.chosen) for t in trajectories) / count)
        pushed = sum(1 + t.num_nodes - len(t.initial) - 1 for t in trajectories)
        assert passes.value == pytest.approx(pushed / count)
        assert passes.low <= passes.high
    assert passes.value <= actions.value


def test_a_deletion_is_an_action_but_no_forward_pass() -> None:
    """The negative control: two deletions more, at the floor or not, cost two actions and no pass."""
    plain, deleting = ([Trajectory.rollout(SPACE, (4,), a)] for a in ((1, 2, EOS), (BK, 1, 2, BK, 2, EOS)))
    assert [m.value for m in cost(plain, [True])] == [3.0, 3.0]
    assert [m.value for m in cost(deleting, [True])] == [6.0, 4.0]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("`trajectories` must give at least one sample")):
        cost([], [])
    with pytest.raises(
        ValueError, match=re.escape("`trajectories` and `is_right` must have one entry per row. Got 1 and 2.")
    ):
        cost([DELETING], [True, True])
    with pytest.raises(ValueError, match=r"must be rollouts, .* Got a demonstration or a scored prompt\."):
        cost([Trajectory.demonstration(SPACE, (4,), (1, 2))], [True])
