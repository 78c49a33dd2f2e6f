"""Integral probability metrics, Wasserstein and squared MMD: φ is the identity, and a penalty ψ on the reward does the rest (§3.2).

The paper names both without a construction. With R = α r, the reward in the units of φ, both are of its family

    d_ψ(ρ_data, ρ_θ) = sup_R E_data[R] − E_θ[R] − ψ(R)          and the objective is  Ĵ = γ-weighted log-likelihood − (1/α) ψ(α r).

ψ reads R at points, which are pairs (s, a), and their distances or kernel values as a matrix. Occupancies are those of Eq. 4, of
mass 1/(1 − γ). The absorbing state is a point with reward (1 − γ) V(s_T).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch.core.divergences import Divergence


@dataclass(frozen=True)
class Points:
    """Rewards at points, and the geometry of these points   (§3.2).

    `matrix` is a metric d(x_i, x_j) for Wasserstein and a kernel k(x_i, x_j) for MMD. `slope_squared` holds ‖∇r‖² between points,
    where points lie in a vector space; only Wasserstein uses it.
    """

    reward: Float[Tensor, "point"]
    matrix: Float[Tensor, "point point"]
    slope_squared: Float[Tensor, "segment"] | None = None

    def __post_init__(self) -> None:
        count = len(self.reward)
        if self.matrix.shape != (count, count):
            raise ValueError(
                f"`matrix` must hold a number for every pair of the {count} points in `reward`. Got {tuple(self.matrix.shape)}."
            )

    def scaled(self, alpha: float) -> "Points":
        """The same points with R = α r   (Eq. 4)."""
        slope_squared = None if self.slope_squared is None else alpha**2 * self.slope_squared
        return replace(self, reward=alpha * self.reward, slope_squared=slope_squared)


def _only_at_one(t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The f of φ(x) = x: sup_x x − t x is 0 at t = 1 and ∞ elsewhere."""
    return torch.where(t == 1, torch.zeros_like(t), math.inf)


