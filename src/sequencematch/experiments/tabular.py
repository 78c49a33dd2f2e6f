"""A decision process small enough for a table, and the exact optimum of Eq. 4 in it.

An occupancy is unnormalised here, ρ(s, a, s') = Σ_t γᵗ P(s_t = s, a_t = a, s_{t+1} = s'), and sums to 1/(1 − γ). Tokens that nobody
can tell apart share a logit, and worlds that the policy can't tell apart share a row of logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sequencematch.core.divergences import Divergence
from sequencematch.core.integral_metrics import IntegralMetric
from sequencematch.core.objectives import check_alpha, check_gamma

#: A state that data visits closes an action that data never takes there and that has less than this probability at the optimum.
CLOSED_BELOW = 1e-13
#: The logit of a closed action, below V(s): exp(−1000) is 0.
CLOSED = -1000.0
#: Pairs (s, a) that the policy visits less than this are not solved for.
UNVISITED = 1e-60
#: Refreshes before an action may be closed: the values of the states behind it, which decide, are arbitrary before they settle.
SETTLED = 20
#: Where ρ and ρ_θ are near enough for Newton's method on both at once.
NEAR = 1e-2
#: Where the gradient per unit of occupancy counts as 0. Rewards are of order 1, so rounding leaves about 1e-13.
TOLERANCE = 1e-9


class NoOptimumError(ArithmeticError):
    """The logits did not settle where the gradient vanishes."""


@dataclass(frozen=True)
class Demonstration:
    """One outcome of the data: its probability, and its decisions as (world, chosen action, next world)."""

    probability: float
    steps: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Table:
    """Worlds with known dynamics, of which a policy sees only the row   (§3.1, with hidden information).

    World 0 is the start. An absorbing world has one action, which stays there: then r = (1 − γ) V, as in the tail of Eq. 4.
    """

    rows: tuple[str, ...]
    row: Int[Tensor, "world"]
    count: Float[Tensor, "row action"]  # how many tokens share this logit; 0 if the action isn't open
    transition: Float[Tensor, "world action world"]
    is_absorbing: Bool[Tensor, "world"]
    demonstrations: Sequence[Demonstration]

    @property
    def is_open(self) -> Bool[Tensor, "row action"]:
        """True for the actions that a row has."""
        return self.count > 0

    def by_row(self, occupancy: Float[Tensor, "world action world"]) -> Float[Tensor, "row action row"]:
        """The sums over worlds that share a row."""
        sees = torch.nn.functional.one_hot(self.row, len(self.rows)).to(occupancy.dtype)
        return torch.einsum("wan,wr,nq->raq", occupancy, sees, sees)


@dataclass(frozen=True)
class Problem:
    """Eq. 4 in expectation: J = Σ ρ_data φ(α r)/α − V(s₀) − α κ Σ ρ r²   (B and D are ½ V(s₀) each).

    κ is `divergence.on_policy`. ρ is the occupancy of rollouts; it is held fixed in a gradient, as a buffer of rollouts is: none
    passes through sampling.
    """

    table: Table
    divergence: Divergence
    alpha: float
    gamma: float

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        check_gamma(self.gamma)
        if isinstance(self.divergence, IntegralMetric):
            raise ValueError(
                f"`divergence` must be an f-divergence: the penalty of {self.divergence.name} on the reward would be ignored here."
            )

    @cached_property
    def data(self) -> Float[Tensor, "row action row"]:
        """ρ_data."""
        return data_occupancy(self.table, self.gamma)

    @cached_property
    def is_unseen(self) -> Bool[Tensor, "row action"]:
        """True for open actions that data never takes in a state that it visits."""
        return self.table.is_open & (self.data.sum((1, 2)) > 0)[:, None] & (self.data.sum(2) == 0)


@dataclass(frozen=True)
class Optimum:
    """Logits where the gradient vanishes, and how far from 0 it is per unit of occupancy."""

    logits: Float[Tensor, "row action"]
    residual: float
    refreshes: int


def value(table: Table, logits: Float[Tensor, "row action"]) -> Float[Tensor, "row"]:
    """V(s) = log Σ_a exp ℓ(a|s), where a logit counts once for every token that shares it   (§3.2)."""
    return (logits + table.count.log()).logsumexp(1)


def policy(table: Table, logits: Float[Tensor, "row action"]) -> Float[Tensor, "row action"]:
    """p(a|s) = exp(ℓ(a|s) − V(s)), summed over the tokens that share a logit."""
    return (logits + table.count.log()).softmax(1)


def reward(table: Table, logits: Float[Tensor, "row action"], gamma: float) -> Float[Tensor, "row action row"]:
    """r(s, a, s') = ℓ(a|s) − γ V(s'), and 0 where a is not open   (§3.2.1)."""
    implied = logits[:, :, None] - gamma * value(table, logits)
    return torch.where(table.is_open[:, :, None], implied, 0)


def policy_occupancy(
    table: Table, logits: Float[Tensor, "row action"], gamma: float
) -> Float[Tensor, "row action row"]:
    """ρ_θ: the flow ρ(w) = 1[w is the start] + γ Σ_w' ρ(w') P(w|w') over worlds, by row."""
    chosen = policy(table, logits)[table.row]
    step = torch.einsum("wa,wan->wn", chosen, table.transition)
    identity = torch.eye(len(step), dtype=step.dtype)
    visits = torch.linalg.solve(identity - gamma * step.T, identity[0])
    return table.by_row(visits[:, None, None] * chosen[:, :, None] * table.transition)


def data_occupancy(table: Table, gamma: float) -> Float[Tensor, "row action row"]:
    """ρ_data over chosen actions, with γᵀ/(1 − γ) for the endless stay in s_T."""
    occupancy = torch.zeros_like(table.transition)
    for demonstration in table.demonstrations:
        for t, step in enumerate(demonstration.steps):
            occupancy[step] += demonstration.probability * gamma**t
        final = demonstration.steps[-1][2]
        stay = int(table.is_open[table.row[final]].nonzero()[0])
        occupancy[final, stay, final] += demonstration.probability * gamma ** len(demonstration.steps) / (1 - gamma)
    return table.by_row(occupancy)


def objective(
    problem: Problem, logits: Float[Tensor, "row action"], rollouts: Float[Tensor, "row action row"]
) -> Float[Tensor, ""]:
    """J for rollouts of occupancy ρ   (Eq. 4)."""
    alpha, divergence = problem.alpha, problem.divergence
    r = reward(problem.table, logits, problem.gamma)
    on_data = (problem.data * divergence(alpha * r)).sum() / alpha
    return on_data - value(problem.table, logits)[0] - alpha * divergence.on_policy * (rollouts * r**2).sum()


def gradient(
    problem: Problem, logits: Float[Tensor, "row action"], rollouts: Float[Tensor, "row action row"]
) -> Float[Tensor, "row action"]:
    """∂J/∂ℓ(a|s) = m(s, a) − p(a|s) m(s), where m = ρ_data φ'(α r) − 2 α κ ρ r and m(s) = 1[s = s₀] + γ Σ m(·, ·, s)."""
    flow = _flow(problem, logits, rollouts)
    return flow.sum(2) - policy(problem.table, logits) * _inflow(problem, flow)[:, None]


def residual(problem: Problem, logits: Float[Tensor, "row action"]) -> float:
    """The largest |∂J/∂ℓ(a|s)| per unit of ρ_data(s, a) + ρ_θ(s, a), where ρ = ρ_θ is the policy's own, over visited pairs."""
    return float(_per_unit(problem, logits)[visited(problem, logits)].abs().max())


def optimum(
    problem: Problem, start: Float[Tensor, "row action"], *, refreshes: int = 300, mixing: float = 0.6
) -> Optimum:
    """The logits where ∂J/∂ℓ = 0 with ρ = ρ_θ, the policy's own occupancy.

    Newton's method maximises J for a fixed ρ, then a share `mixing` of ρ is replaced by ρ_θ, until the two are near; then Newton's
    method solves both conditions at once. Without an on-policy term an action that data never shows in a state that it visits is
    closed (its supremum is at −∞), and states that data doesn't visit keep the logits of `start`.
    """
    logits = start.to(torch.float64)
    if not problem.divergence.on_policy:
        logits = _close(problem, logits)
    rollouts = policy_occupancy(problem.table, logits, problem.gamma)
    found = math.inf
    for refresh in range(1, refreshes + 1):
        own = policy_occupancy(problem.table, logits, problem.gamma)
        if refresh > SETTLED and float((own - rollouts).abs().max()) <= NEAR:
            logits = _joint_step(problem, logits)
        else:
            rollouts = torch.lerp(rollouts, own, mixing)
            logits = _fixed_step(problem, _fixed_step(problem, logits, rollouts), rollouts)
        if refresh > SETTLED:
            logits = _close(problem, logits)
        found = residual(problem, logits)
        if found <= TOLERANCE:
            return Optimum(logits, found, refresh)
    raise NoOptimumError(f"After {refreshes} refreshes of the rollouts the gradient is still {found:.1e}.")


def endings(table: Table, logits: Float[Tensor, "row action"]) -> tuple[Float[Tensor, "world"], float]:
    """The probability of ending in each absorbing world, and the expected number of actions (an absorbing Markov chain)."""
    step = torch.einsum("wa,wan->wn", policy(table, logits)[table.row], table.transition)
    moving = ~table.is_absorbing
    inner = step[moving][:, moving]
    identity = torch.eye(len(inner), dtype=inner.dtype)
    visits = torch.linalg.solve(identity - inner.T, identity[0])
    return torch.where(table.is_absorbing, visits @ step[moving], 0), float(visits.sum())


def ended_within(table: Table, logits: Float[Tensor, "row action"], actions: int) -> Float[Tensor, "world"]:
    """The probability of having ended in each absorbing world after so many actions."""
    step = torch.einsum("wa,wan->wn", policy(table, logits)[table.row], table.transition)
    return torch.where(table.is_absorbing, torch.linalg.matrix_power(step, actions)[0], 0)


def visited(problem: Problem, logits: Float[Tensor, "row action"]) -> Bool[Tensor, "row action"]:
    """The pairs (s, a) that J depends on: those of data, and with an on-policy term all that the policy visits."""
    on_data = problem.data.sum(2) > 0
    if not problem.divergence.on_policy:
        return on_data
    return on_data | (policy_occupancy(problem.table, logits, problem.gamma).sum(2) > UNVISITED)


def _flow(
    problem: Problem, logits: Float[Tensor, "row action"], rollouts: Float[Tensor, "row action row"]
) -> Float[Tensor, "row action row"]:
    """m = ∂J/∂r = ρ_data φ'(α r) − 2 α κ ρ r."""
    x = problem.alpha * reward(problem.table, logits, problem.gamma)
    return problem.data * problem.divergence.phi_prime(x) - 2 * problem.divergence.on_policy * rollouts * x


def _inflow(problem: Problem, flow: Float[Tensor, "row action row"]) -> Float[Tensor, "row"]:
    """m(s) = 1[s = s₀] + γ Σ m(·, ·, s); row 0 is s₀."""
    is_start = torch.nn.functional.one_hot(torch.tensor(0), len(flow))
    return is_start + problem.gamma * flow.sum((0, 1))


def _per_unit(problem: Problem, logits: Float[Tensor, "row action"]) -> Float[Tensor, "row action"]:
    """∂J/∂ℓ(a|s) per unit of ρ_data(s, a) + ρ_θ(s, a), for rollouts of the policy itself."""
    rollouts = policy_occupancy(problem.table, logits, problem.gamma)
    unit = (rollouts + problem.data).sum(2)
    return gradient(problem, logits, rollouts) / torch.where(unit > 0, unit, 1)


def _close(problem: Problem, logits: Float[Tensor, "row action"]) -> Float[Tensor, "row action"]:
    """Close the unseen actions that have next to no probability at the optimum.

    There ∂J/∂ℓ = 0 says r(s, a) = −m(s)/(2 α κ ρ_θ(s)), hence p(a|s) = exp(r + γV(s') − V(s)); where the policy hardly goes, r is
    far below −1000. A closed action opens again when this p grows.
    """
    table, values = problem.table, value(problem.table, logits)
    rollouts = policy_occupancy(table, logits, problem.gamma)
    inflow = _inflow(problem, _flow(problem, logits, rollouts))
    visits = 2 * problem.alpha * problem.divergence.on_policy * rollouts.sum((1, 2))
    ways = table.by_row(table.transition)
    value_next = ways @ values / ways.sum(2).clamp(min=1)
    best = problem.gamma * value_next - (inflow / visits.clamp(min=1e-300))[:, None]
    is_closed = logits - values[:, None] <= CLOSED / 2
    is_negligible = best - values[:, None] + table.count.log() < math.log(CLOSED_BELOW)
    logits = torch.where(problem.is_unseen & is_negligible, values[:, None] + CLOSED, logits)
    return torch.where(problem.is_unseen & is_closed & ~is_negligible, best, logits)


def _joint_step(problem: Problem, logits: Float[Tensor, "row action"]) -> Float[Tensor, "row action"]:
    """One damped Newton step towards ∂J/∂ℓ = 0 per unit of occupancy, with ρ = ρ_θ following the logits."""
    at = visited(problem, logits).nonzero(as_tuple=True)

    def conditions(moved: Float[Tensor, "pair"]) -> tuple[Float[Tensor, "pair"], Float[Tensor, "pair"]]:
        left = _per_unit(problem, logits.index_put(at, moved))[at]
        return left, left

    slope, left = torch.func.jacfwd(conditions, has_aux=True)(logits[at])
    return _moved(problem, logits, at, torch.linalg.solve(-slope, left))


def _fixed_step(
    problem: Problem, logits: Float[Tensor, "row action"], rollouts: Float[Tensor, "row action row"]
) -> Float[Tensor, "row action"]:
    """One damped Newton step on J for fixed ρ, whose Hessian is Rᵀ diag(∂²J/∂r²) R − Σ_s m(s) (diag p_s − p_s p_sᵀ).

    R = ∂r/∂ℓ. Scaled by its diagonal, since occupancies span thirty orders of magnitude.
    """
    table, divergence, alpha, gamma = problem.table, problem.divergence, problem.alpha, problem.gamma
    probability = policy(table, logits)
    inflow = _inflow(problem, _flow(problem, logits, rollouts))
    x = (alpha * reward(table, logits, gamma)).requires_grad_()
    (bend,) = torch.autograd.grad(divergence.phi_prime(x).sum(), x)
    curvature = alpha * (problem.data * bend - 2 * divergence.on_policy * rollouts)

    is_visited = visited(problem, logits)
    at = at_row, _ = is_visited.nonzero(as_tuple=True)
    pair = torch.arange(len(at_row))
    number = torch.zeros(is_visited.shape, dtype=torch.long).index_put(at, pair)
    of_row = torch.zeros(len(is_visited), len(pair), dtype=logits.dtype)  # p_s, as a vector over visited pairs
    of_row[at_row, pair] = probability[at]
    rows, actions, following = ((curvature != 0) & is_visited[:, :, None]).nonzero(as_tuple=True)
    change = -gamma * of_row[following]  # R
    change[torch.arange(len(rows)), number[rows, actions]] += 1
    hessian = (change.T * curvature[rows, actions, following]) @ change
    hessian -= torch.diag(inflow[at_row] * probability[at]) - (of_row.T * inflow) @ of_row

    scale = hessian.diagonal().abs().clamp(min=torch.finfo(logits.dtype).tiny).rsqrt()
    size, direction = torch.linalg.eigh(-hessian * scale[:, None] * scale)
    slope = scale * gradient(problem, logits, rollouts)[at]
    # |eigenvalue|: uphill also where J is not concave. The bound keeps rounding from becoming a step.
    return _moved(problem, logits, at, scale * (direction @ ((direction.T @ slope) / size.abs().clamp(min=1e-12))))


def _moved(
    problem: Problem,
    logits: Float[Tensor, "row action"],
    at: tuple[Int[Tensor, "pair"], ...],
    step: Float[Tensor, "pair"],
) -> Float[Tensor, "row action"]:
    """The logits after a step of at most 2 nats; off the data they may fall as far as they like."""
    longest = torch.where(problem.data.sum(2)[at] > 0, step.abs(), step).max()
    return logits.index_put(at, logits[at] + step * min(1.0, 2.0 / max(float(longest), 1e-9)))
