"""Eq. 4 term by term, its limits and identities, and the baselines."""

import itertools
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sequencematch.core.divergences import CHI2, DIVERGENCES, TOTAL_VARIATION, Divergence
from sequencematch.core.encoding import encode
from sequencematch.core.mdp import Trajectory
from sequencematch.core.objectives import (
    Scores,
    bc_loss,
    data_reward,
    data_tail,
    implied_reward,
    mle_loss,
    model_penalty,
    repeat_candidates,
    repeated_ngrams,
    sequence_unlikelihood_loss,
    sequencematch_loss,
    unlikelihood_loss,
    value_difference,
)
from tests import programs
from tests.oracles import equations
from tests.oracles.equations import Raw
from tests.strategies import SPACE

every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES.keys())
TERMS = ("loss", "data_reward", "data_tail", "data_value", "model_value", "model_penalty")


def random_raw(generator: torch.Generator, lengths: list[int], actions: int = 5, scale: float = 2.0) -> list[Raw]:
    return [
        Raw(
            logits=(scale * torch.randn(length + 1, actions, generator=generator, dtype=torch.float64)).tolist(),
            actions=torch.randint(actions, (length,), generator=generator).tolist(),
            policy_chosen=(torch.rand(length, generator=generator) < 0.7).tolist(),
        )
        for length in lengths
    ]


def scores(raws: list[Raw], padding: float = math.nan, extra: int = 0, dtype: torch.dtype = torch.float64) -> Scores:
    """Gather action logits and values of ragged trajectories, the rest filled with `padding`."""
    steps = max(len(raw.actions) for raw in raws) + extra
    action_logit = torch.full((len(raws), steps), padding, dtype=dtype)
    value = torch.full((len(raws), steps + 1), padding, dtype=dtype)
    policy_chosen = torch.ones(len(raws), steps, dtype=torch.bool)
    for b, raw in enumerate(raws):
        length = len(raw.actions)
        logits = torch.tensor(raw.logits, dtype=dtype)
        action_logit[b, :length] = logits[:-1].gather(1, torch.tensor(raw.actions)[:, None]).squeeze(1)
        value[b, : length + 1] = logits.logsumexp(1)
        policy_chosen[b, :length] = torch.tensor(raw.policy_chosen)
    return Scores(action_logit, value, torch.tensor([len(raw.actions) for raw in raws]), policy_chosen)


def test_every_term_by_hand() -> None:
    """One data step, one rollout step; γ = ½, α = 1, φ(x) = x − x²/4 and κ = ¼ of the mixture.

    Data:  ℓ = 1, V(s₀) = 2, V(s₁) = 4, so r = 1 − ½·4 = −1.
      A = φ(−1) = −1 − ¼ = −1.25
      C = ½/½ · φ(½·4) = φ(2) = 2 − 1 = 1
      B = ½ (2 − ½·4) + ½·½·4 = 0 + 1 = 1 = ½ V(s₀)
    Model: ℓ = 3, V(u₀) = 6, V(u₁) = 2, so r = 3 − 1 = 2.
      D = ½ (6 − 1) + ½·½·2 = 2.5 + 0.5 = 3 = ½ V(u₀)
      E = ¼ (2² + ½/½ · (½·2)²) = ¼ (4 + 1) = 1.25
    Ĵ = −1.25 + 1 − 1 − 3 − 1.25 = −5.5, over N = 1 decision.
    """
    yes = torch.tensor([[True]])
    data = Scores(torch.tensor([[1.0]]), torch.tensor([[2.0, 4.0]]), torch.tensor([1]), yes)
    model = Scores(torch.tensor([[3.0]]), torch.tensor([[6.0, 2.0]]), torch.tensor([1]), yes)
    result = sequencematch_loss(data, model, alpha=1.0, gamma=0.5)
    assert [float(getattr(result, term)) for term in TERMS] == [5.5, -1.25, 1.0, 1.0, 3.0, 1.25]
    assert implied_reward(data, 0.5).tolist() == [[-1.0]]