def _identity(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return x


@dataclass(frozen=True)
class IntegralMetric(Divergence):
    """A divergence between occupancies that is a supremum over few rewards: sup_R E_data[R] − E_θ[R] − ψ(R)   (§3.2).

    φ(x) = x. Alone it would demand ρ_θ = ρ_data: its f is 0 at t = 1 and ∞ elsewhere. `psi` is ψ(R). `matrix_of` turns distances
    between points into the matrix that ψ reads. `uses_slopes` says whether ψ reads slopes of the reward between points, too.
    """

    f: Callable[[Tensor], Tensor] = _only_at_one
    phi: Callable[[Tensor], Tensor] = _identity
    phi_prime: Callable[[Tensor], Tensor] = torch.ones_like
    psi: Callable[[Points], Float[Tensor, ""]] = field(kw_only=True)
    matrix_of: Callable[[Float[Tensor, "point point"]], Float[Tensor, "point point"]] = field(kw_only=True)
    uses_slopes: bool = field(kw_only=True)

    def penalty(self, points: Points, alpha: float) -> Float[Tensor, ""]:
        """(1/α) ψ(α r), which the objective of one trajectory loses   (§3.2)."""
        return (self.psi(points.scaled(alpha)) / alpha).to(points.reward.dtype)


def lipschitz_excess(
    reward: Float[Tensor, "point"], distance: Float[Tensor, "point point"]
) -> Float[Tensor, "point point"]:
    """(R_i − R_j − d_ij)₊, by how much R rises faster than distance from point j to point i: 0 if R is 1-Lipschitz   (§3.2)."""
    return (reward[:, None] - reward - distance).clamp(min=0)


def lipschitz_penalty(reward: Float[Tensor, "point"], distance: Float[Tensor, "point point"]) -> Float[Tensor, ""]:
    """(1/n²) Σ_ij (R_i − R_j − d_ij)₊², the mean over all n² ordered pairs   (§3.2).

    max_R ⟨Δ, R⟩ − λ · this, for Δ = ρ_data − ρ_θ, is transport from data to policy with a quadratic cost beside the linear one:

        min_F Σ F_ij d_ij + (n²/4λ) Σ F_ij²    over F ≥ 0 with Σ_j F_ij − Σ_j F_ji = Δ_i,

    attained at F_ij = (2λ/n²) (R_i − R_j − d_ij)₊. It decreases to the Wasserstein-1 distance as λ → ∞; at finite λ it is
    larger by at most (n²/4λ) Σ F_ij² of an optimal plan F.
    """
    return (lipschitz_excess(reward, distance) ** 2).mean()


def slope_penalty(slope_squared: Float[Tensor, "segment"]) -> Float[Tensor, ""]:
    """The mean of (‖∇R‖ − 1)₊², for points in a vector space: a function with slopes of at most 1 is 1-Lipschitz   (§3.2).

    One-sided: unlike the gradient penalty of Gulrajani et al. (2017), it leaves slopes below 1 alone. No points, no penalty.
    """
    excess = slope_squared.clamp(min=1).sqrt() - 1  # clamped first: the root has no derivative at 0
    return (excess**2).sum() / max(len(excess), 1)


def hilbert_norm_squared(reward: Float[Tensor, "point"], kernel: Float[Tensor, "point point"]) -> Float[Tensor, ""]:
    """Rᵀ K⁻¹ R: ‖R‖² in the kernel's Hilbert space if these are all points, and else a lower bound of it   (§3.2).

    It is the squared norm of the smallest function that has these values; NaN unless K is positive definite. Solved in float64,
    since K is often nearly singular.
    """
    exact = reward.to(torch.float64)
    factor, failure = torch.linalg.cholesky_ex(kernel.to(torch.float64))  # without waiting for a GPU, unlike `cholesky`
    whitened: Float[Tensor, "point 1"] = torch.linalg.solve_triangular(factor, exact[:, None], upper=False)
    return torch.where(failure == 0, (whitened**2).sum(), math.nan)


def laplace_kernel(distance: Float[Tensor, "point point"], ridge: float = 1e-3) -> Float[Tensor, "point point"]:
    """k(x_i, x_j) = exp(−d_ij) + ridge · 1[i = j], positive definite for Euclidean d plus the discrete metric on actions   (§3.2).

    Points that coincide, as first decisions of a shared prompt do, make exp(−d) singular. The ridge makes it regular; it lowers
    Rᵀ K⁻¹ R, which stays a lower bound of ‖R‖².
    """
    return torch.exp(-distance) + ridge * torch.eye(len(distance), dtype=distance.dtype, device=distance.device)


def wasserstein(lipschitz_weight: float = 10.0) -> IntegralMetric:
    """Wasserstein-1, where R is 1-Lipschitz: ψ(R) = λ [mean (R_i − R_j − d_ij)₊² + mean (‖∇R‖ − 1)₊²]   (§3.2).

    λ is `lipschitz_weight`; the distance is reached as λ → ∞ (see `lipschitz_penalty`). Without slopes the second mean is left out.
    """
    if not 0 < lipschitz_weight < math.inf:
        raise ValueError(
            f"`lipschitz_weight` must be positive and finite: it is the price of rewards that are not 1-Lipschitz. Got "
            f"{lipschitz_weight}."
        )

    def psi(points: Points) -> Float[Tensor, ""]:
        outside = lipschitz_penalty(points.reward, points.matrix)
        if points.slope_squared is not None:
            outside = outside + slope_penalty(points.slope_squared)
        return lipschitz_weight * outside

    return IntegralMetric("wasserstein", psi=psi, matrix_of=_identity, uses_slopes=True)


def mmd(coefficient: float = 0.25) -> IntegralMetric:
    """Squared MMD, ‖μ_data − μ_θ‖² = Δᵀ K Δ for Δ = ρ_data − ρ_θ: ψ(R) = c ‖R‖² with c = ¼   (§3.2).

    sup_R ⟨Δ, R⟩ − c Rᵀ K⁻¹ R = Δᵀ K Δ/(4c), attained at R = K Δ/(2c): no ball and no limit is needed, whereas MMD itself is the
    supremum over ‖R‖ ≤ 1. With K = diag(1/ρ_data) it is Pearson's χ² with its coefficient ¼.
    """
    if not 0 < coefficient < math.inf:
        raise ValueError(f"`coefficient` must be positive and finite: it scales ‖R‖². Got {coefficient}.")

    def psi(points: Points) -> Float[Tensor, ""]:
        if points.slope_squared is not None:
            raise ValueError("`slope_squared` would be ignored: mmd reads rewards at points alone. Leave it out.")
        return coefficient * hilbert_norm_squared(points.reward, points.matrix)

    return IntegralMetric("mmd", psi=psi, matrix_of=laplace_kernel, uses_slopes=False)


WASSERSTEIN, MMD = wasserstein(), mmd()

#: Both integral metrics by name, with their default parameters.
INTEGRAL_METRICS: Mapping[str, IntegralMetric] = MappingProxyType({m.name: m for m in (WASSERSTEIN, MMD)})
