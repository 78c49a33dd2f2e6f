"""Wasserstein and MMD on a tabular MDP: the best objective is the metric, by linear programming or in closed form, less entropy.

max_r J = min_π (1/α) d(ρ_data, ρ_π) − H(π), over all rewards at all 35 pairs (s, a) of 14 states.
"""

import math
from functools import cache

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch.core.divergences import CHI2
from sequencematch.core.integral_metrics import IntegralMetric, lipschitz_excess, mmd, wasserstein
from sequencematch.core.mdp import ActionSpace, State, Trajectory
from sequencematch.core.objectives import sequencematch_loss
from tests.oracles.integral_metrics import Exact, mmd_squared, transport_cost, tree_distance
from tests.oracles.tabular import TabularMDP

GAMMA = 0.9
MDP = TabularMDP(ActionSpace(vocab_size=3, eos=2, bos=2), depth=2)
DISTANCE = tree_distance(MDP)
KERNEL = torch.exp(-DISTANCE)
#: Three sentences in ten, four in ten, three in ten: no action of theirs deletes, and most states are never visited.
SENTENCES = [Trajectory.demonstration(MDP.space, (2,), words) for words in [(0,)] * 3 + [(0, 1)] * 4 + [(1,)] * 3]
#: Prices λ of rewards that are not 1-Lipschitz; each optimum starts the search for the next.
PRICES = (1e2, 1e4, 1e6, 1e8)
#: The simplex method's feasibility, 1e-10, over α = 0.1, for some ten sums of 35 terms.
LP_TOLERANCE = 1e-8


def through(state: State, action: int) -> Trajectory:
    """Write a state, take an action in it, and end."""
    actions, at = [*state.tokens[1:], action], State((2,))
    executed: list[int] = []
    while not at.absorbing:
        chosen = actions[len(executed)] if len(executed) < len(actions) else MDP.space.eos
        after = MDP.next_state(at, chosen)
        executed.append(MDP.space.eos if after.absorbing else chosen)
        at = after
    chosen_actions = (*actions, *executed[len(actions) :])
    return Trajectory(MDP.space, (2,), chosen_actions, tuple(executed), (False,) * len(executed))


#: A trajectory through every pair (s, a) that is not absorbing: data of full support.
EVERYWHERE = [through(s, a) for s in MDP.index if not s.absorbing for a in MDP.actions(s)]


@cache
def optimum(name: str, alpha: float, everywhere: bool = False) -> tuple[Exact, Float[Tensor, "pair"]]:
    """The problem and its best reward: MMD with its coefficient, or Wasserstein at the highest price."""
    data = EVERYWHERE if everywhere else SENTENCES
    if name == "mmd":
        problem = Exact(MDP, data, mmd(), KERNEL, alpha, GAMMA)
        return problem, problem.optimum(torch.zeros(35, dtype=torch.float64))
    problems = [Exact(MDP, data, wasserstein(price), DISTANCE, alpha, GAMMA) for price in PRICES]
    # Where nothing is gained, the lowest reward that is 1-Lipschitz: minus the distance from data.
    reward = -DISTANCE[:, problems[0].data_occupancy > 0].amin(1) / alpha
    for problem in problems:
        reward = problem.optimum(reward)
    return problem, reward


def distance_from_data(problem: Exact, reward: Float[Tensor, "pair"]) -> float:
    """The worst total variation between policy and data over the states that data visits."""
    occupancy = torch.zeros(MDP.is_open.shape, dtype=torch.float64)
    occupancy[MDP.is_open] = problem.data_occupancy
    visited = (occupancy.sum(1) > 0) & ~MDP.is_absorbing
    target = occupancy[visited] / occupancy[visited].sum(1, keepdim=True)
    policy = MDP.policy(problem.logits(reward))[visited]
    return float(((policy - target).abs().sum(1) / 2).max())


def value_and_difference(problem: Exact, reward: Float[Tensor, "pair"]) -> tuple[float, Float[Tensor, "pair"]]:
    """α (J + H(π)), which duality says is the metric, and Δ = ρ_data − ρ_π."""
    logits = problem.logits(reward)
    value = problem.alpha * (problem.objective(reward) + problem.entropy(logits))
    return value, problem.data_occupancy - problem.occupancy(logits)


def test_distances_by_hand() -> None:
    """From (<bos>, 0) to (<bos> 0 1, <bkspc>): two tokens to write and another action; to itself: 0. All are metrics."""
    pairs = [(state, action) for state in MDP.index for action in MDP.actions(state)]
    start, other = pairs.index((State((2,)), 0)), pairs.index((State((2, 0, 1)), MDP.space.bkspc))
    assert DISTANCE[start, other] == 3
    assert len(pairs) == len(DISTANCE) == 35
    assert bool((DISTANCE.diagonal() == 0).all())
    assert bool((DISTANCE[:, None, :] <= DISTANCE[:, :, None] + DISTANCE[None, :, :]).all())
    assert float(torch.linalg.eigvalsh(KERNEL)[0]) > 0.2


