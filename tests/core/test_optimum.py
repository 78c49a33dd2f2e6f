"""Maximising the objective of Eq. 4 gives back the data: exact expectations, free logits, an MDP that can be written out."""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch.core.divergences import DIVERGENCES
from sequencematch.core.mdp import ActionSpace, State, Trajectory
from sequencematch.core.noise import add_noise, token_noise
from sequencematch.core.objectives import data_reward, data_tail, value_difference
from tests.oracles.tabular import Distribution, TabularMDP

GAMMA = 0.9
MDP = TabularMDP(ActionSpace(vocab_size=3, eos=2, bos=2), depth=3)

# Of the 15 sentences over two tokens five occur, so that there are states the data never visits and, in each state it
# visits, actions it never takes: the empty sentence, a second 0, <bkspc>, …
SENTENCES = {(0,): 0.2, (0, 1): 0.25, (0, 1, 0): 0.15, (1,): 0.25, (1, 1, 1): 0.15}

# φ of the total variation is the identity around 0: there its objective is the limit of α → 0 itself and leaves no error in
# proportion to α. It has a test of its own below.
SMOOTH = sorted(DIVERGENCES.keys() - {"total_variation"})

# Where a gradient of J, a difference of occupancies, counts as zero: the sums of a few that make up ρ_θ are then good to 1e-7,
# and J, which rounds at 1e-15, can still tell a better point from a worse one.
GRADIENT_TOLERANCE = 1e-8
# Where a refreshed ρ_θ (of sum 10) counts as unchanged: a tenth of the mass that may lie off the data's support.
OCCUPANCY_TOLERANCE = 1e-5
# torch's L-BFGS forgets steps with y·s ≤ 1e-10, an absolute bound, and then creeps along the flat directions: logits off the
# data's support, on their way to −∞. A large factor on J makes it remember them.
SCALE = 1e8


class NoMaximumError(ArithmeticError):
    """The objective grows beyond all bounds, or its gradient does not vanish."""


def data_with(noise: float) -> Distribution:
    """Every trajectory that the sentences become under noise, with its probability."""
    return [(p * q, trajectory) for sentence, p in SENTENCES.items() for q, trajectory in MDP.noised(sentence, noise)]


def maximise(
    objective: Callable[[Float[Tensor, "state action"]], Float[Tensor, ""]],
    start: Float[Tensor, "state action"],
    tolerance: float,
) -> Float[Tensor, "state action"]:
    """argmax J by L-BFGS.

    φ(x) ≤ x bounds J by the γ-weighted log-likelihood and so by 0: a J beyond 10⁶ has a wrong sign and no maximum.
    """
    logits = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [logits],
        max_iter=2000,
        history_size=100,
        tolerance_grad=SCALE * tolerance,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> float:
        value = objective(logits)
        if not value < 1e6:
            raise NoMaximumError(f"The objective reached {value.item()}.")
        (logits.grad,) = torch.autograd.grad(-SCALE * value, logits)
        return -SCALE * value.item()

    optimiser.step(loss)
    (gradient,) = torch.autograd.grad(objective(logits), logits)
    if not gradient.abs().max() <= tolerance:
        raise NoMaximumError(f"The gradient stayed at {gradient.abs().max().item()}.")
    return logits.detach()


