"""Transitions as points: which are drawn, their rewards, distances and slopes."""

import re
from collections import Counter

import pytest
import torch
from torch import Tensor

from sequencematch.core.encoding import Encoding, encode
from sequencematch.core.mdp import Trajectory
from sequencematch.core.objectives import Scores, implied_reward
from sequencematch.core.transitions import (
    STAY,
    Transitions,
    draw_transitions,
    segment_slopes,
    transition_distance,
    transition_reward,
)
from tests.strategies import SPACE

GAMMA = 0.5
BOS = 4
#: Two decisions of data, and a rollout of four, the first of which its prompt made.
DATA = Trajectory.demonstration(SPACE, (BOS,), (0,))
ROLLOUT = Trajectory.rollout(SPACE, (BOS, 1), (0, SPACE.bkspc, SPACE.eos)).score_prompt()


def draw(encoding: Encoding, generator: torch.Generator, points: int = 100, segments: int = 0) -> Transitions:
    return draw_transitions(encoding, 1, points=points, segments=segments, gamma=GAMMA, generator=generator)


def places(transitions: Transitions) -> list[tuple[int, int, int]]:
    columns = (transitions.trajectory, transitions.step, transitions.action)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_all_transitions_by_hand(generator: torch.Generator) -> None:
    """Data: 0, <eos>, then it stays. The rollout: its own 0, <bkspc>, <eos>, then it stays; the prompt's 1 is not its own."""
    encoding = encode([DATA, ROLLOUT])
    assert ROLLOUT.policy_chosen == (False, True, True, True)
    assert places(draw(encoding, generator)) == [
        (0, 0, 0),
        (0, 1, SPACE.eos),
        (0, 2, STAY),
        (1, 1, 0),
        (1, 2, SPACE.bkspc),
        (1, 3, SPACE.eos),
        (1, 4, STAY),
    ]


def test_rewards_by_hand(generator: torch.Generator) -> None:
    """r = ℓ − ½ V(s'): 1 − ½·4 = −1 and 3 − ½·6 = 0; in the absorbing state (1 − ½)·6 = 3."""
    scores = Scores(
        torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 4.0, 6.0]]), torch.tensor([2]), torch.tensor([[False, False]])
    )
    transitions = draw(encode([DATA]), generator)
    found = transition_reward(scores, transitions)
    assert {int(t): float(r) for t, r in zip(transitions.step, found, strict=True)} == {0: -1.0, 1: 0.0, 2: 3.0}


def test_distances_by_hand() -> None:
    """(0, 0) and (3, 4) are 5 apart, and 1 more where actions differ."""
    features = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    found = transition_distance(features, torch.tensor([7, 7, 8]))
    assert found.tolist() == [[0, 5, 1], [5, 0, 6], [1, 6, 0]]


def test_slopes_by_hand() -> None:
    """r(z) = z₁² + 3 z₂ has the gradient (2 z₁, 3); halfway from z₁ = 0 to z₁ = 4 that is (4, 3), of length 5."""
    features = torch.tensor([[0.0, 1.0], [4.0, 9.0]])
    none = torch.zeros(0, dtype=torch.long)
    transitions = Transitions(none, none, none, torch.tensor([[0, 1], [1, 1]]), torch.tensor([0.5, 0.5]), GAMMA)
    weight = torch.tensor(3.0, requires_grad=True)
    found = segment_slopes(lambda z: z[:, 0] ** 2 + weight * z[:, 1], features, transitions)
    assert found.tolist() == [25, 73]
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    assert float(gradient) == 12  # d/dw of w², twice


def test_padding_and_packing_do_not_matter(generator: torch.Generator) -> None:
    """A longer neighbour pads the data; packed rows are drawn from as padded ones are."""
    packed = encode([DATA, ROLLOUT], row_length=16)
    assert places(draw(packed, generator)) == places(draw(encode([DATA, ROLLOUT]), generator))
    alone = places(draw(encode([DATA]), generator))
    assert alone == [place for place in places(draw(packed, generator)) if place[0] == 0]


