"""§3.1: the dynamics, and trajectories that can't be wrong."""

import dataclasses
import re

import pytest
from hypothesis import given

from sequencematch.core.mdp import ActionSpace, State, Trajectory, step
from tests.oracles.stack_machine import replay
from tests.strategies import BK, SPACE, rollouts

EOS = SPACE.eos


def test_a_token_is_appended_and_a_backspace_removes_it() -> None:
    written = step(SPACE, State((4,)), 2)
    assert written == State((4, 2))
    assert step(SPACE, written, BK) == State((4,))


def test_backspace_on_the_initial_state_leaves_it_unchanged() -> None:
    assert step(SPACE, State((4,)), BK) == State((4,))
    assert step(SPACE, State((4, 1, 2)), BK, floor=3) == State((4, 1, 2))
    assert step(SPACE, State((4, 1, 2)), BK, floor=2) == State((4, 1))


def test_executing_eos_absorbs_but_a_token_of_the_initial_state_with_its_id_does_not() -> None:
    ended = step(SPACE, State((EOS,)), EOS)
    assert ended == State((EOS, EOS), absorbing=True)
    assert step(SPACE, ended, BK) == ended
    assert step(SPACE, ended, 1) == ended
    assert step(SPACE, State((EOS,)), 1) == State((EOS, 1))


def test_a_trajectory_is_replayed_by_hand() -> None:
    """`12<bkspc>3<eos>` after <bos>: states 4 | 4 1 | 4 1 2 | 4 1 | 4 1 3 | 4 1 3 <eos>."""
    trajectory = Trajectory.rollout(SPACE, (4,), (1, 2, BK, 3, EOS))
    assert [s.tokens for s in trajectory.states()] == [(4,), (4, 1), (4, 1, 2), (4, 1), (4, 1, 3), (4, 1, 3, EOS)]
    assert trajectory.final_state == State((4, 1, 3, EOS), absorbing=True)
    assert trajectory.num_nodes == 5
    assert len(trajectory) == 5
    assert not trajectory.truncated
    assert trajectory.render(str) == "12<bkspc>3<eos>"
    assert trajectory.render() == "1 2 <bkspc> 3 <eos>"


def test_all_nodes_of_a_trajectory_by_hand() -> None:
    """`1<bkspc><bkspc>23<eos>` after 4 0: 1 and then 0 are deleted, 2 takes the place of 0, 3 that of 1."""
    tokens, depths, alive = Trajectory.rollout(SPACE, (4, 0), (1, BK, BK, 2, 3, EOS)).replay()
    assert tokens == [4, 0, 1, 2, 3, EOS]
    assert depths == [0, 1, 2, 1, 2, 3]
    assert alive == [0, 3, 4, 5]