@cache
def optimum(name: str, alpha: float, noise: float, flipped: str = "") -> Float[Tensor, "state action"]:
    """The logits that maximise J = E[A + C − B − D] − E, with the sign of one term `flipped` for a control   (Eq. 4).

    E = α κ Σ ρ_θ r² holds ρ_θ fixed, as rollouts in a buffer do; ρ_θ is refreshed until it no longer changes.
    """
    divergence, data = DIVERGENCES[name], data_with(noise)
    probability = torch.tensor([p for p, _ in data], dtype=torch.float64)
    scores = MDP.scores(data)
    sign = {term: -1 if term == flipped else 1 for term in "ABCD"}

    def objective(logits: Float[Tensor, "state action"]) -> Float[Tensor, ""]:
        along = scores(logits)
        a = sign["A"] * data_reward(along, divergence, alpha, GAMMA)
        c = sign["C"] * data_tail(along, divergence, alpha, GAMMA)
        difference = value_difference(along, GAMMA)
        b = sign["B"] * difference
        d = sign["D"] * difference  # ½ V(u₀) on any rollouts, so the data will do
        e = alpha * divergence.on_policy * (occupancy * MDP.reward(logits, GAMMA) ** 2).sum()
        return probability @ (a + c - b - d) - e

    tolerance = OCCUPANCY_TOLERANCE / 10 if divergence.on_policy else GRADIENT_TOLERANCE
    logits = torch.zeros(MDP.is_open.shape, dtype=torch.float64)
    if divergence.on_policy:  # χ² has the same φ and no E: its optimum is close by
        with suppress(NoMaximumError):
            logits = optimum("chi2", alpha, noise, flipped)
    occupancy = MDP.policy_occupancy(logits, GAMMA)
    for _ in range(15):
        logits = maximise(objective, logits, tolerance)
        before, occupancy = occupancy, MDP.policy_occupancy(logits, GAMMA)
        if (occupancy - before).abs().max() <= OCCUPANCY_TOLERANCE:
            return logits
    raise NoMaximumError("The policy's occupancy did not settle.")


def distance_from_data(logits: Float[Tensor, "state action"], noise: float) -> tuple[float, float]:
    """The worst total variation, and the most mass off the data's support, over the states that data visits.

    The target is Σ γᵗ 1[s_t = s, a_t = a], normalised over a.
    """
    occupancy = MDP.data_occupancy(data_with(noise), GAMMA)
    visited = (occupancy.sum(1) > 0) & ~MDP.is_absorbing
    target = occupancy[visited] / occupancy[visited].sum(1, keepdim=True)
    policy = MDP.policy(logits)[visited]
    return float(((policy - target).abs().sum(1) / 2).max()), float((policy * (target == 0)).sum(1).max())


def data_logits() -> Float[Tensor, "state action"]:
    """Logits of the data's own policy where data goes, and of the uniform one elsewhere."""
    occupancy = MDP.data_occupancy(data_with(noise=0), GAMMA)
    return torch.where(occupancy.sum(1, keepdim=True) > 0, occupancy.log(), 0)


def test_the_table_has_fifteen_sentences_open_or_ended() -> None:
    # 1 + 2 + 4 + 8 sentences of up to three tokens, each as a state to act in and with <eos> behind it.
    assert len(MDP.index) == 30
    assert int(MDP.is_absorbing.sum()) == 15
    # At full depth every push ends the sentence and <bkspc> does not.
    full = MDP.index[State((2, 0, 1, 0))]
    assert len(set(MDP.successor[full, :3].tolist())) == 1
    assert MDP.is_absorbing[MDP.successor[full]].tolist() == [True, True, True, False]


def test_the_occupancy_of_the_uniform_policy_follows_from_its_first_steps() -> None:
    occupancy = MDP.policy_occupancy(torch.zeros(MDP.is_open.shape, dtype=torch.float64), GAMMA)
    torch.testing.assert_close(occupancy.sum(), torch.tensor(1 / (1 - GAMMA), dtype=torch.float64))
    # <bos>: it starts there, stays by <bkspc> (¼) and comes back by <bkspc> from its two children (¼ each).
    start, zero, one = (occupancy[MDP.index[State(tokens)]].sum() for tokens in [(2,), (2, 0), (2, 1)])
    torch.testing.assert_close(start, 1 + GAMMA * (start + zero + one) / 4)


def test_a_policy_that_is_the_datas_has_the_datas_occupancy() -> None:
    torch.testing.assert_close(
        MDP.policy_occupancy(data_logits(), GAMMA), MDP.data_occupancy(data_with(noise=0), GAMMA)
    )


def test_the_enumerated_noise_is_what_add_noise_draws() -> None:
    expected = {(t.chosen, t.executed): p for p, t in MDP.noised((0, 1), rate=0.2)}
    assert math.isclose(sum(expected.values()), 1)

    clean = Trajectory.demonstration(MDP.space, prompt=(2,), completion=(0, 1))
    source, generator = token_noise(MDP.space), torch.Generator().manual_seed(0)
    draws = [add_noise(clean, 0.2, source, generator) for _ in range(2000)]
    drawn = Counter((t.chosen, t.executed) for t in draws)

    assert drawn.keys() == expected.keys()
    for outcome, p in expected.items():  # four standard deviations of a binomial count
        assert abs(drawn[outcome] - 2000 * p) <= 4 * math.sqrt(2000 * p * (1 - p))