def test_transport_by_hand() -> None:
    """Half of the mass moves by 2 and a quarter by 1: 1.25."""
    supply, demand = torch.tensor([1.0, 0.0, 0.0]).double(), torch.tensor([0.25, 0.5, 0.25]).double()
    line = torch.tensor([[0.0, 2.0, 1.0], [2.0, 0.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    assert transport_cost(supply, demand, line) == pytest.approx(1.25, abs=1e-12)
    assert mmd_squared(supply - demand, torch.eye(3).double()) == pytest.approx(0.75**2 + 0.25 + 0.0625)


def test_data_everywhere_takes_every_action() -> None:
    assert float(Exact(MDP, EVERYWHERE, mmd(), KERNEL, 0.1, GAMMA).data_occupancy.min()) > 0


@pytest.mark.parametrize("name", ["mmd", "wasserstein"])
def test_the_packages_loss_is_flat_where_the_search_ended(name: str) -> None:
    """The search works in rewards; the gradient of the package's loss in logits has its zero at the same place."""
    problem, reward = optimum(name, 0.5)
    logits = problem.logits(reward).requires_grad_()
    (gradient,) = torch.autograd.grad(problem.loss(logits), logits)
    assert float(gradient.abs().max()) <= 1e-8  # 1e-10 in r, through ∂r/∂ℓ and prices of 1e8 that round at 1e-16
    (elsewhere,) = torch.autograd.grad(problem.loss(logits + 0.1 * torch.randn_like(logits)), logits)
    assert float(elsewhere.abs().max()) > 1e-2


@pytest.mark.parametrize("alpha", [1.0, 0.1, 0.01])
def test_the_best_objective_is_the_squared_mmd_in_closed_form_less_entropy(alpha: float) -> None:
    problem, reward = optimum("mmd", alpha)
    value, difference = value_and_difference(problem, reward)
    closed_form = mmd_squared(difference, KERNEL)
    assert closed_form > 1e-4
    assert value == pytest.approx(closed_form, rel=1e-9)
    torch.testing.assert_close(alpha * reward, 2 * KERNEL @ difference, rtol=0, atol=1e-8)  # R = K Δ/(2c)
    wrong = {"wider": torch.exp(-DISTANCE / 2), "diagonal": torch.eye(35, dtype=torch.float64)}
    for other in wrong.values():
        assert abs(value - mmd_squared(difference, other)) > 0.01 * value
    assert abs(-value - closed_form) > value


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.1])
def test_the_best_objective_is_the_linear_programs_transport_cost_less_entropy(alpha: float) -> None:
    problem, reward = optimum("wasserstein", alpha)
    value, difference = value_and_difference(problem, reward)
    supply, demand = problem.data_occupancy, problem.data_occupancy - difference
    cost = transport_cost(supply, demand, DISTANCE)
    assert cost > 1e-5
    # At λ = 1e8 the value is larger by (n²/4λ) Σ F², n = 35, for a plan that moves at most some 1/10 of a mass of 10.
    assert value == pytest.approx(cost, abs=1e-7, rel=2e-5)
    for other in ((DISTANCE - 1).clamp(min=0), DISTANCE**2 + DISTANCE):
        assert abs(value - transport_cost(supply, demand, other)) > 0.01 * cost


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.1])
def test_a_feasible_reward_and_the_transport_cost_enclose_the_optimum(alpha: float) -> None:
    """J of a 1-Lipschitz reward ≤ max J = min_π (1/α) W₁ − H ≤ that of any policy; the two ends meet."""
    problem, reward = optimum("wasserstein", alpha)
    logits = problem.logits(reward)
    apart = DISTANCE + torch.eye(35, dtype=torch.float64)
    steepest = float((alpha * (reward[:, None] - reward) / apart).max())
    feasible = reward / steepest
    assert float(lipschitz_excess(alpha * feasible, DISTANCE).max()) <= 1e-12
    lower = problem.objective(feasible)
    cost = transport_cost(problem.data_occupancy, problem.occupancy(logits), DISTANCE)
    upper = cost / alpha - problem.entropy(logits)
    assert -LP_TOLERANCE <= upper - lower <= 1e-6