def test_the_gradient_by_hand() -> None:
    """∂(−A)/∂ℓ = −φ'(αr) = −(1 − r/2) = −1.5 at r = −1; V(s₀) occurs only in B: ∂(B)/∂V(s₀) = ½."""
    logit = torch.tensor([[1.0]], requires_grad=True)
    value = torch.tensor([[2.0, 4.0]], requires_grad=True)
    data = Scores(logit, value, torch.tensor([1]), torch.tensor([[False]]))
    model = Scores(torch.tensor([[3.0]]), torch.tensor([[6.0, 2.0]]), torch.tensor([1]), torch.tensor([[True]]))
    by_logit, by_value = torch.autograd.grad(sequencematch_loss(data, model, alpha=1.0, gamma=0.5).loss, (logit, value))
    assert by_logit.tolist() == [[-1.5]]
    # V(s₁): −∂A = φ'(−1)·γ = 0.75; −∂C = −φ'(2)·½ = 0; ∂B = −¼ + ¼ = 0.
    assert by_value.tolist() == [[0.5, 0.75]]


@every_divergence
@pytest.mark.parametrize("generator", [0, 1, 2], indirect=True)
@pytest.mark.parametrize(("alpha", "gamma"), [(1.0, 0.9), (0.1, 0.5), (0.01, 0.998)])
def test_all_terms_equal_the_triple_loop(
    divergence: Divergence, generator: torch.Generator, alpha: float, gamma: float
) -> None:
    data, model = random_raw(generator, [3, 1, 7]), random_raw(generator, [5, 2])
    got = sequencematch_loss(scores(data), scores(model), divergence=divergence, alpha=alpha, gamma=gamma)
    expected = equations.sequencematch_terms(data, model, divergence.name, alpha, gamma)
    for term in TERMS:
        assert float(getattr(got, term)) == pytest.approx(expected[term], rel=1e-11, abs=1e-13), term


@every_divergence
def test_gradients_pass_gradcheck(divergence: Divergence, generator: torch.Generator) -> None:
    data, model = scores(random_raw(generator, [3, 1]), padding=0.0), scores(random_raw(generator, [2, 4]), padding=0.0)

    def loss(*tensors: Tensor) -> Tensor:
        d = Scores(tensors[0], tensors[1], data.length, data.policy_chosen)
        m = Scores(tensors[2], tensors[3], model.length, model.policy_chosen)
        return sequencematch_loss(d, m, divergence=divergence, alpha=0.3, gamma=0.9).loss

    inputs = [t.requires_grad_() for t in (data.action_logit, data.value, model.action_logit, model.value)]
    assert torch.autograd.gradcheck(loss, inputs)


@every_divergence
@pytest.mark.parametrize("gamma", [0.9, 0.999])
def test_the_absorbing_tail_equals_an_explicit_unroll(
    divergence: Divergence, gamma: float, generator: torch.Generator
) -> None:
    """20,000 further steps in the final state, each with reward V − γV; what is left is below γ^20000 = 2e-9."""
    alpha, raw = 0.3, random_raw(generator, [4])
    short = scores(raw)
    final = float(short.final_value)
    steps = gamma ** torch.arange(4, 20_004, dtype=torch.float64)
    reward = torch.tensor(alpha * (final - gamma * final), dtype=torch.float64)
    unrolled_data = (steps * divergence(reward)).sum() / alpha
    unrolled_model = divergence.on_policy / alpha * (steps * reward**2).sum()
    unrolled_value = 0.5 * (steps * (final - gamma * final)).sum()
    assert float(data_tail(short, divergence, alpha, gamma)) == pytest.approx(float(unrolled_data), rel=1e-7)
    without_tail = Scores(
        short.action_logit, short.value * torch.tensor([1.0] * 4 + [0.0]), short.length, ~short.is_step
    )
    chosen_nothing = Scores(short.action_logit, short.value, short.length, ~short.is_step)
    tail = model_penalty(chosen_nothing, divergence, alpha, gamma) - model_penalty(
        without_tail, divergence, alpha, gamma
    )
    assert float(tail) == pytest.approx(float(unrolled_model), rel=1e-7)
    steps_only = sum(0.5 * gamma**t * float(short.value[0, t] - gamma * short.value[0, t + 1]) for t in range(4))
    assert float(value_difference(short, gamma)) == pytest.approx(steps_only + float(unrolled_value), rel=1e-7)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), gamma=st.floats(0.01, 0.999), seed=st.integers(0, 99)
)
def test_the_value_sums_telescope_to_half_the_initial_value(lengths: list[int], gamma: float, seed: int) -> None:
    batch = scores(random_raw(torch.Generator().manual_seed(seed), lengths))
    torch.testing.assert_close(value_difference(batch, gamma), 0.5 * batch.value[:, 0], rtol=1e-12, atol=1e-12)


