"""App. D: every φ against its f, by brute force."""

import dataclasses
import math
import re

import pytest
import torch
from torch import Tensor

from sequencematch.core.divergences import (
    CHI2,
    CHI2_MIXTURE,
    DIVERGENCES,
    HELLINGER,
    JS,
    TOTAL_VARIATION,
    Divergence,
    chi2_mixture,
    forward_kl,
    hellinger,
    js,
    total_variation,
)
from tests import programs

every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES.keys())
smooth = pytest.mark.parametrize(
    "divergence", [d for d in DIVERGENCES.values() if d is not TOTAL_VARIATION], ids=lambda d: d.name
)
#: Ratios t = ρ_θ/ρ_data, fine near 0 and far out, with total variation's corner: a supremum over them is off by less than 1e-6.
RATIOS = torch.cat([torch.tensor([0.0, 1.0]), torch.logspace(-9, 4, 400_001)]).double()


def points(divergence: Divergence, count: int = 41) -> Tensor:
    """Points on the domain, right of the extension."""
    low, high = max(divergence.extends_below, -3.0), min(divergence.domain[1], 3.0)
    return torch.linspace(low, high, count + 2, dtype=torch.float64)[1:-1]


def derivative(divergence: Divergence, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(divergence(x).sum(), x)[0]


def test_phi_by_hand() -> None:
    x = torch.tensor([-0.5, 0.0, 1.0], dtype=torch.float64)
    e = math.e
    expected = {
        "reverse_kl": [1 - math.sqrt(e), 0, 1 - 1 / e],
        "forward_kl": [-math.log(2), 0, math.log(2)],
        "js": [math.log(2 - math.sqrt(e)), 0, math.log(2 - 1 / e)],
        "hellinger": [-1, 0, 0.5],
        "chi2": [-0.5625, 0, 0.75],
        "chi2_mixture": [-0.5625, 0, 0.75],
        "total_variation": [-0.5, 0, 0.5],
    }
    assert expected.keys() == DIVERGENCES.keys()
    for name, values in expected.items():
        torch.testing.assert_close(
            DIVERGENCES[name](x), torch.tensor(values, dtype=torch.float64), rtol=1e-14, atol=1e-14
        )


@every_divergence
def test_phi_vanishes_at_zero_with_slope_one(divergence: Divergence) -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    assert float(divergence(zero)) == 0.0
    assert float(derivative(divergence, zero)) == pytest.approx(1.0, abs=1e-15)


@every_divergence
def test_f_vanishes_at_one_and_nowhere_falls_below(divergence: Divergence) -> None:
    """f(1) = 0 and f ≥ 0 is f'(1) = 0 for a convex f, total variation's corner included."""
    assert float(divergence.f(torch.ones(1, dtype=torch.float64))) == pytest.approx(0.0, abs=1e-15)
    assert float(divergence.f(RATIOS[2:]).min()) >= -1e-9


@pytest.mark.parametrize("divergence", [d for d in DIVERGENCES.values() if not d.on_policy], ids=lambda d: d.name)
def test_phi_is_minus_the_conjugate_of_f_at_minus_x(divergence: Divergence) -> None:
    """φ(x) = −f*(−x) = −sup_{t ≥ 0} (−x t − f(t)), the supremum taken over a fine grid of ratios."""
    f = divergence.f(RATIOS)
    for x in points(divergence):
        conjugate = (-x * RATIOS - f).max()
        assert float(divergence(x)) == pytest.approx(-float(conjugate), abs=1e-6)


@every_divergence
def test_f_is_recovered_from_phi_and_the_on_policy_weight(divergence: Divergence) -> None:
    """f(t) = sup_x φ(x) − t (x + κ x²): for the mixture, whose φ alone is not a conjugate, this is the whole statement."""
    corners = torch.tensor([-0.5, 0.5])  # total variation attains its supremum there
    x = torch.cat([corners, torch.linspace(max(divergence.extends_below, -60.0), 60.0, 2_000_001)]).double()
    phi = divergence(x)
    for t in torch.tensor([0.3, 0.7, 1.0, 1.4, 2.0], dtype=torch.float64):
        supremum = (phi - t * (x + divergence.on_policy * x**2)).max()
        assert float(supremum) == pytest.approx(float(divergence.f(t)), abs=1e-6)


def test_the_mixture_is_twice_chi_square_from_data_to_the_even_mixture() -> None:
    """2χ²(p‖m) = 2 Σ (p − m)²/m with m = (p + q)/2; as an f-divergence Σ p f(q/p)."""
    p = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    q = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    m = (p + q) / 2
    assert float((p * CHI2_MIXTURE.f(q / p)).sum()) == pytest.approx(float(2 * ((p - m) ** 2 / m).sum()), rel=1e-14)


def test_a_mixture_weight_of_one_is_chi2_only_with_a_coefficient_of_a_quarter() -> None:
    x = torch.linspace(-3, 3, 13)
    torch.testing.assert_close(chi2_mixture(mixture_weight=1.0, coefficient=0.25)(x), CHI2(x))
    assert not torch.allclose(chi2_mixture(mixture_weight=1.0)(x), CHI2(x))
    assert chi2_mixture(mixture_weight=1.0).on_policy == 0


@every_divergence
def test_phi_is_concave_everywhere(divergence: Divergence) -> None:
    """The slope never rises, across the extension too."""
    slopes = derivative(divergence, torch.linspace(-5, 5, 20_001, dtype=torch.float64))
    assert bool((slopes.diff() <= 1e-12).all())


@every_divergence
def test_phi_prime_is_the_derivative_of_phi(divergence: Divergence) -> None:
    x = points(divergence, count=200)
    torch.testing.assert_close(derivative(divergence, x), divergence.phi_prime(x))


@smooth
def test_the_extension_is_a_line_that_joins_with_equal_value_and_slope(divergence: Divergence) -> None:
    start = divergence.extends_below
    if math.isinf(start):
        assert bool(divergence(torch.tensor([-50.0])).isfinite().all())
        return
    step = 1e-9
    around = torch.tensor([start - step, start, start + step], dtype=torch.float64)
    slopes = derivative(divergence, around)
    # Second differences across the joint are what a C¹ function of curvature φ'' < 1e4 leaves.
    assert float(slopes.diff().abs().max()) < 1e4 * 2 * step * float(slopes[1])
    left = derivative(divergence, torch.tensor([start - 1, start - 100], dtype=torch.float64))
    assert left.tolist() == [divergence.extension_slope] * 2
    assert divergence.extension_slope == pytest.approx(float(slopes[1]), rel=1e-12)


def test_total_variation_has_corners() -> None:
    """Not C¹: slope 100, then 1, then 0."""
    x = torch.tensor([-0.6, -0.4, 0.4, 0.6], dtype=torch.float64)
    assert derivative(TOTAL_VARIATION, x).tolist() == [100.0, 1.0, 1.0, 0.0]


def test_the_papers_js_extension_starts_a_hundredth_right_of_minus_log_two() -> None:
    assert JS.extends_below == -math.log(2) + 0.01
    assert HELLINGER.extends_below == -0.9
    assert hellinger(delta=0.2).extends_below == -0.8
    assert forward_kl(delta=0.2).extends_below == -0.8


@pytest.mark.parametrize(
    "divergence", [d for d in DIVERGENCES.values() if math.isfinite(d.domain[1])], ids=lambda d: d.name
)
def test_right_of_the_domain_the_parabola_falls_where_no_ratio_could_be(divergence: Divergence) -> None:
    """φ' = ρ_θ/ρ_data − … changes sign exactly at the domain's end: ratios would have to be negative beyond it."""
    end = divergence.domain[1]
    slopes = derivative(divergence, torch.tensor([end - 1e-6, end + 1e-6], dtype=torch.float64))
    assert float(slopes[0]) > 0 > float(slopes[1])


def test_phi_and_the_loss_compile_into_one_graph() -> None:
    """In a process of its own: the run-time shape checker does not compile. `eager` is the backend without kernels."""
    code = """
import torch
from sequencematch.core.divergences import js
from sequencematch.core.objectives import Scores, sequencematch_loss
data = torch.randn(2, 5), torch.randn(2, 6), torch.tensor([5, 3]), torch.ones(2, 5, dtype=torch.bool)

def loss(*tensors):
    scores = Scores(*tensors)
    return sequencematch_loss(scores, scores, divergence=fresh, alpha=0.5, gamma=0.9).loss

fresh = js(delta=0.02)
x = torch.linspace(-2, 2, 9)
torch.testing.assert_close(torch.compile(fresh, fullgraph=True, backend="eager")(x), fresh(x))
torch.testing.assert_close(torch.compile(loss, backend="eager")(*data), loss(*data))
"""
    run = programs.run("-c", code)
    assert run.returncode == 0, run.stderr


@smooth
def test_small_arguments_keep_their_precision_in_float32(divergence: Divergence) -> None:
    """(1/α) φ(α r) at α = 1e-6, the direction of α → 0: relative error at float32 rounding, not at 1/α times it."""
    alpha, reward = 1e-6, torch.tensor([-8.0, 0.3, 5.0])
    exact = divergence(alpha * reward.double()) / alpha
    torch.testing.assert_close(divergence(alpha * reward).double() / alpha, exact, rtol=3e-7, atol=0)


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(
        ValueError, match=re.escape("`delta` must lie between 0 and 1 for forward_kl, whose φ ends at -1")
    ):
        forward_kl(delta=0.0)
    with pytest.raises(ValueError, match=re.escape("Got delta=0.7.")):
        js(delta=0.7)
    with pytest.raises(ValueError, match=re.escape("`mixture_weight` must lie in (0, 1]")):
        chi2_mixture(mixture_weight=0.0)
    with pytest.raises(ValueError, match=re.escape("`coefficient` must be positive")):
        chi2_mixture(coefficient=-1.0)
    with pytest.raises(ValueError, match=re.escape("`slope_below` must be finite and exceed 1")):
        total_variation(slope_below=1.0)
    assert total_variation(slope_below=1.5).extension_slope == 1.5
    with pytest.raises(ValueError, match=re.escape("`delta` would be ignored: the φ of chi2 is defined everywhere.")):
        dataclasses.replace(CHI2, delta=0.5)