def test_rewards_are_those_of_the_loss(generator: torch.Generator) -> None:
    encoding = encode([DATA, ROLLOUT])
    logits = torch.randn(2, 5, SPACE.size, generator=generator, dtype=torch.float64)
    scores = Scores.from_logits(logits, encoding)
    transitions = draw(encoding, generator)
    rewards = implied_reward(scores, GAMMA)
    for b, t, action, found in zip(
        transitions.trajectory,
        transitions.step,
        transitions.action,
        transition_reward(scores, transitions),
        strict=True,
    ):
        wanted = (1 - GAMMA) * scores.final_value[b] if action == STAY else rewards[b, t]
        assert float(found) == float(wanted)


def test_a_draw_is_without_repeats_and_every_transition_is_as_likely() -> None:
    encoding, counts = encode([DATA, ROLLOUT]), Counter[tuple[int, int, int]]()
    for seed in range(700):
        drawn = places(draw(encoding, torch.Generator().manual_seed(seed), points=3))
        assert len(set(drawn)) == 3
        counts.update(drawn)
    # 300 expected of 700 draws with probability 3/7, within four standard deviations of a binomial count.
    assert len(counts) == 7
    assert all(abs(count - 300) <= 4 * (700 * 3 / 7 * 4 / 7) ** 0.5 for count in counts.values())


def test_equal_seeds_draw_alike_and_segments_join_decisions() -> None:
    encoding = encode([DATA, ROLLOUT])
    first, again, other = (draw(encoding, torch.Generator().manual_seed(s), segments=50) for s in (3, 3, 4))
    assert first.segment.shape == (50, 2)
    assert torch.equal(first.segment, again.segment)
    assert torch.equal(first.share, again.share)
    assert not torch.equal(first.share, other.share)
    assert bool((first.action[first.segment] != STAY).all())
    assert bool(((first.share >= 0) & (first.share < 1)).all())


def test_the_reward_of_a_pair_under_noise_depends_on_the_token_executed(generator: torch.Generator) -> None:
    """Why s' is part of a point: without it, both visits of <bos> have distance 0 and two rewards."""
    noised = Trajectory(SPACE, (BOS,), (0, SPACE.bkspc, 0, SPACE.eos), (1, SPACE.bkspc, 0, SPACE.eos), (False,) * 4)
    encoding = encode([noised])
    logits = torch.randn(encoding.tokens.numel(), SPACE.size, generator=generator)
    scores = Scores.from_logits(logits[encoding.visit], encoding)
    rewards, value = implied_reward(scores, GAMMA)[0].tolist(), scores.value[0].tolist()
    assert encoding.visit[0, 0] == encoding.visit[0, 2]
    assert rewards[0] - rewards[2] == pytest.approx(GAMMA * (value[3] - value[1]), rel=1e-5)
    assert abs(rewards[0] - rewards[2]) > 0.01


def test_no_gradient_passes_through_the_geometry() -> None:
    features = torch.randn(4, 3, requires_grad=True)
    transitions = Transitions(
        *(torch.zeros(0, dtype=torch.long),) * 3, torch.tensor([[0, 1]]), torch.tensor([0.3]), 0.5
    )

    def reward(z: Tensor) -> Tensor:
        return (z**3).sum(1)

    assert not transition_distance(features, torch.zeros(4, dtype=torch.long)).requires_grad
    slopes = segment_slopes(reward, features, transitions)
    assert not slopes.requires_grad or torch.autograd.grad(slopes.sum(), features, allow_unused=True)[0] is None


def test_too_few_points_are_refused(generator: torch.Generator) -> None:
    with pytest.raises(
        ValueError, match=re.escape("`points` must be at least 2: rewards are compared between points.")
    ):
        draw(encode([DATA]), generator, points=1)