@every_divergence
def test_as_alpha_vanishes_it_becomes_discounted_maximum_likelihood(
    divergence: Divergence, generator: torch.Generator
) -> None:
    """lim α→0 Ĵ = Σ γᵗ (ℓ_t − V_t) where rollouts start like data; the distance, and the gradient's, shrinks like α."""
    gamma, raw = 0.9, random_raw(generator, [3, 6, 1])
    logits = scores(raw, padding=0.0)
    action_logit, value = logits.action_logit.requires_grad_(), logits.value.requires_grad_()
    data = Scores(action_logit, value, logits.length, logits.policy_chosen)
    discount = torch.where(data.is_step, gamma ** torch.arange(6, dtype=torch.float64), 0)
    limit = -(discount * (action_logit - value[:, :-1])).sum() / 10
    limit_gradient = torch.cat(
        [g.flatten() for g in torch.autograd.grad(limit, (action_logit, value), allow_unused=True)]
    )

    def distances(alpha: float) -> tuple[float, float]:
        loss = sequencematch_loss(data, data, divergence=divergence, alpha=alpha, gamma=gamma).loss
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, (action_logit, value))])
        return float((loss - limit).detach().abs()), float((gradient - limit_gradient).abs().max())

    for coarse, fine in zip(distances(1e-4), distances(1e-6), strict=True):
        assert fine <= 1e-4
        # Linear in α; total variation is φ(x) = x near 0 and hits the limit at once, up to rounding over α.
        if divergence is not TOTAL_VARIATION:
            assert coarse / fine == pytest.approx(100, rel=0.05)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=5),
    alpha=st.floats(0.01, 2),
    gamma=st.floats(0.01, 0.999),
    seed=st.integers(0, 99),
)
def test_the_mixture_is_discounted_cloning_less_squared_rewards(
    lengths: list[int], alpha: float, gamma: float, seed: int
) -> None:
    """N Ĵ = Σ_data γᵗ log p(a_t|s_t) − (α/4) Σ r² over data and over rollouts, the stay in the absorbing state included.

    With D = ½ Σ_data V(s₀). So V is no part of cloning: it is the potential that makes rewards small, by least squares.
    """
    generator = torch.Generator().manual_seed(seed)
    data, model = (scores(random_raw(generator, part), padding=0.0) for part in (lengths, lengths[1:]))
    got = sequencematch_loss(data, model, alpha=alpha, gamma=gamma, model_value_from_data=True)

    def squares(batch: Scores, counts: Tensor) -> Tensor:
        discount = gamma ** torch.arange(counts.shape[1], dtype=torch.float64)
        steps = (discount * torch.where(counts, implied_reward(batch, gamma), 0) ** 2).sum(1)
        return steps + gamma ** batch.length.double() * (1 - gamma) * batch.final_value**2

    cloning = (gamma ** torch.arange(data.is_step.shape[1], dtype=torch.float64) * data.log_prob()).sum()
    on_policy = len(lengths) / len(lengths[1:]) * squares(model, model.policy_chosen).sum()
    expected = cloning - alpha / 4 * (squares(data, data.is_step).sum() + on_policy)
    assert -float(got.loss) * sum(lengths) == pytest.approx(float(expected), rel=1e-9, abs=1e-9)


