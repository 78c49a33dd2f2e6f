"""Divergences between occupancy measures. Each is a value: the φ of Eq. 4, its f, its domain and its extension (§3.2, App. D)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Divergence:
    """An f-divergence D_f(ρ_θ, ρ_data) = E_data[f(ρ_θ/ρ_data)] and the concave φ(x) = −f*(−x) it puts into Eq. 4   (App. D).

    Every f is shifted so that f(1) = f'(1) = 0, hence φ(0) = 0 and φ'(0) = 1. On `domain` φ is the conjugate. Left of
    `domain[0] + delta`, where the conjugate is undefined or too steep to train on, φ continues as a line. Its slope is φ' at
    that point, which makes φ C¹, or `slope_below` if given. `on_policy` is the weight κ of an additional term κ E_θ[r²], zero
    except for the χ²-mixture, where f(t) = sup_x φ(x) − t (x + κ x²).
    """

    name: str
    f: Callable[[Tensor], Tensor]
    phi: Callable[[Tensor], Tensor]
    phi_prime: Callable[[Tensor], Tensor]
    domain: tuple[float, float] = (-math.inf, math.inf)
    delta: float = 0.0
    slope_below: float | None = None
    on_policy: float = 0.0
    #: The slope of φ left of `extends_below`.
    extension_slope: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        ends = math.isfinite(self.domain[0])
        if not ends and self.delta:
            raise ValueError(
                f"`delta` would be ignored: the φ of {self.name} is defined everywhere. Got delta={self.delta}."
            )
        if ends and self.slope_below is None and not 0 < self.delta < -self.domain[0]:
            raise ValueError(
                f"`delta` must lie between 0 and {-self.domain[0]:.3g} for {self.name}, whose φ ends at {self.domain[0]:.3g}: "
                f"the extension has to start inside the domain and left of 0. Got delta={self.delta}."
            )
        if ends:
            edge = torch.tensor(self.extends_below, dtype=torch.float64)
            slope = float(self.phi_prime(edge)) if self.slope_below is None else self.slope_below
            object.__setattr__(self, "extension_slope", slope)

    @property
    def extends_below(self) -> float:
        """The point left of which φ is a line; −∞ where φ is defined everywhere."""
        return self.domain[0] + self.delta

    def __call__(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """φ(x), extended to all x."""
        if not math.isfinite(self.extends_below):
            return self.phi(x)
        inside = x.clamp(min=self.extends_below)
        return self.phi(inside) + self.extension_slope * (x - inside)


def reverse_kl() -> Divergence:
    """KL(ρ_θ‖ρ_data): f(t) = t log t − t + 1, φ(x) = 1 − e^(−x)   (App. D.2, there called forward)."""
    return Divergence(
        "reverse_kl",
        f=lambda t: torch.xlogy(t, t) - t + 1,
        phi=lambda x: -torch.expm1(-x),
        phi_prime=lambda x: torch.exp(-x),
    )


def forward_kl(delta: float = 0.01) -> Divergence:
    """KL(ρ_data‖ρ_θ): f(t) = −log t + t − 1, φ(x) = log(1 + x) for x > −1   (φ by App. D.1; the paper prints none)."""
    return Divergence(
        "forward_kl",
        f=lambda t: -torch.log(t) + t - 1,
        phi=torch.log1p,
        phi_prime=lambda x: 1 / (1 + x),
        domain=(-1.0, math.inf),
        delta=delta,
    )


def js(delta: float = 0.01) -> Divergence:
    """Twice Jensen–Shannon: f(t) = −(t + 1) log((t + 1)/2) + t log t, φ(x) = log(2 − e^(−x)) for x > −log 2   (App. D.3)."""
    return Divergence(
        "js",
        f=lambda t: -(t + 1) * torch.log((t + 1) / 2) + torch.xlogy(t, t),
        phi=lambda x: torch.log1p(-torch.expm1(-x)),
        phi_prime=lambda x: 1 / (2 * torch.exp(x) - 1),
        domain=(-math.log(2), math.inf),
        delta=delta,
    )


def hellinger(delta: float = 0.1) -> Divergence:
    """Squared Hellinger: f(t) = (√t − 1)², φ(x) = x/(1 + x) for x > −1   (φ by App. D.1; not in the paper)."""
    return Divergence(
        "hellinger",
        f=lambda t: (torch.sqrt(t) - 1) ** 2,
        phi=lambda x: x / (1 + x),
        phi_prime=lambda x: (1 + x) ** -2,
        domain=(-1.0, math.inf),
        delta=delta,
    )


def chi2() -> Divergence:
    """Pearson χ²(ρ_θ‖ρ_data): f(t) = (t − 1)², φ(x) = x − x²/4   (App. D.4).

    The conjugate over ratios t ≥ 0 is constant from x = 2 on; like the paper we keep the parabola, which falls there.
    """
    return Divergence(
        "chi2",
        f=lambda t: (t - 1) ** 2,
        phi=lambda x: x - x**2 / 4,
        phi_prime=lambda x: 1 - x / 2,
        domain=(-math.inf, 2.0),
    )


def chi2_mixture(mixture_weight: float = 0.5, coefficient: float = 0.5) -> Divergence:
    """χ² between data and the mixture of data and model: φ(x) = x − cβx² and κ = c(1 − β)   (§4, App. D.4).

    ψ(r) = cβ E_data[r²] + c(1 − β) E_θ[r²] with c = `coefficient` and β = `mixture_weight` gives
    f(t) = (t − 1)² / (4c (β + (1 − β)t)); at c = β = ½ that is 2χ²(ρ_data‖(ρ_data + ρ_θ)/2). β = 1 is not `chi2`, whose
    coefficient is ¼, unless c = ¼ as well.
    """
    if not 0 < mixture_weight <= 1:
        raise ValueError(
            f"`mixture_weight` must lie in (0, 1]: it is the share β of data in the mixture. "
            f"Got {mixture_weight}. The paper uses 0.5."
        )
    if not coefficient > 0:
        raise ValueError(
            f"`coefficient` must be positive: it scales the penalty on rewards. Got {coefficient}. The paper uses 0.5."
        )
    on_data, on_policy = coefficient * mixture_weight, coefficient * (1 - mixture_weight)
    return Divergence(
        "chi2_mixture",
        f=lambda t: (t - 1) ** 2 / (4 * (on_data + on_policy * t)),
        phi=lambda x: x - on_data * x**2,
        phi_prime=lambda x: 1 - 2 * on_data * x,
        domain=(-math.inf, 1 / (2 * on_data)),
        on_policy=on_policy,
    )


def total_variation(slope_below: float = 100.0) -> Divergence:
    """Total variation: f(t) = |t − 1|/2, φ(x) = min(x, ½) for x ≥ −½   (φ by App. D.1; not in the paper).

    Not C¹: φ has corners at ½ and at −½. The domain ends at −½; below, a line of slope `slope_below` > 1 replaces −∞. The
    gradient does not show how far outside the domain a reward lies: use it for comparison, not for training.
    """
    if not 1 < slope_below < math.inf:
        raise ValueError(
            f"`slope_below` must be finite and exceed 1, the slope inside the domain, or nothing is penalised. Got {slope_below}."
        )
    return Divergence(
        "total_variation",
        f=lambda t: (t - 1).abs() / 2,
        phi=lambda x: x.clamp(max=0.5),
        phi_prime=lambda x: (x < 0.5).to(x.dtype),
        domain=(-0.5, math.inf),
        slope_below=slope_below,
    )


REVERSE_KL, FORWARD_KL, JS, HELLINGER, CHI2, CHI2_MIXTURE, TOTAL_VARIATION = (
    make() for make in (reverse_kl, forward_kl, js, hellinger, chi2, chi2_mixture, total_variation)
)

#: Every divergence by name, with its default parameters.
DIVERGENCES: Mapping[str, Divergence] = MappingProxyType(
    {d.name: d for d in (REVERSE_KL, FORWARD_KL, JS, HELLINGER, CHI2, CHI2_MIXTURE, TOTAL_VARIATION)}
)
