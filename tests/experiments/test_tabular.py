"""Tables of decision processes: values and occupancies against the oracle, and optima where the gradient vanishes."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch.core.divergences import CHI2, CHI2_MIXTURE, Divergence
from sequencematch.core.integral_metrics import MMD
from sequencematch.core.mdp import ActionSpace
from sequencematch.experiments.tabular import (
    Demonstration,
    NoOptimumError,
    Problem,
    Table,
    data_occupancy,
    ended_within,
    endings,
    gradient,
    objective,
    optimum,
    policy,
    policy_occupancy,
    residual,
    value,
)
from tests.oracles.tabular import Distribution, TabularMDP

GAMMA = 0.9
ORACLE = TabularMDP(ActionSpace(vocab_size=3, eos=2, bos=2), depth=2)
SENTENCES = {(0,): 0.4, (0, 1): 0.6}
DATA, CLEAN = (
    [(share * p, t) for words, share in SENTENCES.items() for p, t in ORACLE.noised(words, rate)] for rate in (0.2, 0)
)


def coin(tokens: float = 1.0) -> Table:
    """At the start, stay or end; data ends at once. `tokens` of them stay."""
    stay_or_end = [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]]
    return Table(
        rows=("start", "end"),
        row=torch.tensor([0, 1]),
        count=torch.tensor([[tokens, 1.0], [0.0, 1.0]], dtype=torch.float64),
        transition=torch.tensor(stay_or_end, dtype=torch.float64),
        is_absorbing=torch.tensor([False, True]),
        demonstrations=[Demonstration(1.0, ((0, 1, 1),))],
    )


def from_oracle(data: Distribution) -> Table:
    """The oracle's decision process: every state a row of its own."""
    states = list(ORACLE.index)
    actions = torch.nn.functional.one_hot(ORACLE.successor, len(states)).to(torch.float64)
    steps = []
    for probability, trajectory in data:
        visits = [ORACLE.index[state] for state in trajectory.states()]
        decisions = tuple(zip(visits, trajectory.chosen, visits[1:], strict=False))
        steps.append(Demonstration(probability, decisions))
    return Table(
        rows=tuple(map(str, states)),
        row=torch.arange(len(states)),
        count=ORACLE.is_open.to(torch.float64),
        transition=actions * ORACLE.is_open[:, :, None],
        is_absorbing=ORACLE.is_absorbing,
        demonstrations=steps,
    )


def some_logits(table: Table) -> Float[Tensor, "row action"]:
    return torch.randn(table.count.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_coin_by_hand() -> None:
    # p = 1/2 each: 2 actions on average; ρ(start) = 1/(1 − γ/2); three in four have ended after two actions.
    table, zeros = coin(), torch.zeros(2, 2, dtype=torch.float64)
    ended, actions = endings(table, zeros)
    assert (ended.tolist(), actions) == ([0.0, 1.0], 2.0)
    assert ended_within(table, zeros, 2).tolist() == [0.0, 0.75]
    assert float(policy_occupancy(table, zeros, GAMMA)[0].sum()) == pytest.approx(1 / (1 - GAMMA / 2))
    # Data: ℓ(<eos>|start) once, then γ/(1 − γ) in the end.
    assert data_occupancy(table, GAMMA)[:, 1, 1].tolist() == pytest.approx([1.0, GAMMA / (1 - GAMMA)])


def test_tokens_that_share_a_logit_count_each() -> None:
    table, zeros = coin(tokens=3), torch.zeros(2, 2, dtype=torch.float64)
    assert policy(table, zeros)[0].tolist() == pytest.approx([0.75, 0.25])
    assert endings(table, zeros)[1] == pytest.approx(4)


def test_values_and_occupancies_are_the_oracles() -> None:
    table = from_oracle(DATA)
    logits = some_logits(table)
    torch.testing.assert_close(value(table, logits), ORACLE.value(logits))
    torch.testing.assert_close(policy_occupancy(table, logits, GAMMA).sum(2), ORACLE.policy_occupancy(logits, GAMMA))
    torch.testing.assert_close(data_occupancy(table, GAMMA).sum(2), ORACLE.data_occupancy(DATA, GAMMA))


@pytest.mark.parametrize("divergence", [CHI2, CHI2_MIXTURE], ids=lambda d: d.name)
def test_the_gradient_is_that_of_the_objective(divergence: Divergence) -> None:
    problem = Problem(from_oracle(DATA), divergence, 0.3, GAMMA)
    logits = some_logits(problem.table).requires_grad_()
    rollouts = policy_occupancy(problem.table, logits.detach(), GAMMA)
    (expected,) = torch.autograd.grad(objective(problem, logits, rollouts), logits)
    found = gradient(problem, logits.detach(), rollouts)
    torch.testing.assert_close(found[problem.table.is_open], expected[problem.table.is_open])


def test_at_the_optimum_the_policys_occupancy_is_the_datas_corrected() -> None:
    # ρ_data φ'(α r) − 2 κ α r ρ_θ = ρ_θ where every state has its own row and chosen actions are executed; by the oracle.
    table, alpha = from_oracle(CLEAN), 0.5
    problem = Problem(table, CHI2_MIXTURE, alpha, GAMMA)
    found = optimum(problem, torch.zeros_like(table.count))
    assert found.residual <= 1e-9
    x = alpha * ORACLE.reward(found.logits, GAMMA)
    on_data, own = ORACLE.data_occupancy(CLEAN, GAMMA), ORACLE.policy_occupancy(found.logits, GAMMA)
    balance = on_data * CHI2_MIXTURE.phi_prime(x) - 2 * CHI2_MIXTURE.on_policy * x * own - own
    assert float(balance[own > 1e-30].abs().max()) <= 1e-8


def test_elsewhere_the_residual_is_not_zero() -> None:
    problem = Problem(from_oracle(DATA), CHI2_MIXTURE, 0.5, GAMMA)
    assert residual(problem, some_logits(problem.table)) > 0.1


def test_too_few_refreshes_are_an_error() -> None:
    problem = Problem(from_oracle(DATA), CHI2_MIXTURE, 0.5, GAMMA)
    with pytest.raises(NoOptimumError, match="After 2 refreshes of the rollouts the gradient is still"):
        optimum(problem, torch.zeros_like(problem.table.count), refreshes=2)


def test_settings_that_eq_4_does_not_allow_are_refused() -> None:
    with pytest.raises(ValueError, match="`gamma` must lie strictly between 0 and 1"):
        Problem(coin(), CHI2, 0.1, 1.0)
    with pytest.raises(ValueError, match="`alpha` must be positive"):
        Problem(coin(), CHI2, 0.0, GAMMA)
    with pytest.raises(
        ValueError, match="`divergence` must be an f-divergence: the penalty of mmd on the reward would"
    ):
        Problem(coin(), MMD, 0.1, GAMMA)