def test_results_do_not_change_with_padding_or_batch_order(generator: torch.Generator) -> None:
    data, model = random_raw(generator, [3, 1, 7]), random_raw(generator, [5, 2, 2])
    plain = sequencematch_loss(scores(data), scores(model), alpha=0.1, gamma=0.9)
    padded = sequencematch_loss(scores(data, extra=9), scores(model, padding=math.inf, extra=4), alpha=0.1, gamma=0.9)
    shuffled = sequencematch_loss(scores(data[::-1]), scores([model[i] for i in (1, 2, 0)]), alpha=0.1, gamma=0.9)
    for term in TERMS:
        torch.testing.assert_close(getattr(padded, term), getattr(plain, term), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(getattr(shuffled, term), getattr(plain, term), rtol=1e-13, atol=1e-13)


def test_padding_of_any_value_gets_no_gradient(generator: torch.Generator) -> None:
    data = scores(random_raw(generator, [3, 1]))
    action_logit, value = data.action_logit.requires_grad_(), data.value.requires_grad_()
    batch = Scores(action_logit, value, data.length, data.policy_chosen)
    loss = sequencematch_loss(batch, batch, alpha=0.1, gamma=0.9).loss + bc_loss(batch)
    by_logit, by_value = torch.autograd.grad(loss, (action_logit, value))
    assert by_logit[1, 1:].tolist() == [0.0, 0.0]
    assert by_value[1, 2:].tolist() == [0.0, 0.0]
    assert bool(by_logit[0].isfinite().all() and by_value[0].isfinite().all())


def test_two_half_batches_accumulate_to_one(generator: torch.Generator) -> None:
    """With the denominators of the whole step, whatever lands in which half. Without them it is another estimator."""
    data, model = scores(random_raw(generator, [3, 1, 7, 2])), scores(random_raw(generator, [5, 2, 4, 1, 1, 6]))
    whole = sequencematch_loss(data, model, alpha=0.1, gamma=0.9).loss
    halves = [(data[:1], model[:4]), (data[1:], model[4:])]
    items, weight = data.length.sum(), 4 / 6
    total = torch.stack(
        [sequencematch_loss(d, m, alpha=0.1, gamma=0.9, num_items=items, model_weight=weight).loss for d, m in halves]
    ).sum()
    torch.testing.assert_close(total, whole, rtol=1e-13, atol=1e-13)
    careless = torch.stack([sequencematch_loss(d, m, alpha=0.1, gamma=0.9).loss for d, m in halves]).mean()
    assert float((careless - whole).abs()) > 0.1
    halves_of_bc = bc_loss(data[:2], num_items=items) + bc_loss(data[2:], num_items=items)
    torch.testing.assert_close(halves_of_bc, bc_loss(data))


def test_without_rollouts_they_are_taken_to_start_where_data_does(generator: torch.Generator) -> None:
    data = scores(random_raw(generator, [3, 1, 7]))
    alone = sequencematch_loss(data, None, divergence=CHI2, alpha=0.1, gamma=0.9)
    assert float(alone.model_value) == float(alone.data_value)
    same_start = scores(random_raw(generator, [4, 2, 2]))
    same_start = Scores(
        same_start.action_logit,
        torch.cat([data.value[:, :1], same_start.value[:, 1:]], 1),
        same_start.length,
        same_start.policy_chosen,
    )
    rolled = sequencematch_loss(data, same_start, divergence=CHI2, alpha=0.1, gamma=0.9)
    torch.testing.assert_close(rolled.loss, alone.loss)


@pytest.mark.parametrize("generator", [0, 1, 2], indirect=True)
@pytest.mark.parametrize(("alpha", "gamma"), [(1.0, 0.9), (0.01, 0.998)])
def test_of_rollouts_from_prompts_of_their_own_only_the_penalty_counts(
    generator: torch.Generator, alpha: float, gamma: float
) -> None:
    """The oracle writes D as ½ Σ V(s₀) over data. Other first values of the rollouts change nothing; by default they do."""
    data, model = random_raw(generator, [3, 1, 7]), random_raw(generator, [5, 2])
    ours, theirs = scores(data), scores(model)
    got = sequencematch_loss(ours, theirs, alpha=alpha, gamma=gamma, model_value_from_data=True)
    expected = equations.sequencematch_terms(data, model, "chi2_mixture", alpha, gamma, value_of_data=True)
    for term in TERMS:
        assert float(getattr(got, term)) == pytest.approx(expected[term], rel=1e-11, abs=1e-13), term
    value = theirs.value.clone()
    value[:, 0] += 3
    shifted = Scores(theirs.action_logit, value, theirs.length, theirs.policy_chosen)
    again = sequencematch_loss(ours, shifted, alpha=alpha, gamma=gamma, model_value_from_data=True)
    assert float(again.loss) == float(got.loss)
    by_default = [float(sequencematch_loss(ours, m, alpha=alpha, gamma=gamma).loss) for m in (theirs, shifted)]
    assert by_default[1] - by_default[0] == pytest.approx(1.5 * 3 / 11)  # w · 2 rollouts · ½ · 3 over N = 11


def test_a_value_sum_on_prompts_of_their_own_would_pull_v_apart() -> None:
    """All rewards 0, then V + c everywhere: r and (1 − γ)V become (1 − γ)c, and a sum over all time is (1 − γ)c²·….

    On the rollout D + E = c/2 + α(1 − γ)c²/4 is least at c = −1/(α(1 − γ)), on data A + C − B is greatest at its opposite.
    With D = B both are best at c = 0.
    """
    alpha, gamma = 0.1, 0.9
    best = 1 / (alpha * (1 - gamma))

    def slopes(on_data: float, on_rollouts: float, **options: Any) -> list[float]:
        shifts = [torch.tensor(c, dtype=torch.float64, requires_grad=True) for c in (on_data, on_rollouts)]
        flat = torch.zeros(1, 4, dtype=torch.float64)
        length, chosen = torch.tensor([3]), torch.ones(1, 3, dtype=torch.bool)
        data, model = (Scores(flat[:, :3] + c, flat + c, length, chosen) for c in shifts)
        loss = sequencematch_loss(data, model, alpha=alpha, gamma=gamma, **options).loss
        return [float(slope) for slope in torch.autograd.grad(loss, shifts)]

    assert slopes(best, -best) == pytest.approx([0, 0], abs=1e-12)
    assert slopes(0.0, 0.0) == pytest.approx([-1 / 6, 1 / 6])  # ∓½ over N = 3
    assert slopes(0.0, 0.0, model_value_from_data=True) == pytest.approx([0, 0], abs=1e-12)


def test_the_on_policy_term_leaves_out_what_the_policy_did_not_choose(generator: torch.Generator) -> None:
    """A prompt counted as decisions is penalised nowhere: E with it equals γ^prompt times E without it."""
    gamma, prompt = 0.9, 3
    model = scores(random_raw(generator, [8]))
    chosen = torch.arange(8)[None] >= prompt
    with_prompt = Scores(model.action_logit, model.value, model.length, chosen)
    without = Scores(model.action_logit[:, prompt:], model.value[:, prompt:], model.length - prompt, chosen[:, prompt:])
    mixture = DIVERGENCES["chi2_mixture"]
    expected = gamma**prompt * model_penalty(without, mixture, 0.1, gamma)
    torch.testing.assert_close(model_penalty(with_prompt, mixture, 0.1, gamma), expected)
    everything = Scores(model.action_logit, model.value, model.length, torch.ones_like(chosen))
    assert float((model_penalty(everything, mixture, 0.1, gamma) - expected).abs()) > 1e-3


def test_scores_from_logits_are_the_chosen_logit_and_the_logsumexp(generator: torch.Generator) -> None:
    encoding = encode(
        [Trajectory.demonstration(SPACE, (0,), (1, 2)), Trajectory.rollout(SPACE, (0,), (3, SPACE.bkspc, 1))]
    )
    logits = torch.randn(2, 4, SPACE.size, generator=generator)
    batch = Scores.from_logits(logits.bfloat16(), encoding)
    rounded = logits.bfloat16().float()
    for b, t in itertools.product(range(2), range(3)):
        assert float(batch.action_logit[b, t]) == float(rounded[b, t, encoding.chosen[b, t]])
        assert float(batch.value[b, t]) == pytest.approx(equations.value(rounded[b, t].tolist()), rel=1e-6)
        over_tokens = Scores.from_logits(logits, encoding, backspace=False).value[b, t]
        assert float(over_tokens) == pytest.approx(equations.value(logits[b, t, :-1].tolist()), rel=1e-6)
    assert batch[1:].policy_chosen.tolist() == [[True, True, True]]
    assert batch[:1].length.tolist() == [3]


def test_half_precision_is_raised_and_discounts_stay_exact() -> None:
    """γ itself rounded to float32 would be off by 1e3 · 3e-8 = 3e-5 after a thousand steps; float32 sums keep 1e-6."""
    steps, gamma = 1024, 0.998
    value = torch.linspace(-3, 9, steps + 1)[None]
    data = Scores(
        torch.zeros(1, steps, dtype=torch.bfloat16),
        value,
        torch.tensor([steps]),
        torch.zeros(1, steps, dtype=torch.bool),
    )
    assert data.action_logit.dtype == torch.float32
    assert Scores(data.action_logit, value.bfloat16(), data.length, data.policy_chosen).value.dtype == torch.float32
    exact = Scores(data.action_logit.double(), value.double(), data.length, data.policy_chosen)
    for term in (data_reward, data_tail):
        torch.testing.assert_close(
            term(data, CHI2, 0.01, gamma).double(), term(exact, CHI2, 0.01, gamma), rtol=2e-6, atol=0
        )


def test_behavioural_cloning_and_maximum_likelihood_equal_the_loop(generator: torch.Generator) -> None:
    raw = random_raw(generator, [3, 1, 7])
    assert float(bc_loss(scores(raw, extra=2))) == pytest.approx(equations.negative_log_likelihood(raw), rel=1e-13)
    assert float(mle_loss(scores(raw, extra=2))) == pytest.approx(equations.negative_log_likelihood(raw), rel=1e-13)


def test_averaging_each_sequence_over_its_own_length_is_another_estimator(generator: torch.Generator) -> None:
    """Negative control of the denominator (the paper's footnote in §2.1)."""
    raw = random_raw(generator, [1, 9])
    per_sequence = sum(equations.negative_log_likelihood([one]) for one in raw) / 2
    assert abs(float(bc_loss(scores(raw))) - per_sequence) > 0.1


def test_repeat_candidates_are_the_distinct_earlier_tokens_other_than_the_target() -> None:
    """Prompt 1 2, completion 1 3 1 <eos>. Before the second 1 the context is {1, 2}, so only 2 may be made unlikely."""
    encoding = encode([Trajectory.demonstration(SPACE, (1, 2), (1, 3, 1)), Trajectory.demonstration(SPACE, (3,), (3,))])
    candidates = repeat_candidates(encoding)
    sets = [[set(encoding.tokens[b][row].tolist()) for row in rows] for b, rows in enumerate(candidates)]
    assert sets[0] == [{2}, {1, 2}, {2, 3}, {1, 2, 3}]
    assert sets[1] == [set(), {3}, set(), set()]
    assert int(candidates[0, 3].sum()) == 3  # each once
    for wrong in (
        encode([Trajectory.demonstration(SPACE, (1,), (2,))] * 2, row_length=8),
        encode([Trajectory.rollout(SPACE, (1,), (2, SPACE.bkspc, 3, SPACE.eos))]),
    ):
        with pytest.raises(
            ValueError, match=re.escape("`encoding` must hold one trajectory a row, without deletions.")
        ):
            repeat_candidates(wrong)


def test_token_unlikelihood_by_hand_and_against_the_loop(generator: torch.Generator) -> None:
    """−log(1 − ½) − log(1 − ¼) over N = 2."""
    log_prob = torch.tensor([[[0.5, 0.25, 0.9]]]).log()
    loss = unlikelihood_loss(log_prob, torch.tensor([[[True, True, False]]]), num_items=2)
    assert float(loss) == pytest.approx((math.log(2) + math.log(4 / 3)) / 2, rel=1e-6)
    log_prob = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64).log_softmax(-1)
    counts = torch.rand(2, 3, 4, generator=generator) < 0.5
    expected = -sum(
        math.log(1 - math.exp(p))
        for p, c in zip(log_prob.flatten().tolist(), counts.flatten().tolist(), strict=True)
        if c
    )
    assert float(unlikelihood_loss(log_prob, counts, num_items=7)) == pytest.approx(expected / 7, rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: unlikelihood_loss(x, counts, num_items=7), [log_prob.requires_grad_()])


