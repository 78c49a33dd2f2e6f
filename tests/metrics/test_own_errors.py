"""How many of its own wrong and right tokens a policy deletes."""

import math
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sequencematch.core.mdp import Trajectory
from sequencematch.core.noise import add_noise, token_noise
from sequencematch.metrics.own_errors import own_errors
from tests.strategies import BK, SPACE, rollouts, tokens

EOS = SPACE.eos
#: The prompt 4, and its answer 1 2.
RIGHT = (4, 1, 2)


def rolled(*actions: int, prompt: tuple[int, ...] = (4,), floor: int = 1) -> Trajectory:
    return Trajectory.rollout(SPACE, prompt, actions, floor)


def test_a_trajectory_by_hand() -> None:
    """4 | 3 (wrong) 0 (after a wrong one) <bkspc> <bkspc> 1 (right) <bkspc> 1 (right) 3 (wrong) <eos>.

    Of two wrong tokens one is deleted, of two right ones one.
    """
    wrong, right = own_errors([rolled(3, 0, BK, BK, 1, BK, 1, 3, EOS)], [RIGHT])
    assert (wrong.name, wrong.value, wrong.count) == ("own errors deleted", 0.5, 1)
    assert (right.name, right.value, right.count) == ("right tokens deleted", 0.5, 1)
    assert wrong.signature.startswith(
        "own errors deleted|of:wrong tokens written by the policy|ratio:sums over trajectories|tokens:2|n:1|interval:bootstrap"
    )


def test_shares_are_ratios_of_sums() -> None:
    """Wrong tokens deleted: 1 of 1 and 2 of 3, so 3 of 4, where the mean of the shares would be 5/6. Right ones: 0 of 2."""
    first, second = rolled(3, BK, 1, 2, EOS), rolled(3, BK, 3, BK, 3, EOS)
    wrong, right = own_errors([first, second], [RIGHT, RIGHT])
    assert (wrong.value, wrong.count) == (0.75, 2)
    assert (wrong.low, wrong.high) == (2 / 3, 1.0)
    assert (right.value, right.count) == (0.0, 1)
    assert "|tokens:2|left out:1 without such tokens|n:1|" in right.signature


def test_a_token_after_the_whole_answer_is_wrong() -> None:
    wrong, right = own_errors([rolled(1, 2, 3, BK, EOS)], [RIGHT])
    assert (wrong.value, right.value) == (1.0, 0.0)


def test_the_prompt_written_again_is_right_and_a_backspace_on_the_floor_deletes_nothing() -> None:
    """4 1 | <bkspc> 1 2 <eos> with floor 1; with floor 2 the <bkspc> has no effect, and the second 1 is wrong."""
    again, floored = (rolled(BK, 1, 2, EOS, prompt=(4, 1), floor=floor) for floor in (1, 2))
    assert [math.isnan(m.value) for m in own_errors([again], [RIGHT])] == [True, False]
    assert own_errors([again], [RIGHT])[1].value == 0.0
    wrong, right = own_errors([floored], [RIGHT])
    assert (wrong.value, math.isnan(right.value)) == (0.0, True)


def test_without_such_tokens_the_share_is_not_a_number() -> None:
    wrong, right = own_errors([rolled(1, 2, EOS)], [RIGHT])
    assert math.isnan(wrong.value)
    assert math.isnan(wrong.low)
    assert (wrong.count, right.value) == (0, 0.0)
    assert str(wrong) == "own errors deleted nan [nan, nan]"
    assert "|tokens:0|left out:1 without such tokens|n:0|" in wrong.signature


def test_noise_is_not_the_policys_error(generator: torch.Generator) -> None:
    """At rate 1 noise pushes a token before each action, and deletes it: the policy itself wrote 1 2, all right."""
    noised = add_noise(rolled(1, 2, EOS), 1.0, token_noise(SPACE), generator)
    assert BK in noised.executed
    wrong, right = own_errors([noised], [RIGHT])
    assert (wrong.count, right.value, right.signature.split("|")[3]) == (0, 0.0, "tokens:2")


def by_states(trajectory: Trajectory, reference: tuple[int, ...]) -> dict[str, list[int]]:
    """The oracle, from whole states: a token pushed at depth n lives until a state has n tokens or fewer."""
    states = [state.tokens for state in trajectory.states()][:-1]  # the last one has <eos>
    found: dict[str, list[int]] = {"wrong": [], "right": []}
    for time, (before, after) in enumerate(pairwise(states)):
        if len(after) == len(before) + 1 and before == reference[: len(before)]:
            kind = "right" if after == reference[: len(after)] else "wrong"
            found[kind].append(int(any(len(later) <= len(before) for later in states[time + 1 :])))
    return found


@settings(max_examples=60)
@given(rollouts(), st.lists(tokens, max_size=8))
def test_shares_equal_a_count_over_states(trajectory: Trajectory, answer: list[int]) -> None:
    reference = (*trajectory.initial, *answer)
    expected = by_states(trajectory, reference)
    for measure, fates in zip(own_errors([trajectory], [reference]), expected.values(), strict=True):
        assert measure.count == bool(fates)
        assert not fates or measure.value == pytest.approx(sum(fates) / len(fates))


def test_a_policy_that_never_deletes_is_told_from_one_that_does() -> None:
    """The negative control: without its deletions the measures of the same tokens differ."""
    assert own_errors([rolled(3, BK, 1, 2, EOS)], [RIGHT])[0].value == 1.0
    assert own_errors([rolled(3, 1, 2, EOS)], [RIGHT])[0].value == 0.0


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("`trajectories` must give at least one sample")):
        own_errors([], [])
    with pytest.raises(
        ValueError, match=re.escape("`trajectories` and `references` must have one entry per row. Got 1 and 2.")
    ):
        own_errors([rolled(EOS)], [RIGHT, RIGHT])
