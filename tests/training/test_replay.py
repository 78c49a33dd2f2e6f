"""The replay buffer: first in, first out; each rollout drawn as often as asked; saved and restored."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.data.examples import Example
from sequencematch.training.replay import Experience, ReplayBuffer
from sequencematch.training.rollouts import correction, is_right, right_action
from tests.training.tiny_run import trainer

SPACE = ActionSpace(vocab_size=100, eos=99)


def rollout(number: int) -> Experience:
    """Told apart by its version."""
    return Experience(Trajectory.rollout(SPACE, (number % 90,), (1, SPACE.bkspc, 2, SPACE.eos)), version=number)


def test_a_buffer_by_hand() -> None:
    """Two made and two uses each: four may be drawn, in batches of two, before new ones are due."""
    buffer = ReplayBuffer(size=3, reuse=2)
    assert buffer.is_due(1)
    buffer.add([rollout(0), rollout(1)])
    assert not buffer.is_due(4)
    assert buffer.is_due(5)
    assert {e.version for e in buffer.draw(2, seed=0)} == {0, 1}  # without repeats
    buffer.draw(2, seed=0)
    assert buffer.is_due(1)
    buffer.add([rollout(2), rollout(3)])
    assert [e.version for e in buffer.rollouts] == [1, 2, 3]  # the oldest made room
    assert (buffer.made, buffer.drawn) == (4, 4)
    assert buffer.age(step=10) == 8


@pytest.mark.parametrize(
    ("size", "batch", "made_at_a_time"), [(1000, 32, 64), (100, 32, 10), (64, 7, 64), (50, 60, 16)]
)
def test_over_a_long_run_each_rollout_is_drawn_as_often_as_asked_and_the_oldest_are_replaced(
    size: int, batch: int, made_at_a_time: int
) -> None:
    buffer, drawn, number = ReplayBuffer(size, reuse=8), Counter[int](), 0
    for step in range(20_000 // batch * 4):
        while buffer.is_due(batch):
            buffer.add([rollout(number + i) for i in range(made_at_a_time)])
            number += made_at_a_time
            assert [e.version for e in buffer.rollouts] == list(range(max(0, number - size), number))
        drawn.update(e.version for e in buffer.draw(batch, seed=step * 0))
    assert sum(drawn.values()) / number == pytest.approx(8, rel=0.05)
    # Those that came and went after the beginning: each has its own count, their mean is what was asked for.
    gone = [drawn[version] for version in range(number // 4, number - size)]
    assert sum(gone) / len(gone) == pytest.approx(8, rel=0.05)


def test_draws_depend_on_the_seed_and_on_how_many_were_drawn() -> None:
    buffers = [ReplayBuffer(50, 8) for _ in range(3)]
    for buffer in buffers:
        buffer.add([rollout(i) for i in range(50)])
    first, again, other = (
        [e.version for _ in range(3) for e in b.draw(8, seed)] for b, seed in zip(buffers, (1, 1, 2), strict=True)
    )
    assert first == again
    assert first != other
    assert first[:8] != first[8:16]


def test_a_saved_buffer_goes_on_where_it_was(tmp_path: Path) -> None:
    buffer = ReplayBuffer(5, 8)
    buffer.add([rollout(i) for i in range(7)])
    cut = Trajectory.rollout(SPACE, (1, 2, 3), (4, SPACE.bkspc, 5), floor=3).score_prompt()
    buffer.add([Experience(cut, 40)])
    buffer.draw(9, seed=3)
    buffer.save(tmp_path / "replay.safetensors")
    restored = ReplayBuffer(5, 8)
    restored.load(tmp_path / "replay.safetensors", SPACE)
    assert restored.rollouts == buffer.rollouts
    assert (restored.made, restored.drawn) == (8, 9)
    assert restored.draw(20, seed=3) == buffer.draw(20, seed=3)


def test_a_rollout_is_right_if_its_final_text_is_the_examples() -> None:
    """The example is 4 5 | 6 7: deleted tokens don't matter, a text that was cut is not right, a changed prompt is not either."""
    answer = Example((4, 5), (6, 7), is_text=False)
    bkspc, eos = SPACE.bkspc, SPACE.eos
    actions = {
        (6, 7, eos): True,
        (6, 8, bkspc, 7, eos): True,
        (bkspc, 5, 6, 7, eos): True,
        (6, eos): False,
        (6, 7, 7, eos): False,
        (bkspc, 9, 6, 7, eos): False,
        (6, 7): False,
        (6, 7, 1): False,
    }
    for made, expected in actions.items():
        assert is_right(Trajectory.rollout(SPACE, answer.prompt, made), answer) is expected, made
    text = Trajectory.rollout(SPACE, (4, 5), (6, 7, eos))
    assert is_right(text, Example((4,), (5, 6, 7), is_text=True)) is None