@pytest.mark.parametrize(
    ("actions", "floor", "parts"),
    [
        ((1, 2, EOS), 1, ((4, 0, 3), (1, 2))),
        ((1, BK, BK, BK, 2, EOS), 1, ((4,), (2,))),
        ((BK, BK, BK, BK, 2, EOS), 1, ((4,), (2,))),  # one token is never deleted
        ((BK, BK, 2, EOS), 3, ((4, 0, 3), (2,))),
        ((BK, 3, EOS), 1, ((4, 0), (3,))),  # a token that is written again did not survive
        ((1, 2), 1, ((4, 0, 3), (1,))),  # cut: the last action is not executed
        ((BK, EOS), 1, ((4, 0), ())),
    ],
)
def test_a_completion_stands_behind_as_much_of_the_prompt_as_survived(
    actions: tuple[int, ...], floor: int, parts: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    assert Trajectory.rollout(SPACE, (4, 0, 3), actions, floor).final_parts == parts


def test_a_rollout_that_hits_its_limit_keeps_its_action_and_executes_eos() -> None:
    trajectory = Trajectory.rollout(SPACE, (4,), (1, 2))
    assert trajectory.chosen == (1, 2)
    assert trajectory.executed == (1, EOS)
    assert trajectory.truncated
    assert trajectory.policy_chosen == (True, True)


def test_a_demonstration_adds_eos_and_was_not_chosen_by_the_policy() -> None:
    trajectory = Trajectory.demonstration(SPACE, (4, 0), (1, 2))
    assert trajectory.chosen == trajectory.executed == (1, 2, EOS)
    assert not any(trajectory.policy_chosen)
    assert not trajectory.truncated


def test_a_trajectory_is_frozen_and_compares_by_value() -> None:
    first, second = (Trajectory.rollout(SPACE, [4], [1, EOS]) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.floor = 2  # type: ignore[misc]


@given(rollouts())
def test_states_equal_an_independent_stack_machine(trajectory: Trajectory) -> None:
    oracle = replay(trajectory.initial, trajectory.executed, BK, trajectory.floor, "tree")
    states = list(trajectory.states())
    assert [list(s.tokens) for s in states] == oracle.states
    assert [s.absorbing for s in states] == [False] * len(trajectory) + [True]
    assert trajectory.final_state == states[-1]
    assert trajectory.final_size == len(states[-1].tokens)
    assert trajectory.num_nodes == len(oracle.tokens)
    tokens, depths, alive = trajectory.replay()
    assert (tokens, depths) == (oracle.tokens, oracle.position_ids)
    assert [tokens[node] for node in alive] == oracle.states[-1]
    survived = min(map(len, oracle.states))
    final = tuple(oracle.states[-1][:-1])
    assert trajectory.final_parts == (final[:survived], final[survived:])


@given(rollouts())
def test_scoring_the_prompt_changes_what_is_a_decision_and_no_state(trajectory: Trajectory) -> None:
    scored = trajectory.score_prompt()
    extra = len(trajectory.initial) - 1
    assert scored.initial == trajectory.initial[:1]
    assert scored.policy_chosen == (False,) * extra + trajectory.policy_chosen
    assert list(scored.states())[extra:] == list(trajectory.states())


@given(rollouts())
def test_truncation_keeps_every_state_it_can_and_ends_in_eos(trajectory: Trajectory) -> None:
    states = list(trajectory.states())
    for max_nodes in range(len(trajectory.initial) + 1, trajectory.num_nodes):
        cut = trajectory.truncate(max_nodes)
        assert cut.num_nodes == max_nodes
        assert list(cut.states())[:-1] == states[: len(cut)]
        assert cut.final_state.tokens == (*states[len(cut) - 1].tokens, EOS)
        assert cut.chosen == trajectory.chosen[: len(cut)]
        assert cut.policy_chosen == trajectory.policy_chosen[: len(cut)]
        # One decision more would need one node more.
        assert len(trajectory.initial) + sum(a != BK for a in trajectory.executed[: len(cut)]) == max_nodes
    assert trajectory.truncate(trajectory.num_nodes) == trajectory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"initial": ()},
            "`initial` must hold at least one token, such as <bos>: the policy needs a state to act in. Got none.",
        ),
        (
            {"initial": (4, BK)},
            "`initial` must hold tokens only: <bkspc> (id 6) is an action, never an input token. Got (4, 6).",
        ),
        (
            {"initial": (4, 7)},
            "`initial` must lie in the action space [0, 6], whose last id is <bkspc>. Got 7; the space has vocab_size=6.",
        ),
        (
            {"chosen": (1, 7)},
            "`chosen` must lie in the action space [0, 6], whose last id is <bkspc>. Got 7; the space has vocab_size=6.",
        ),
        ({"executed": (-1, EOS)}, "`executed` must lie in the action space [0, 6]"),
        ({"chosen": ()}, "`chosen` must hold at least one action: a trajectory ends by executing <eos>. Got none."),
        ({"executed": (1, 2, EOS)}, "must have one entry per decision. Got lengths 2, 3 and 2."),
        ({"executed": (1, 2)}, "`executed` must end in <eos> (id 5) and hold it nowhere else"),
        ({"executed": (EOS, EOS)}, "`executed` must end in <eos> (id 5) and hold it nowhere else"),
        (
            {"executed": (BK, EOS)},
            "`executed` may differ from `chosen` only by a token that noise pushed, or by <eos> at the end.",
        ),
        ({"floor": 0}, "`floor` must be at least 1: a state is never empty. Got floor=0."),
    ],
)
def test_a_wrong_trajectory_is_refused(change: dict[str, object], message: str) -> None:
    trajectory = Trajectory(SPACE, (4,), (1, EOS), (1, EOS), (True, True))
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(trajectory, **change)  # type: ignore[arg-type]