# To first order in α a visited state is off by ½ α |φ''(0)| Σ_a p |r − r̄|, with |φ''(0)| at most 2. On clean data r lies within
# ±0.04, being 1 − γ times a log-probability; after noise a lower value follows and r reaches −3: hence the wider bound.
@pytest.mark.parametrize(("noise", "bound"), [(0.0, 1e-3), (0.2, 1e-2)])
@pytest.mark.parametrize("name", SMOOTH)
def test_at_small_alpha_the_policy_is_the_datas(name: str, noise: float, bound: float) -> None:
    distance, off_support = distance_from_data(optimum(name, 0.01, noise), noise)
    assert distance <= bound
    assert off_support <= 1e-4  # the supremum is at 0, or e^(−1/(2ακ)) for the mixture, and is only approached


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("name", SMOOTH)
def test_the_error_is_proportional_to_alpha(name: str, noise: float) -> None:
    coarse, fine = (distance_from_data(optimum(name, alpha, noise), noise)[0] for alpha in (0.1, 0.01))
    assert 7 <= coarse / fine <= 13  # ten, up to the next order in α


def test_total_variation_leaves_no_error_where_its_phi_is_the_identity() -> None:
    alpha, noise = 0.01, 0.0
    logits = optimum("total_variation", alpha, noise)
    on_data = MDP.data_occupancy(data_with(noise), GAMMA) > 0
    assert alpha * float(MDP.reward(logits, GAMMA)[on_data].abs().max()) < 0.5
    assert distance_from_data(logits, noise)[0] <= 1e-6  # the gradient's tolerance over the rarest state's occupancy


def identity_residual(name: str, alpha: float) -> float:
    """The largest |ρ_data φ'(α r) − 2κ α r ρ_θ − ρ_θ| over all (s, a), absorbing states included, where r = (1 − γ) V.

    ρ_data φ'(α r) − 2κ α r ρ_θ solves the flow equation of ρ_θ where every ∂J/∂ℓ(a|s) is 0, so the two are equal there.
    """
    divergence, logits = DIVERGENCES[name], optimum(name, alpha, 0.0)
    x = (alpha * MDP.reward(logits, GAMMA)).requires_grad_()
    (slope,) = torch.autograd.grad(divergence(x).sum(), x)
    on_data, on_policy = MDP.data_occupancy(data_with(0.0), GAMMA), MDP.policy_occupancy(logits, GAMMA)
    return float((on_data * slope - 2 * divergence.on_policy * x.detach() * on_policy - on_policy).abs().max())


@pytest.mark.parametrize("alpha", [1.0, 0.1])
@pytest.mark.parametrize("name", [name for name in SMOOTH if not DIVERGENCES[name].on_policy])
def test_the_optimal_occupancy_is_the_datas_times_the_slope_of_phi(name: str, alpha: float) -> None:
    assert identity_residual(name, alpha) <= 1e-6


def test_the_mixtures_penalty_counts_in_that_balance() -> None:
    # E held the ρ_θ of one refresh earlier, and −2κ α r is at most 1 (off the data's support): a few times its change.
    assert identity_residual("chi2_mixture", 0.1) <= 10 * OCCUPANCY_TOLERANCE


@pytest.mark.parametrize("flipped", ["A", "B", "C"])  # D is the number that B is: flipped, either makes their sum 0
@pytest.mark.parametrize("name", SMOOTH)
def test_with_a_term_of_the_wrong_sign_the_policy_is_not_the_datas(name: str, flipped: str) -> None:
    """A negative control; E is left out of it, since it fades with α."""
    try:
        distance, _ = distance_from_data(optimum(name, 0.01, 0.0, flipped), 0.0)
    except NoMaximumError:
        distance = math.inf
    assert distance > 0.1