def test_a_buffer_knows_which_rollouts_are_right_and_an_older_file_does_not(tmp_path: Path) -> None:
    buffer, path = ReplayBuffer(5, 8), tmp_path / "replay.safetensors"
    buffer.add([replace(rollout(i), right=right) for i, right in enumerate((True, False, None))])
    buffer.save(path)
    restored = ReplayBuffer(5, 8)
    restored.load(path, SPACE)
    assert [e.right for e in restored.rollouts] == [True, False, None]
    save_file({name: tensor for name, tensor in load_file(path).items() if name != "right"}, path)
    restored.load(path, SPACE)
    assert restored.rollouts == [rollout(i) for i in range(3)]


def test_an_empty_buffer_can_be_saved(tmp_path: Path) -> None:
    ReplayBuffer(5, 8).save(tmp_path / "replay.safetensors")
    restored = ReplayBuffer(5, 8)
    restored.load(tmp_path / "replay.safetensors", SPACE)
    assert (len(restored), restored.made, restored.drawn) == (0, 0, 0)


def test_a_run_makes_as_many_rollouts_as_reuse_asks_for(tmp_path: Path) -> None:
    """Forty steps of 4 draw 160; at 5 uses each that is 32 rollouts, made 8 at a time."""
    run = trainer(tmp_path, max_steps=40, replay_reuse=5, replay_size=20)
    run.train()
    buffer = run.on_policy.buffer
    assert (buffer.drawn, buffer.made, len(buffer)) == (160, 32, 20)
    versions = [experience.version for experience in buffer.rollouts]
    assert versions == sorted(versions)
    assert versions[-1] > versions[0]
    logged = run.state.log_history[-2]
    assert logged["replay/reuse"] == pytest.approx(5)
    assert logged["replay/age"] == pytest.approx(39 - sum(versions) / 20)


def test_a_wrong_end_is_corrected_by_deleting_or_by_the_next_token() -> None:
    """The answer is 4 5 | 6 7. A text that is no beginning of it must be deleted, one that ended early must go on."""
    answer, bkspc, eos = Example((4, 5), (6, 7), is_text=False), SPACE.bkspc, SPACE.eos
    for actions, action in (
        ((6, 7, eos), None),  # right
        ((6, 8, eos), bkspc),
        ((6, 7, 8, eos), bkspc),
        ((6, eos), 7),  # too early
        ((eos,), 6),
        ((bkspc, 9, 6, 7, eos), bkspc),  # another question
        ((bkspc, eos), 5),
        ((6, 8), None),  # cut: the policy did not end there
    ):
        made = Trajectory.rollout(SPACE, answer.prompt, actions)
        assert right_action(made, answer) == action, actions
        correct = correction(Experience(made, 0, right_action=action), max_length=10)
        if action is None:
            assert correct is None
        else:
            assert correct is not None
            assert correct.initial == made.final_state.tokens[:-1]
            assert (correct.chosen, correct.executed) == ((action,), (eos,))
            assert correction(Experience(made, 0, right_action=action), max_length=len(correct.initial)) is None
    assert right_action(Trajectory.rollout(SPACE, (4,), (9, eos)), Example((4,), (5,), is_text=True)) is None
    # Cut to six nodes for the buffer, the rollout stands at 4 5 6, a right beginning: its own end is not known any more.
    whole = Trajectory.rollout(SPACE, answer.prompt, (6, 9, bkspc, 9, bkspc, 7, 8, eos))
    assert right_action(whole, answer) == bkspc
    assert whole.truncate(6).final_state.tokens == (4, 5, 6, eos)
    assert correction(Experience(whole.truncate(6), 0, right_action=bkspc), max_length=6) is None


def test_a_buffer_keeps_what_was_right(tmp_path: Path) -> None:
    buffer = ReplayBuffer(size=3, reuse=2)
    buffer.add([replace(rollout(i), right_action=action) for i, action in enumerate((7, None, SPACE.bkspc))])
    buffer.save(path := tmp_path / "replay.safetensors")
    restored = ReplayBuffer(size=3, reuse=2)
    restored.load(path, SPACE)
    assert [e.right_action for e in restored.rollouts] == [7, None, SPACE.bkspc]
