"""How often a policy deletes."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sequencematch.core.mdp import Trajectory
from sequencematch.core.noise import add_noise, token_noise
from sequencematch.metrics.backspaces import backspace_rate
from tests.strategies import BK, SPACE, rollouts

EOS = SPACE.eos
#: 1 <bkspc> 2 <eos>, one deletion in four actions; and 1 1 1 1 1 <eos>, none in six.
DELETING, PLAIN = (Trajectory.rollout(SPACE, (4,), actions) for actions in ((1, BK, 2, EOS), (1, 1, 1, 1, 1, EOS)))


def test_the_rate_is_a_ratio_of_sums() -> None:
    """(1 + 0) / (4 + 6) = 0.1, where the mean of the rates would be (1/4 + 0) / 2 = 0.125. Resamples: 0, 1/10 or 2/8."""
    measure = backspace_rate([DELETING, PLAIN])
    assert (measure.value, measure.low, measure.high, measure.count) == (0.1, 0.0, 0.25, 2)
    assert measure.signature.startswith(
        "backspace rate|of:actions chosen and executed|ratio:sums over trajectories|n:2|interval:bootstrap 95%"
    )


def test_the_last_action_of_a_cut_sequence_was_not_executed() -> None:
    """1 <bkspc> and a second <bkspc> that the cut replaced by <eos>: 1 of 2."""
    assert backspace_rate([Trajectory.rollout(SPACE, (4,), (1, BK, BK))]).value == 0.5


def test_a_backspace_on_the_floor_counts() -> None:
    assert backspace_rate([Trajectory.rollout(SPACE, (4,), (BK, EOS))]).value == 0.5


@settings(max_examples=60)
@given(st.lists(rollouts(), min_size=1, max_size=6))
def test_the_rate_equals_a_count_by_hand(trajectories: list[Trajectory]) -> None:
    """The oracle: every executed action but an <eos> that nobody chose."""
    actions = [a for t in trajectories for a in (t.executed[:-1] if t.truncated else t.executed)]
    if actions:
        assert backspace_rate(trajectories).value == pytest.approx(actions.count(BK) / len(actions))


def test_prompt_and_noise_are_not_the_policys(generator: torch.Generator) -> None:
    """Noise brings a <bkspc> for every action; the policy's own are counted alone."""
    noised = add_noise(DELETING.score_prompt(), 1.0, token_noise(SPACE), generator)
    assert noised.executed.count(BK) == 5
    assert backspace_rate([noised]).value == 0.25
    assert backspace_rate([Trajectory.rollout(SPACE, (4, 1, 2, 3), (BK, EOS)).score_prompt()]).value == 0.5


def test_a_trajectory_without_own_actions_is_left_out_and_said_to_be() -> None:
    cut_at_once = Trajectory.rollout(SPACE, (4,), (1,))
    measure = backspace_rate([DELETING, cut_at_once])
    assert (measure.value, measure.count) == (0.25, 1)
    assert "|left out:1 without such actions|n:1|" in measure.signature


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("`trajectories` must give at least one sample")):
        backspace_rate([])
    with pytest.raises(ValueError, match=r"Got none\. Pass rollouts: no policy chose the actions of a demonstration\."):
        backspace_rate([Trajectory.demonstration(SPACE, (4,), (1, 2))])
