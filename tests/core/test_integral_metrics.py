"""Penalties on the reward: Lipschitz, slopes, the norm of a kernel's Hilbert space; by hand, by loops, and in the loss."""

import math
import re

import pytest
import torch
from torch import Tensor

from sequencematch.core.divergences import CHI2, CHI2_MIXTURE
from sequencematch.core.integral_metrics import (
    INTEGRAL_METRICS,
    MMD,
    WASSERSTEIN,
    IntegralMetric,
    Points,
    hilbert_norm_squared,
    laplace_kernel,
    lipschitz_excess,
    lipschitz_penalty,
    mmd,
    slope_penalty,
    wasserstein,
)
from sequencematch.core.objectives import Scores, sequencematch_loss
from sequencematch.core.transitions import transition_distance

every_metric = pytest.mark.parametrize("metric", INTEGRAL_METRICS.values(), ids=INTEGRAL_METRICS.keys())


def some_points(metric: IntegralMetric, generator: torch.Generator, count: int = 6, *, slopes: bool = False) -> Points:
    """Rewards that leave the ball, at random places."""
    features = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    action = torch.randint(3, (count,), generator=generator)
    reward = 4 * torch.randn(count, generator=generator, dtype=torch.float64)
    slope_squared = 4 * torch.rand(5, generator=generator, dtype=torch.float64) if slopes else None
    return Points(reward, metric.matrix_of(transition_distance(features, action)), slope_squared)


def trajectory() -> Scores:
    """One decision: ℓ = 1, V(s₀) = 2, V(s₁) = 4; with γ = ½, r = 1 − ½·4 = −1, and (1 − γ) V(s₁) = 2 in the absorbing state."""
    return Scores(torch.tensor([[1.0]]), torch.tensor([[2.0, 4.0]]), torch.tensor([1]), torch.tensor([[False]]))


def test_the_lipschitz_penalty_by_hand() -> None:
    """R rises by 3 over a distance of 1, and by 2 over a distance of 2: (2² + 0²) over 3² ordered pairs."""
    reward = torch.tensor([0.0, 3.0, 1.0])
    distance = torch.tensor([[0.0, 1.0, 5.0], [1.0, 0.0, 2.0], [5.0, 2.0, 0.0]])
    assert lipschitz_excess(reward, distance).tolist() == [[0, 0, 0], [2, 0, 0], [0, 0, 0]]
    assert float(lipschitz_penalty(reward, distance)) == pytest.approx(4 / 9)


def test_the_slope_penalty_by_hand() -> None:
    """Slopes of 3, 1, 0.5 and 0: only the first is too steep, by 2. No slopes, no penalty."""
    slope_squared = torch.tensor([9.0, 1.0, 0.25, 0.0], requires_grad=True)
    penalty = slope_penalty(slope_squared)
    assert float(penalty.detach()) == 4 / 4
    (gradient,) = torch.autograd.grad(penalty, slope_squared)
    # d/ds² of (s − 1)²/4 at s = 3: 2 (s − 1)/(2 s)/4 = 1/6; a slope of 0 has no gradient, and not NaN.
    assert gradient.tolist() == pytest.approx([1 / 6, 0, 0, 0])
    assert float(slope_penalty(torch.zeros(0))) == 0


def test_the_hilbert_norm_by_hand() -> None:
    """K = [[2, 1], [1, 2]] has the inverse [[2, −1], [−1, 2]]/3: for R = (1, 3), (2 − 3 + (−1 + 6)·3)/3 = 14/3."""
    kernel = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    assert float(hilbert_norm_squared(torch.tensor([1.0, 3.0]), kernel)) == pytest.approx(14 / 3)