def test_a_sequence_that_just_fits_is_not_cut() -> None:
    """Cut one node shorter, it would execute <eos>, id 5, instead of its own end, 3."""
    space = ActionSpace(vocab_size=6, eos=5, ends=frozenset({3, 5}))
    whole = Trajectory.demonstration(space, (4,), (1, 2), end=3)  # four nodes
    assert whole.truncate(4) == whole
    assert whole.truncate(4).executed == (1, 2, 3)
    assert whole.truncate(3).executed == (1, 5)
    assert whole.truncate(3).chosen == (1, 2)


def test_a_long_sequence_is_shortened_in_the_error() -> None:
    with pytest.raises(ValueError, match=re.escape("`prompt` must hold tokens only: <bkspc> (id 6)")):
        Trajectory.demonstration(SPACE, (4, BK), (1,))
    with pytest.raises(ValueError, match=re.escape("Got (4, 1, 1, 1, 1, 1, … 31 in all).")):
        Trajectory.demonstration(SPACE, (4, *[1] * 29, BK), (1,))


def test_other_wrong_arguments_are_refused() -> None:
    with pytest.raises(
        ValueError, match=re.escape("`eos` must be a token id in [0, vocab_size). Got eos=6 with vocab_size=6")
    ):
        ActionSpace(vocab_size=6, eos=6)
    with pytest.raises(ValueError, match=re.escape("`vocab_size` must be at least 1")):
        ActionSpace(vocab_size=0, eos=0)
    with pytest.raises(
        ValueError, match=re.escape("`action` must lie in the action space [0, 6], whose last id is <bkspc>. Got 9; ")
    ):
        step(SPACE, State((4,)), 9)
    with pytest.raises(
        ValueError, match=re.escape("`pad` must be a token id in [0, vocab_size). Got pad=9 with vocab_size=6")
    ):
        ActionSpace(vocab_size=6, eos=5, pad=9)
    with pytest.raises(
        ValueError, match=re.escape("`ends` must be a token id in [0, vocab_size). Got ends=7 with vocab_")
    ):
        ActionSpace(vocab_size=6, eos=5, ends=frozenset({2, 7}))
    with pytest.raises(ValueError, match=re.escape("`floor` must be at least 1: a state is never empty. Got floor=0.")):
        step(SPACE, State((4,)), BK, floor=0)
    with pytest.raises(ValueError, match=re.escape("`prompt` must hold at least one token, such as <bos>")):
        Trajectory.rollout(SPACE, (), (1, EOS))
    with pytest.raises(ValueError, match=re.escape("`actions` must hold at least one action")):
        Trajectory.rollout(SPACE, (4,), ())
    with pytest.raises(
        ValueError, match=re.escape("`actions` must hold <eos> (id 5) at the end only: nothing happens after it.")
    ):
        Trajectory.rollout(SPACE, (4,), (1, EOS, 2))
    with pytest.raises(
        ValueError, match=re.escape("`score_prompt` needs a prompt without <eos> (id 5) after its first token")
    ):
        Trajectory.rollout(SPACE, (4, EOS, 1), (1, EOS)).score_prompt()
    with pytest.raises(
        ValueError, match=re.escape("`completion` must not hold <eos> (id 5): it is added. Got (1, 5).")
    ):
        Trajectory.demonstration(SPACE, (4,), (1, EOS))
    with pytest.raises(ValueError, match=re.escape("`end` must be <eos> (id 5): it ends the trajectory. Got end=2.")):
        Trajectory.demonstration(SPACE, (4,), (1,), end=2)
    with pytest.raises(
        ValueError, match=re.escape("`max_nodes` must leave room for the prompt and <eos>: at least 3 here.")
    ):
        Trajectory.demonstration(SPACE, (4, 1), (2,)).truncate(2)
