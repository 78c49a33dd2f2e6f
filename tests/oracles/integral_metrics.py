"""Eq. 4 under an integral metric in the tabular MDP, solved exactly; and the metrics by linear programming or in closed form.

The logits follow from the reward r by soft Bellman equations. In r the objective J(r) = ⟨ρ_data, r⟩ − V(s₀; r) − (1/α) ψ(α r) is
concave: V is the maximum of ⟨ρ_π, r⟩ + H(π) over policies, and ∂V(s₀)/∂r is the occupancy of the best policy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.optimize  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch.core.integral_metrics import IntegralMetric, Points
from sequencematch.core.mdp import State, Trajectory
from sequencematch.core.objectives import Scores, sequencematch_loss
from tests.oracles.tabular import TabularMDP

#: Where the gradient of J, a difference of occupancies whose sum is 1/(1 − γ), counts as zero.
TOLERANCE = 1e-10


def tree_distance(mdp: TabularMDP) -> Float[Tensor, "pair pair"]:
    """Tokens to delete and to write from one state to the other, plus 1 if one has ended, plus 1 if the actions differ."""

    def apart(first: State, second: State) -> int:
        one, two = (state.tokens[:-1] if state.absorbing else state.tokens for state in (first, second))
        common = next((n for n, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
        return len(one) + len(two) - 2 * common + (first.absorbing != second.absorbing)

    states, (row, action) = list(mdp.index), mdp.is_open.nonzero(as_tuple=True)
    between = torch.tensor([[apart(s, t) for t in states] for s in states], dtype=torch.float64)
    return between[row][:, row] + (action[:, None] != action)


@dataclass(frozen=True)
class Exact:
    """J over all rewards at all open pairs (s, a) of an MDP; `data` holds equally likely trajectories without noise."""

    mdp: TabularMDP
    data: Sequence[Trajectory]
    divergence: IntegralMetric
    matrix: Float[Tensor, "pair pair"]
    alpha: float
    gamma: float

    @cached_property
    def data_occupancy(self) -> Float[Tensor, "pair"]:
        """ρ_data."""
        share = 1 / len(self.data)
        return self.mdp.data_occupancy([(share, t) for t in self.data], self.gamma)[self.mdp.is_open]

    def logits(self, reward: Float[Tensor, "pair"]) -> Float[Tensor, "state action"]:
        """ℓ(a|s) = r(s, a) + γ V(P(s, a)), by soft policy iteration, whose errors are squared in each round."""
        mdp, table = self.mdp, torch.zeros(self.mdp.is_open.shape, dtype=torch.float64)
        table[mdp.is_open] = reward
        logits = table
        for _ in range(100):
            policy = mdp.policy(logits)
            entropy = -torch.xlogy(policy, policy).sum(1)
            step = torch.zeros(len(policy), len(policy), dtype=torch.float64).scatter_add(1, mdp.successor, policy)
            identity = torch.eye(len(policy), dtype=torch.float64)
            value = torch.linalg.solve(identity - self.gamma * step, (policy * table).sum(1) + entropy)
            before, logits = logits, table + self.gamma * value[mdp.successor]
            if float((logits - before).abs().max()) <= 1e-13 * (1 + float(logits.abs().max())):
                return logits
        raise ArithmeticError("Soft policy iteration did not converge.")

    def reward(self, logits: Float[Tensor, "state action"]) -> Float[Tensor, "pair"]:
        """r(s, a) at all open pairs."""
        return self.mdp.reward(logits, self.gamma)[self.mdp.is_open]

    def occupancy(self, logits: Float[Tensor, "state action"]) -> Float[Tensor, "pair"]:
        """ρ_θ."""
        return self.mdp.policy_occupancy(logits, self.gamma)[self.mdp.is_open]

    def entropy(self, logits: Float[Tensor, "state action"]) -> float:
        """H(π) = Σ_t γᵗ E[−log p(a_t|s_t)]."""
        policy = self.mdp.policy(logits)[self.mdp.is_open]
        return -float((self.occupancy(logits) * policy.log()).sum())

    def scores(self, logits: Float[Tensor, "state action"]) -> Scores:
        """The logits and values of the data."""
        return self.mdp.scores([(1.0, trajectory) for trajectory in self.data])(logits)

    def loss(self, logits: Float[Tensor, "state action"]) -> Float[Tensor, ""]:
        """−J by the package's own loss; N is the number of trajectories, so that it is an expectation."""
        return sequencematch_loss(
            self.scores(logits),
            None,
            divergence=self.divergence,
            alpha=self.alpha,
            gamma=self.gamma,
            num_items=len(self.data),
            points=Points(self.reward(logits), self.matrix),
        ).loss

    def objective(self, reward: Float[Tensor, "pair"]) -> float:
        """J(r)."""
        return -float(self.loss(self.logits(reward)))

    def _slope_and_bend(
        self, reward: Float[Tensor, "pair"]
    ) -> tuple[Float[Tensor, "pair"], Float[Tensor, "pair pair"]]:
        """∂J/∂r = ρ_data − ρ_θ − ∂P, and −∂²J/∂r² = ∂ρ_θ/∂r + ∂²P."""
        mdp, logits = self.mdp, self.logits(reward)
        is_open = mdp.is_open

        def occupancy(free: Tensor) -> Tensor:
            return self.occupancy(torch.zeros_like(logits).masked_scatter(is_open, free))

        def penalty(r: Tensor) -> Tensor:
            return self.divergence.penalty(Points(r, self.matrix), self.alpha)

        policy = mdp.policy(logits)
        step = torch.zeros(len(policy), len(policy), dtype=torch.float64).scatter_add(1, mdp.successor, policy)
        visits = torch.linalg.inv(torch.eye(len(policy), dtype=torch.float64) - self.gamma * step)
        row = is_open.nonzero(as_tuple=True)[0]
        value_by_reward = visits[:, row] * policy[is_open]
        logit_by_reward = torch.eye(len(reward), dtype=torch.float64)
        logit_by_reward = logit_by_reward + self.gamma * value_by_reward[mdp.successor[is_open]]
        by_logit = torch.autograd.functional.jacobian(occupancy, logits[is_open], vectorize=True)
        by_reward = by_logit @ logit_by_reward
        free = reward.clone().requires_grad_()
        (pull,) = torch.autograd.grad(penalty(free), free)
        bend = torch.autograd.functional.hessian(penalty, reward, vectorize=True)
        return self.data_occupancy - self.occupancy(logits) - pull, (by_reward + by_reward.T) / 2 + bend

    def optimum(self, start: Float[Tensor, "pair"]) -> Float[Tensor, "pair"]:
        """argmax J by Newton's method with a line search."""
        reward, found = start, math.inf
        for _ in range(2000):
            slope, bend = self._slope_and_bend(reward)
            found = float(slope.abs().max())
            if found <= TOLERANCE:
                return reward
            size, direction = torch.linalg.eigh(bend)
            step = direction @ ((direction.T @ slope) / size.clamp(min=1e-12 * float(size.max())))
            now, rise, share = self.objective(reward), float(slope @ step), 1.0
            # Near the optimum J is flat to rounding: then the whole step is taken.
            while share > 1e-6 and self.objective(reward + share * step) < now + 1e-4 * share * rise - 1e-12 * abs(now):
                share /= 2
            reward = reward + share * step
        raise ArithmeticError(f"The gradient stayed at {found}.")


def transport_cost(
    supply: Float[Tensor, "pair"], demand: Float[Tensor, "pair"], distance: Float[Tensor, "pair pair"]
) -> float:
    """Wasserstein-1 by linear programming: min Σ F_ij d_ij over plans F ≥ 0 from `supply` to `demand`."""
    count = len(supply)
    rows = np.kron(np.eye(count), np.ones(count))
    columns = np.kron(np.ones(count), np.eye(count))[1:]  # the rest: equal masses, which rounding would contradict
    found = scipy.optimize.linprog(
        distance.numpy().flatten(),
        A_eq=np.vstack([rows, columns]),
        b_eq=np.concatenate([supply.numpy(), demand.numpy()[1:]]),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert found.success, found.message
    return float(found.fun)


def mmd_squared(difference: Float[Tensor, "pair"], kernel: Float[Tensor, "pair pair"]) -> float:
    """‖μ_data − μ_θ‖² = Δᵀ K Δ."""
    return float(difference @ kernel @ difference)