def slow_repeats(tokens: list[int], n: int) -> list[bool]:
    """x_t is part of some n-gram x_{s..s+n−1} that also occurs inside x_{<s}."""
    repeats = [False] * len(tokens)
    for s in range(len(tokens) - n + 1):
        if any(tokens[i : i + n] == tokens[s : s + n] for i in range(s - n + 1)):
            repeats[s : s + n] = [True] * n
    return repeats


@given(
    batch=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=25), min_size=1, max_size=4), n=st.integers(1, 4)
)
def test_repeated_ngrams_equal_a_slow_search(batch: list[list[int]], n: int) -> None:
    """Padding repeats a token on purpose: it must not count, nor may rows see each other."""
    steps = max(map(len, batch))
    tokens = torch.tensor([row + [0] * (steps - len(row)) for row in batch])
    got = repeated_ngrams(tokens, torch.tensor([len(row) for row in batch]), n)
    assert got.tolist() == [slow_repeats(row, n) + [False] * (steps - len(row)) for row in batch]


def test_sequence_unlikelihood_by_hand() -> None:
    """Rollout probabilities ½, ¼, ¾ of which the last two repeat: −[log ¾ + log ¼] over three decisions."""
    model = Scores(
        torch.tensor([[0.5, 0.25, 0.75, 9.0]]).log(),
        torch.zeros(1, 5),
        torch.tensor([3]),
        torch.ones(1, 4, dtype=torch.bool),
    )
    loss = sequence_unlikelihood_loss(model, torch.tensor([[False, True, True, True]]))
    assert float(loss) == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 3, rel=1e-6)
    whole_step = sequence_unlikelihood_loss(model, torch.tensor([[False, True, True, True]]), num_items=6)
    assert float(whole_step) == pytest.approx(float(loss) / 2, rel=1e-6)