@pytest.mark.parametrize("price", [1e2, 1e4])
def test_at_a_finite_price_the_value_is_transport_with_a_quadratic_cost(price: float) -> None:
    """F_ij = (2λ/n²)(R_i − R_j − d_ij)₊ is a plan for Δ, and its cost Σ F d + (n²/4λ) Σ F² is the value, at every λ."""
    problem = Exact(MDP, SENTENCES, wasserstein(price), DISTANCE, 0.5, GAMMA)
    reward = problem.optimum(optimum("wasserstein", 0.5)[1])
    value, difference = value_and_difference(problem, reward)
    count = len(reward) ** 2
    plan = 2 * price / count * lipschitz_excess(problem.alpha * reward, DISTANCE)
    torch.testing.assert_close(plan.sum(1) - plan.sum(0), difference, rtol=0, atol=1e-9)
    cost = float((plan * DISTANCE).sum() + count / (4 * price) * (plan**2).sum())
    assert value == pytest.approx(cost, abs=1e-8)  # a gradient of 1e-10 times rewards that sum to some tens
    supply, demand = problem.data_occupancy, problem.data_occupancy - difference
    excess = value - transport_cost(supply, demand, DISTANCE)
    assert 0 < excess <= count / (4 * price) * float((plan**2).sum()) + LP_TOLERANCE


def test_the_distance_from_the_linear_program_falls_as_one_over_the_price() -> None:
    excess = []
    for price in (1e4, 1e6):
        problem = Exact(MDP, SENTENCES, wasserstein(price), DISTANCE, 0.5, GAMMA)
        value, difference = value_and_difference(problem, problem.optimum(optimum("wasserstein", 0.5)[1]))
        supply, demand = problem.data_occupancy, problem.data_occupancy - difference
        excess.append(value - transport_cost(supply, demand, DISTANCE))
    assert 90 <= excess[0] / excess[1] <= 110


def test_under_wasserstein_the_policy_is_the_datas_up_to_exp_of_minus_one_over_alpha() -> None:
    """An action that data never takes lies at distance 1 from one it takes in the same state: its reward is 1/α lower."""
    coarse, fine = (distance_from_data(*optimum("wasserstein", alpha)) for alpha in (0.1, 0.05))
    assert coarse < 1e-4
    assert math.log(coarse / fine) == pytest.approx(1 / 0.05 - 1 / 0.1, abs=0.01)


def test_under_wasserstein_the_policy_is_exactly_the_datas_once_its_reward_is_lipschitz() -> None:
    """With data everywhere, −α times the reward of γ-weighted likelihood is inside Ω below α₀, and then it is the optimum."""
    problem, reward = optimum("wasserstein", 0.05, everywhere=True)
    assert float(lipschitz_excess(problem.alpha * reward, DISTANCE).max()) == 0
    assert distance_from_data(problem, reward) <= 1e-9  # a gradient of 1e-10 over the rarest state's occupancy
    assert distance_from_data(*optimum("wasserstein", 1.0, everywhere=True)) > 1e-2


def test_under_mmd_the_error_is_proportional_to_alpha_where_data_goes_everywhere() -> None:
    coarse, fine = (distance_from_data(*optimum("mmd", alpha, everywhere=True)) for alpha in (1e-3, 1e-4))
    assert fine < 2e-3
    assert 9 <= coarse / fine <= 11


def test_under_mmd_an_unseen_action_keeps_a_probability_of_alpha_log_one_over_alpha() -> None:
    """ρ_data − ρ_θ = (α/2) K⁻¹ r, and r is log p up to values that stay bounded: p ∝ α log(1/p)."""
    errors = {alpha: distance_from_data(*optimum("mmd", alpha)) for alpha in (1e-2, 1e-3, 1e-4)}
    first, second, third = (error / (alpha * math.log(1 / error)) for alpha, error in errors.items())
    assert errors[1e-4] < 2e-3
    assert abs(third / second - 1) < abs(second / first - 1) < 0.1


def test_squared_mmd_with_the_datas_own_kernel_is_pearsons_chi2() -> None:
    """K = diag(1/ρ_data): ¼ Rᵀ K⁻¹ R is the ¼ E_data[R²] of φ(x) = x − x²/4, at any logits."""
    on_data = Exact(MDP, EVERYWHERE, mmd(), KERNEL, 0.3, GAMMA).data_occupancy
    own = Exact(MDP, EVERYWHERE, mmd(), torch.diag(1 / on_data), 0.3, GAMMA)
    logits = torch.randn(MDP.is_open.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    count = len(EVERYWHERE)
    chi2 = sequencematch_loss(own.scores(logits), None, divergence=CHI2, alpha=0.3, gamma=GAMMA, num_items=count).loss
    torch.testing.assert_close(own.loss(logits), chi2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["mmd", "wasserstein"])
def test_with_the_sign_of_the_penalty_flipped_there_is_no_optimum(name: str) -> None:
    """A negative control: rewards grow without bound."""
    right = {"mmd": mmd(), "wasserstein": wasserstein(1e2)}[name]
    flipped = IntegralMetric("flipped", psi=lambda x: -right.psi(x), matrix_of=right.matrix_of, uses_slopes=False)
    matrix = KERNEL if name == "mmd" else DISTANCE
    problem = Exact(MDP, SENTENCES, flipped, matrix, 1.0, GAMMA)
    _, best = optimum(name, 1.0)
    values = [problem.objective(scale * best) for scale in (1, 30, 1000)]
    assert values[0] < values[1] < values[2]
    assert values[2] > 1e3