def test_the_loss_by_hand() -> None:
    """The trajectory's two points at a distance of 1, with R = r at α = 1: −1 and 2. N = 1.

    A = r = −1, C = γ V(s₁) = 2, B = D = ½ V(s₀) = 1: Ĵ = ℓ − V(s₀) = −1 without a penalty.
    Wasserstein, λ = 10: R rises by 3, by 2 too much: P = 10 · 2²/2² = 10.
    MMD, K = 1 on the diagonal: P = ¼ (1 + 4) = 1.25.
    """
    reward, apart = torch.tensor([-1.0, 2.0]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    for divergence, matrix, penalty in ((WASSERSTEIN, apart, 10.0), (MMD, torch.eye(2), 1.25)):
        result = sequencematch_loss(
            trajectory(), None, divergence=divergence, alpha=1.0, gamma=0.5, points=Points(reward, matrix)
        )
        terms = (result.data_reward, result.data_tail, result.data_value, result.model_value, result.reward_penalty)
        assert [float(term) for term in terms] == [-1.0, 2.0, 1.0, 1.0, penalty]
        assert float(result.loss) == 1 + penalty


def test_the_penalty_is_psi_of_the_scaled_reward_over_alpha() -> None:
    """At α = ½ the rewards −1 and 2 are −½ and 1: they rise by 1.5, by ½ too much: P = 10 · ½²/4 / ½ = 1.25."""
    points = Points(torch.tensor([-1.0, 2.0]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([16.0]))
    assert float(WASSERSTEIN.psi(Points(points.reward / 2, points.matrix)) / 0.5) == 1.25
    # A slope of 4 is one of 2: (2 − 1)² = 1, so 10 (1/16 + 1)/½.
    assert float(WASSERSTEIN.penalty(points, 0.5)) == pytest.approx(10 * (1 / 16 + 1) / 0.5)
    assert float(MMD.penalty(Points(points.reward, torch.eye(2)), 0.5)) == pytest.approx(0.25 * 5 * 0.25 / 0.5)


@pytest.mark.parametrize("generator", [0, 1, 2], indirect=True)
def test_both_penalties_equal_loops(generator: torch.Generator) -> None:
    points = some_points(WASSERSTEIN, generator)
    reward, distance = points.reward.tolist(), points.matrix.tolist()
    pairs = [(i, j) for i in range(6) for j in range(6)]
    expected = sum(max(reward[i] - reward[j] - distance[i][j], 0) ** 2 for i, j in pairs) / 36
    assert expected > 0.1
    assert float(lipschitz_penalty(points.reward, points.matrix)) == pytest.approx(expected, rel=1e-12)
    kernel = laplace_kernel(points.matrix, ridge=0.0)
    inverse = torch.linalg.inv(kernel).tolist()
    norm = sum(reward[i] * inverse[i][j] * reward[j] for i, j in pairs)
    assert float(hilbert_norm_squared(points.reward, kernel)) == pytest.approx(norm, rel=1e-9)


@every_metric
def test_gradients_pass_gradcheck(metric: IntegralMetric, generator: torch.Generator) -> None:
    points = some_points(metric, generator, slopes=metric.uses_slopes)

    def penalty(reward: Tensor, slope_squared: Tensor | None = None) -> Tensor:
        return metric.penalty(Points(reward, points.matrix, slope_squared), 0.7)

    inputs = [x.clone().requires_grad_() for x in (points.reward, points.slope_squared) if x is not None]
    assert torch.autograd.gradcheck(penalty, inputs)


@every_metric
def test_phi_is_the_identity_and_its_f_allows_no_difference(metric: IntegralMetric) -> None:
    x = torch.tensor([-3.0, 0.0, 2.0])
    assert metric(x).tolist() == x.tolist()
    assert metric.phi_prime(x).tolist() == [1, 1, 1]
    assert metric.f(torch.tensor([0.5, 1.0, 2.0])).tolist() == [math.inf, 0, math.inf]
    assert metric.on_policy == 0


def test_a_lipschitz_reward_is_not_penalised_and_a_constant_is_free(generator: torch.Generator) -> None:
    """r = half the distance from the first point is 1-Lipschitz. For MMD no reward but 0 is free, constants included."""
    points = some_points(WASSERSTEIN, generator)
    inside = Points(points.matrix[0] / 2, points.matrix, torch.tensor([0.0, 0.99], dtype=torch.float64))
    assert float(WASSERSTEIN.penalty(inside, 1.0)) == 0
    shifted = Points(points.reward + 7, points.matrix)
    torch.testing.assert_close(WASSERSTEIN.penalty(shifted, 1.0), WASSERSTEIN.penalty(points, 1.0))
    constant = Points(torch.full_like(points.reward, 7.0), laplace_kernel(points.matrix))
    assert float(MMD.penalty(constant, 1.0)) > 1


@every_metric
def test_the_order_of_points_does_not_matter(metric: IntegralMetric, generator: torch.Generator) -> None:
    points = some_points(metric, generator)
    order = torch.randperm(6, generator=generator)
    moved = Points(points.reward[order], points.matrix[order][:, order])
    torch.testing.assert_close(metric.penalty(moved, 0.3), metric.penalty(points, 0.3))


def test_fewer_points_and_a_ridge_give_a_lower_bound_of_the_norm(generator: torch.Generator) -> None:
    points = some_points(WASSERSTEIN, generator, count=12)
    kernel = laplace_kernel(points.matrix, ridge=0.0)
    norms = [float(hilbert_norm_squared(points.reward[:n], kernel[:n, :n])) for n in range(2, 13)]
    assert norms == sorted(norms)
    assert float(hilbert_norm_squared(points.reward, laplace_kernel(points.matrix, ridge=0.1))) < norms[-1]


def test_a_point_that_occurs_twice_needs_the_ridge() -> None:
    twice, apart = torch.tensor([1.0, 1.0]), torch.zeros(2, 2)
    assert math.isnan(float(hilbert_norm_squared(twice, laplace_kernel(apart, ridge=0.0))))
    # [[1 + ε, 1], [1, 1 + ε]] has (1, 1) as an eigenvector, of eigenvalue 2 + ε.
    assert float(hilbert_norm_squared(twice, laplace_kernel(apart))) == pytest.approx(2 / 2.001, rel=1e-6)


def test_the_laplace_kernel_is_positive_definite_on_states_and_actions(generator: torch.Generator) -> None:
    features = torch.randn(40, 20, generator=generator, dtype=torch.float64) / 5
    distance = transition_distance(features, torch.randint(4, (40,), generator=generator))
    assert float(torch.linalg.eigvalsh(laplace_kernel(distance, ridge=0.0))[0]) > 0


@every_metric
def test_two_half_batches_with_the_same_points_accumulate_to_one(
    metric: IntegralMetric, generator: torch.Generator
) -> None:
    """P is weighted by each batch's share of data trajectories: two halves that see the same points see one P."""
    value = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    logit = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    data = Scores(logit, value, torch.tensor([3, 1, 2, 3]), torch.zeros(4, 3, dtype=torch.bool))
    points = some_points(metric, generator)
    whole = sequencematch_loss(data, None, divergence=metric, alpha=0.3, gamma=0.9, points=points)
    halves = [
        sequencematch_loss(part, None, divergence=metric, alpha=0.3, gamma=0.9, num_items=9, points=points)
        for part in (data[:1], data[1:])
    ]
    torch.testing.assert_close(sum(half.loss for half in halves), whole.loss)
    torch.testing.assert_close(sum(half.reward_penalty for half in halves), whole.reward_penalty)
    assert float(whole.reward_penalty) > 0.01


def test_other_divergences_have_no_such_penalty() -> None:
    result = sequencematch_loss(trajectory(), None, divergence=CHI2, alpha=1.0, gamma=0.5)
    assert float(result.reward_penalty) == 0
    # A = φ(−1) = −1.25, C = φ(2) = 1, B = D = 1.
    assert float(result.loss) == 2.25


@every_metric
def test_half_precision_rewards_give_a_float32_loss(metric: IntegralMetric, generator: torch.Generator) -> None:
    points = some_points(metric, generator)
    single = Points(points.reward.float(), points.matrix)
    penalty = metric.penalty(single, 0.3)
    assert penalty.dtype == torch.float32
    torch.testing.assert_close(
        penalty.double(), metric.penalty(points, 0.3), rtol=1e-5, atol=0
    )  # differences of rewards


def test_wrong_arguments_are_refused() -> None:
    points = Points(torch.zeros(2), torch.ones(2, 2))
    with pytest.raises(
        ValueError, match=re.escape("`points` must be given for mmd, which reads the reward at points.")
    ):
        sequencematch_loss(trajectory(), None, divergence=MMD, alpha=1.0, gamma=0.5)
    with pytest.raises(ValueError, match=re.escape("`points` would be ignored: chi2_mixture is an f-divergence.")):
        sequencematch_loss(trajectory(), trajectory(), divergence=CHI2_MIXTURE, alpha=1.0, gamma=0.5, points=points)
    with pytest.raises(ValueError, match=re.escape("`lipschitz_weight` must be positive and finite")):
        wasserstein(lipschitz_weight=0.0)
    with pytest.raises(ValueError, match=re.escape("`coefficient` must be positive and finite")):
        mmd(coefficient=math.inf)
    with pytest.raises(
        ValueError, match=re.escape("`slope_squared` would be ignored: mmd reads rewards at points alone.")
    ):
        MMD.penalty(Points(torch.zeros(2), torch.eye(2), torch.zeros(1)), 1.0)