def test_unlikelihood_stays_finite_where_a_probability_rounds_to_one() -> None:
    """−log ε and no gradient, in float32 also for half-precision input; just below, −log(1 − p) and p/(1 − p)."""
    log_prob = torch.tensor([[[0.0, -1e-3]]], requires_grad=True)
    loss = unlikelihood_loss(log_prob, torch.tensor([[[True, True]]]), num_items=1)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert float(loss.detach()) == pytest.approx(23 * math.log(2) + math.log(1000), rel=1e-4)  # float32's ε is 2^−23
    assert gradient.flatten().tolist() == [0.0, pytest.approx(1000, rel=1e-3)]
    half = unlikelihood_loss(torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.tensor([[[True]]]), num_items=1)
    assert float(half) == pytest.approx(23 * math.log(2))


@pytest.mark.parametrize("gamma", [0.0, 1.0, 1.5, -0.1, math.nan])
def test_a_gamma_outside_the_open_unit_interval_is_refused(gamma: float, generator: torch.Generator) -> None:
    data = scores(random_raw(generator, [2]))
    message = (
        f"`gamma` must lie strictly between 0 and 1: the <eos> term of Eq. 4 divides by 1 - gamma. Got gamma={gamma}."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        sequencematch_loss(data, data, alpha=0.1, gamma=gamma)


def test_other_wrong_arguments_are_refused(generator: torch.Generator) -> None:
    data = scores(random_raw(generator, [2]))
    for alpha in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(
            ValueError, match=re.escape(f"`alpha` must be positive and finite: Eq. 4 divides by it. Got alpha={alpha}.")
        ):
            sequencematch_loss(data, data, alpha=alpha, gamma=0.9)
    with pytest.raises(ValueError, match=re.escape("`model` must hold rollouts for chi2_mixture")):
        sequencematch_loss(data, None, alpha=0.1, gamma=0.9)
    with pytest.raises(ValueError, match=re.escape("`model_weight` would be ignored: without rollouts D = B.")):
        sequencematch_loss(data, None, divergence=CHI2, alpha=0.1, gamma=0.9, model_weight=3.0)
    with pytest.raises(
        ValueError, match=re.escape("`model_value_from_data` would be ignored: without rollouts D = B. Got True")
    ):
        sequencematch_loss(data, None, divergence=CHI2, alpha=0.1, gamma=0.9, model_value_from_data=True)
    for items in (0, -3.0):
        message = f"`num_items` must be positive: it is the number of scored decisions. Got {items}."
        with pytest.raises(ValueError, match=re.escape(message)):
            bc_loss(data, num_items=items)
    with pytest.raises(ValueError, match=re.escape("select trajectories with a slice that holds some.")):
        data[1:]
    for length in (0, 3):
        message = f"`length` must lie between 1 and the 2 steps there are. Got [{length}]."
        with pytest.raises(ValueError, match=re.escape(message)):
            Scores(data.action_logit, data.value, torch.tensor([length]), data.policy_chosen)
    with pytest.raises(ValueError, match=re.escape("`n` must be at least 1")):
        repeated_ngrams(torch.zeros(1, 3, dtype=torch.long), torch.tensor([3]), n=0)


SHAPES = "beside `action_logit` of shape (1, 2) [batch, step]; `value` has one state more than there are decisions."


#: Call → the refusal.
REFUSED = {
    "Scores(x, zeros(1, 2), one, yes)": f"`value` must have shape (1, 3) {SHAPES} Got (1, 2).",
    "Scores(x, zeros(1, 3), ones(2).long(), yes)": f"`length` must have shape (1,) {SHAPES} Got (2,).",
    "Scores(x, zeros(1, 3), one, yes[:, :1])": f"`policy_chosen` must have shape (1, 2) {SHAPES} Got (1, 1).",
    "Scores(x[0], zeros(1, 3), one, yes)": "`action_logit` must have shape [batch, step], neither of them 0. Got (2,);",
    "Scores(x, zeros(1, 3), ones(1), yes)": "`length` must hold integers and `policy_chosen` booleans. Got torch.float32",
    "unlikelihood_loss(zeros(1, 2, 3), yes[..., None], num_items=1)": "`is_candidate` must have the shape of",
    "Points(zeros(2), zeros(3, 3))": "`matrix` must hold a number for every pair of the 2 points in `reward`.",
    "sequencematch_loss(s, s, divergence='chi2', alpha=1, gamma=.9)": "`divergence` must be a Divergence, such as",
}


def test_what_a_shape_checker_would_refuse_is_refused_without_one() -> None:
    """In a process of its own, as a user has it: here the run-time checker answers first."""
    code = f"""
from torch import ones, tensor, zeros
from sequencematch.core.integral_metrics import Points
from sequencematch.core.objectives import Scores, sequencematch_loss, unlikelihood_loss
x, one, yes = zeros(1, 2), tensor([1]), tensor([[True, True]])
s = Scores(x, zeros(1, 3), one, yes)
for call in {list(REFUSED)}:
    try:
        print(eval(call))
    except ValueError as error:
        print(error)
"""
    run = programs.run("-c", code)
    assert run.returncode == 0, run.stderr
    for (call, message), refusal in zip(REFUSED.items(), run.stdout.splitlines(), strict=True):
        assert refusal.startswith(message), call
