"""Batches are begun as early as their age allows, and their due steps are predicted from counters."""

import random
from dataclasses import replace

import pytest

from sequencematch.training.replay import ReplayBuffer
from sequencematch.training.rollouts.ahead import Outlook

#: 8 rollouts at a time, each drawn twice on average, 4 a step: a batch lasts 4 steps.
FOUR = Outlook(step=0, first_step=0, last_step=99, made=0, drawn=0, per_step=4, batch=8, reuse=2.0)


def test_a_batch_that_lasts_four_steps_is_due_every_fourth_step() -> None:
    assert FOUR.lasts == 4
    assert [FOUR.due(first) for first in (0, 8, 16, 24)] == [0, 4, 8, 12]
    later = replace(FOUR, step=6, made=16, drawn=24)
    assert [later.due(first) for first in (16, 24)] == [8, 12]


def test_what_is_upcoming_lies_within_the_lead_and_within_the_run() -> None:
    assert list(FOUR.upcoming(0)) == [(0, 0)]
    assert list(FOUR.upcoming(3)) == [(0, 0)]
    assert list(FOUR.upcoming(4)) == [(0, 0), (8, 4)]
    assert list(replace(FOUR, last_step=11).upcoming(99)) == [(0, 0), (8, 4), (16, 8)]


def test_during_cloning_the_first_batch_is_due_at_the_first_step_that_draws() -> None:
    cloning = replace(FOUR, step=10, first_step=20)
    assert list(cloning.upcoming(9)) == []
    assert list(cloning.upcoming(10)) == [(0, 20)]
    assert list(replace(cloning, step=16).upcoming(8)) == [(0, 20), (8, 24)]


def test_a_batch_that_lasts_less_than_a_step_is_due_with_others() -> None:
    """3 rollouts at a time, each drawn once, 8 a step: a step needs two or three batches."""
    many = replace(FOUR, batch=3, reuse=1.0, per_step=8)
    assert many.lasts == 1
    assert list(many.upcoming(1)) == [(0, 0), (3, 0), (6, 0), (9, 1), (12, 1), (15, 1)]


@pytest.mark.parametrize("seed", range(40))
def test_predicted_steps_are_those_at_which_the_buffer_asks(seed: int) -> None:
    """The oracle is the buffer itself. With smaller last batches of an epoch, batches are due later, never earlier."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    batch, per_step = chance.randrange(1, 12), chance.randrange(1, 12)
    reuse, first_step = chance.choice([0.5, 1.0, 2.5, 8.0]), chance.randrange(5)
    is_even = seed % 2 == 0
    buffer, due, predictions = ReplayBuffer(1000, reuse), {}, []
    for step in range(40):
        predictions.append(Outlook(step, first_step, 39, buffer.made, buffer.drawn, per_step, batch, reuse))
        count = per_step if is_even or chance.random() < 0.8 else chance.randrange(1, per_step + 1)
        if step < first_step:
            continue
        while buffer.is_due(count):
            due[buffer.made] = step
            buffer.rollouts, buffer.made = [None], buffer.made + batch  # type: ignore[list-item]
        buffer.drawn += count
    for outlook in predictions:
        for first, step in due.items():
            if first >= outlook.made:
                assert outlook.due(first) == step if is_even else outlook.due(first) <= step
    upcoming = [first for first, _ in predictions[0].upcoming(40)]
    assert upcoming == list(due) if is_even else set(upcoming) >= set(due)
