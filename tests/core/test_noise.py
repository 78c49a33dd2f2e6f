"""§4.2: wrong tokens that are pushed and deleted again."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.core.noise import NoiseSource, add_noise, burst_end_noise, model_noise, step_noise, token_noise
from tests.strategies import BK, SPACE, prompts, tokens

EOS = SPACE.eos
LONG = Trajectory.demonstration(SPACE, (4, 0), [0, 1, 2, 3] * 2500)
logits = torch.randn(10_001, SPACE.size, generator=torch.Generator().manual_seed(7))
SOURCES: dict[str, NoiseSource] = {
    "uniform": token_noise(SPACE),
    "token set": token_noise(SPACE, {0, 2}),
    "tokens by step": step_noise(SPACE, [[0, 1], [1, 2], [0, 1, 2, 3, EOS], [3]] * 2500),
    "model": model_noise(SPACE, logits),
    "bursts with ends": burst_end_noise(SPACE, token_noise(SPACE), {1, 3}),
}
every_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())


def wrong_tokens(noised: Trajectory) -> list[tuple[int, int]]:
    """(right action, pushed token) wherever they differ."""
    return [(a, e) for a, e in zip(noised.chosen, noised.executed, strict=True) if a != e]


def test_a_noisy_step_becomes_three_visits(generator: torch.Generator) -> None:
    """Clean: 1 <eos>. The only wrong token for 1 is 0, for <eos> it is 0 or 1; at rate 1 every step gets one."""
    space = ActionSpace(vocab_size=3, eos=2)
    clean = Trajectory.demonstration(space, (0,), (1,))
    noised = add_noise(clean, 1.0, token_noise(space), generator)
    w = noised.executed[3]
    assert noised.chosen == (1, 3, 1, 2, 3, 2)
    assert noised.executed == (0, 3, 1, w, 3, 2)
    assert w in (0, 1)
    assert [s.tokens for s in noised.states()] == [(0,), (0, 0), (0,), (0, 1), (0, 1, w), (0, 1), (0, 1, 2)]
    assert noised.render(str) == f"0<bkspc>1{w}<bkspc><eos>"


@given(prompt=prompts, completion=st.lists(tokens, max_size=30), seed=st.integers(0, 999), burst=st.integers(1, 3))
def test_replaying_noised_data_ends_in_the_clean_sentence(
    prompt: tuple[int, ...], completion: list[int], seed: int, burst: int
) -> None:
    clean = Trajectory.demonstration(SPACE, prompt, completion)
    noised = add_noise(clean, 0.4, SOURCES["uniform"], torch.Generator().manual_seed(seed), burst=burst)
    assert noised.final_state == clean.final_state
    assert noised.initial == clean.initial
    # Taking noise out again, step by step, leaves the clean actions; and the prompt is never deleted from.
    states = list(noised.states())
    assert min(len(state.tokens) for state in states) >= len(prompt)
    kept = [
        a
        for a, e, s in zip(noised.chosen, noised.executed, states, strict=False)
        if a == e and a != BK and not s.absorbing
    ]
    assert tuple(kept) == clean.chosen


@every_source
def test_a_noised_trajectory_passes_all_checks_of_one_that_is_made_anew(
    source: NoiseSource, generator: torch.Generator
) -> None:
    noised = add_noise(LONG, 0.3, source, generator, burst=3)
    again = Trajectory(*(getattr(noised, field.name) for field in fields(noised)))
    assert (again, hash(again)) == (noised, hash(noised))
    for name in ("initial", "chosen", "executed", "policy_chosen"):
        assert {type(entry) for entry in getattr(noised, name)} <= {int, bool}
        assert type(getattr(noised, name)) is tuple


@every_source
def test_the_rate_is_within_a_binomial_bound(source: NoiseSource, generator: torch.Generator) -> None:
    """10,001 decisions at η = 0.1: the count lies within five standard deviations, √(n η (1 − η)) = 30 each."""
    noised = add_noise(LONG, 0.1, source, generator)
    count, steps = len(wrong_tokens(noised)), len(LONG)
    assert abs(count - 0.1 * steps) < 5 * math.sqrt(steps * 0.1 * 0.9)
    assert len(noised) == steps + 2 * count


@every_source
def test_noise_is_never_the_right_token_nor_a_special_one(source: NoiseSource, generator: torch.Generator) -> None:
    noised = add_noise(LONG, 1.0, source, generator)
    pushed = wrong_tokens(noised)
    assert len(pushed) == len(LONG)  # at most, and here exactly, one per clean step
    assert {w for _, w in pushed} <= {0, 1, 2, 3}
    assert noised.final_state == LONG.final_state


@every_source
def test_the_same_seed_gives_the_same_noise_and_another_does_not(source: NoiseSource) -> None:
    first, second, other = (add_noise(LONG, 0.1, source, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert first == second
    assert first != other


def test_uniform_noise_is_uniform_over_the_wrong_tokens(generator: torch.Generator) -> None:
    """2,500 draws where 1 is right: 0, 2 and 3 each within five standard deviations of a third."""
    noised = add_noise(LONG, 1.0, SOURCES["uniform"], generator)
    drawn = [w for right, w in wrong_tokens(noised) if right == 1]
    for token in (0, 2, 3):
        assert abs(drawn.count(token) - 2500 / 3) < 5 * math.sqrt(2500 * 2 / 9)
    assert drawn.count(1) == 0


def test_a_token_set_is_kept_to(generator: torch.Generator) -> None:
    noised = add_noise(LONG, 1.0, SOURCES["token set"], generator)
    pairs = {pair for pair in wrong_tokens(noised) if pair[0] != EOS}
    assert pairs == {(0, 2), (2, 0), (1, 0), (1, 2), (3, 0), (3, 2)}


def test_model_noise_follows_the_models_probabilities(generator: torch.Generator) -> None:
    """Where the model is sure of 3 and the right token is 0, noise is 3; where the right token is 3, the next best, 1."""
    sure = torch.tensor([[0.0, 20.0, 0.0, 40.0, 90.0, 90.0, 90.0]]).repeat(3, 1)
    clean = Trajectory.demonstration(SPACE, (4,), (0, 3))
    noised = add_noise(clean, 1.0, model_noise(SPACE, sure), generator)
    assert wrong_tokens(noised) == [(0, 3), (3, 1), (EOS, 3)]


def test_model_noise_is_drawn_from_the_row_of_its_own_step(generator: torch.Generator) -> None:
    """Row t of the logits is sure of token 1, 2, 3: so is the noise at step t."""
    rows = torch.zeros(3, SPACE.size)
    rows[torch.arange(3), torch.tensor([1, 2, 3])] = 40.0
    clean = Trajectory.demonstration(SPACE, (4,), (0, 0))
    assert wrong_tokens(add_noise(clean, 1.0, model_noise(SPACE, rows), generator)) == [(0, 1), (0, 2), (EOS, 3)]


def test_the_models_own_noise_makes_cloning_a_critic_of_its_tokens() -> None:
    """Behind w, data deletes a share η q̃/(p + η q̃), with q̃(w) = Σ_{r≠w} p(r) q(w)/(1 − q(r)): docs/concepts.md.

    p = (0.7, 0.2, 0.1), q = (0.4, 0.4, 0.2), η = 0.4: q̃(0) = 0.4 (0.2/0.6 + 0.1/0.8) = 0.183, and 0.4 q̃/(0.7 + 0.4 q̃) = 0.095.
    """
    space, rate = ActionSpace(vocab_size=4, eos=3), 0.4
    p, q = (0.7, 0.2, 0.1), (0.4, 0.4, 0.2)
    source = model_noise(space, torch.tensor([[*q, 1.0], [*q, 1.0]]).log())
    generator = torch.Generator().manual_seed(0)
    deleted, seen = [0.0] * 3, [0.0] * 3
    for right, share in enumerate(p):
        clean = Trajectory.demonstration(space, (0,), (right,))
        for _ in range(3000):
            noised = add_noise(clean, rate, source, generator)
            for t, state in enumerate(noised.states()):
                if len(state.tokens) == 2 and t < len(noised) and not (t > 1 and noised.executed[t - 1] == space.bkspc):
                    seen[state.tokens[1]] += share
                    deleted[state.tokens[1]] += share * (noised.chosen[t] == space.bkspc)
    own = [q[w] * sum(p[r] / (1 - q[r]) for r in range(3) if r != w) for w in range(3)]
    expected = [rate * own[w] / (p[w] + rate * own[w]) for w in range(3)]
    assert expected[0] == pytest.approx(0.095, abs=1e-3)
    found = [a / b for a, b in zip(deleted, seen, strict=True)]
    assert found == pytest.approx(expected, abs=0.03)  # three standard errors of 3,000 draws


def test_the_tokens_of_a_burst_come_from_the_lists_of_its_steps() -> None:
    """Steps 0, 1, 2 and <eos>. The right tokens are 0, 1, 2; in a burst from its second token on it is <bkspc>."""
    draw = step_noise(SPACE, [[0, 1], [1], [2, 3]])
    steps, rights = [0, 0, 0, 0, 1, 1, 2, 3, 3], [0, BK, BK, BK, 1, BK, 2, EOS, BK]
    drawn = [draw(steps, rights, torch.Generator().manual_seed(seed)) for seed in range(300)]
    assert [set(column) for column in zip(*drawn, strict=True)] == [
        *({1}, {1}, {2, 3}, {2, 3}),  # step 0: lists 0, 1, 2, and 2 again, the last
        *({0, 2, 3}, {2, 3}),  # step 1 has no wrong token: any of all lists. Then list 2.
        {3},
        *({2, 3}, {2, 3}),  # behind the last list
    ]
    plain = step_noise(SPACE, [[0, 1], [1], [2, 3]], exclude_right=False)
    drawn = [plain(steps, rights, torch.Generator().manual_seed(seed)) for seed in range(300)]
    assert [set(column) for column in zip(*drawn, strict=True)][4] == {1}


def test_equal_lists_for_all_steps_are_one_list_for_all() -> None:
    one, many = token_noise(SPACE, [0, 2, 3]), step_noise(SPACE, [[0, 2, 3]] * 5)
    first, second = (add_noise(LONG, 0.5, source, torch.Generator().manual_seed(3), burst=3) for source in (one, many))
    assert first == second
    other = step_noise(SPACE, [[0, 2, 3], [0, 1]])
    assert add_noise(LONG, 0.5, other, torch.Generator().manual_seed(3), burst=3) != first


def test_noise_on_a_rollout_was_not_chosen_by_the_policy(generator: torch.Generator) -> None:
    """Of each three visits the policy chose the last: the on-policy term counts that one alone."""
    noised = add_noise(Trajectory.rollout(SPACE, (4,), (1, EOS)), 1.0, SOURCES["uniform"], generator)
    assert noised.policy_chosen == (False, False, True, False, False, True)


def test_padding_is_no_noise(generator: torch.Generator) -> None:
    padded = ActionSpace(vocab_size=4, eos=0, bos=1, pad=2)
    with pytest.raises(ValueError, match=re.escape("Got [3].")):
        token_noise(padded)
    clean = Trajectory.demonstration(padded, (1,), (3, 3))
    with pytest.raises(ValueError, match=re.escape("`logits` must leave some wrong token possible at every step.")):
        add_noise(clean, 1.0, model_noise(padded, torch.zeros(3, 4)), generator)


def test_tokens_may_come_as_a_tensor() -> None:
    draw = token_noise(SPACE, torch.tensor([1, 2, EOS]))
    assert set(draw([0] * 50, [0] * 50, torch.Generator().manual_seed(0))) == {1, 2}


def test_the_papers_plain_draw_may_hit_the_right_token(generator: torch.Generator) -> None:
    """Then a right token is deleted again: chosen and executed agree, and the sentence stays what it was."""
    noised = add_noise(LONG, 1.0, token_noise(SPACE, exclude_right=False), generator)
    assert noised.final_state == LONG.final_state
    assert len(wrong_tokens(noised)) == pytest.approx(0.75 * len(LONG), rel=0.05)
    assert len(noised) == 3 * len(LONG)
    only = model_noise(SPACE, torch.zeros(10_001, SPACE.size), exclude_right=False)
    assert len(wrong_tokens(add_noise(LONG, 1.0, only, generator))) == pytest.approx(0.75 * len(LONG), rel=0.05)


def burst_of(length: int) -> Trajectory:
    """The empty completion with one burst of that length; its seed is searched for."""
    clean = Trajectory.demonstration(SPACE, (4,), ())
    made = (
        add_noise(clean, 1.0, SOURCES["uniform"], torch.Generator().manual_seed(i), burst=3) for i in itertools.count()
    )
    return next(noised for noised in made if len(noised) == 2 * length + 1)


def test_a_burst_asks_for_backspace_from_its_second_token_on() -> None:
    noised = burst_of(3)
    assert noised.chosen == (EOS, BK, BK, BK, BK, BK, EOS)
    assert noised.executed[3:] == (BK, BK, BK, EOS)
    assert all(w < 4 for w in noised.executed[:3])
    assert burst_of(1).chosen == (EOS, BK, EOS)


def bursts(noised: Trajectory) -> list[tuple[int, ...]]:
    """The wrong tokens of each burst: runs of tokens pushed before a deletion, found by replaying the actions."""
    found: list[tuple[int, ...]] = []
    stack: list[int] = []
    after_push = False
    for action in noised.executed:
        if action != BK:
            stack.append(action)
        else:
            found.append(() if after_push else found.pop())
            found[-1] = (stack.pop(), *found[-1])
        after_push = action != BK
    return found


def test_burst_lengths_are_uniform_up_to_the_longest(generator: torch.Generator) -> None:
    """10,001 bursts of 1, 2, 3 or 4 tokens: each length within five standard deviations of a quarter."""
    lengths = [len(burst) for burst in bursts(add_noise(LONG, 1.0, SOURCES["uniform"], generator, burst=4))]
    assert len(lengths) == len(LONG)
    for length in (1, 2, 3, 4):
        assert abs(lengths.count(length) - len(LONG) / 4) < 5 * math.sqrt(len(LONG) * 3 / 16)


def test_half_of_all_bursts_end_in_a_token_of_the_ends(generator: torch.Generator) -> None:
    """Noise 0 or 2, ends 3: half of 10,001 bursts end in 3, none holds it elsewhere. Without ends, none ends in it."""
    pair = token_noise(SPACE, {0, 2})
    made = bursts(add_noise(LONG, 1.0, burst_end_noise(SPACE, pair, [3]), generator, burst=3))
    # A burst of one token where 3 is right can't be 3: every third burst at every fourth step.
    possible = len(LONG) * (1 - 1 / 12)
    assert abs(sum(burst[-1] == 3 for burst in made) - possible / 2) < 5 * math.sqrt(len(LONG) / 4)
    assert all(3 not in burst[:-1] for burst in made)
    assert {len(burst) for burst in made if burst[-1] == 3} == {1, 2, 3}
    assert not any(3 in burst for burst in bursts(add_noise(LONG, 1.0, pair, generator, burst=3)))


def test_a_burst_keeps_its_last_token_where_the_only_end_is_right() -> None:
    """The right token is 3 and so is the only end: a burst of one token is that of the source, 0 or 2."""
    right, step = [3] * 200, range(200)
    source = burst_end_noise(SPACE, token_noise(SPACE, {0, 2}), [3])
    plain = token_noise(SPACE, {0, 2})
    kept, expected = (draw(step, right, torch.Generator().manual_seed(1)) for draw in (source, plain))
    assert kept == expected
    two = burst_end_noise(SPACE, plain, [1, 3])(step, right, torch.Generator().manual_seed(1))
    assert set(two) == {0, 1, 2}  # with a second end, that one is drawn
    allowed = burst_end_noise(SPACE, plain, [3], exclude_right=False)(step, right, torch.Generator().manual_seed(1))
    assert set(allowed) == {0, 2, 3}


def test_one_wrong_token_is_drawn_as_by_the_slow_obvious_code() -> None:
    """Bit for bit, so that runs can be resumed: which steps, then an index into the sorted wrong tokens of each."""
    for seed in range(100):
        draws = torch.Generator().manual_seed(seed)
        noisy = (torch.rand(41, generator=draws, dtype=torch.float64) < 0.3).nonzero().flatten().tolist()
        clean = Trajectory.demonstration(SPACE, (4,), [0, 1, 2, 3] * 10)
        uniform = torch.rand(len(noisy), generator=draws, dtype=torch.float64).tolist()
        others = [[w for w in (0, 1, 2, 3) if w != clean.chosen[t]] for t in noisy]
        expected = [(clean.chosen[t], o[int(u * len(o))]) for t, u, o in zip(noisy, uniform, others, strict=True)]
        noised = add_noise(clean, 0.3, SOURCES["uniform"], torch.Generator().manual_seed(seed))
        assert wrong_tokens(noised) == expected, seed


def test_inside_a_burst_the_source_is_told_that_backspace_is_right(generator: torch.Generator) -> None:
    told: list[int] = []

    def source(steps: Sequence[int], rights: Sequence[int], draws: torch.Generator) -> list[int]:
        told.extend(rights)
        return SOURCES["uniform"](steps, rights, draws)

    clean = Trajectory.demonstration(SPACE, (4,), [1] * 20)
    lengths = [len(burst) for burst in bursts(add_noise(clean, 1.0, source, generator, burst=2))]
    rights = [[right, *[BK] * (length - 1)] for right, length in zip(clean.chosen, lengths, strict=True)]
    assert told == list(itertools.chain(*rights))
    assert set(lengths) == {1, 2}


def test_without_noise_nothing_changes(generator: torch.Generator) -> None:
    assert add_noise(LONG, 0.0, SOURCES["uniform"], generator) == LONG


def test_wrong_arguments_are_refused(generator: torch.Generator) -> None:
    source = SOURCES["uniform"]
    with pytest.raises(ValueError, match=re.escape("`rate` must be a probability in [0, 1]. Got rate=1.5.")):
        add_noise(LONG, 1.5, source, generator)
    with pytest.raises(ValueError, match=re.escape("`burst` must be at least 1 wrong token. Got burst=0.")):
        add_noise(LONG, 0.5, source, generator, burst=0)
    floating = Trajectory.rollout(SPACE, (4,), (1, EOS), floor=2)
    with pytest.raises(
        ValueError, match=re.escape("Got floor=2 above 1 initial tokens. Add noise before `score_prompt`.")
    ):
        add_noise(floating, 0.5, source, generator)
    with pytest.raises(ValueError, match=re.escape("`tokens` must hold at least 2 besides <eos>, <bos> and padding")):
        token_noise(SPACE, [1, EOS])
    with pytest.raises(ValueError, match=re.escape("`tokens` must hold token ids in [0, 6); <bkspc> can't be noise.")):
        token_noise(SPACE, [1, BK])
    with pytest.raises(ValueError, match=re.escape("`tokens_by_step` must hold at least 2 besides <eos>, <bos>")):
        step_noise(SPACE, [[1], [1, EOS]])
    with pytest.raises(ValueError, match=re.escape("`tokens_by_step` must hold token ids in [0, 6); <bkspc> can't")):
        step_noise(SPACE, [[1], [BK]])
    for bad, ids in ((EOS, "5 to 5"), (BK, "6 to 6"), (-1, "-1 to -1")):
        with pytest.raises(
            ValueError,
            match=re.escape("`source` must draw token ids in [0, 6) other than <eos>, <bos> and padding")
            + f".* from {ids}",
        ):
            add_noise(LONG, 0.5, lambda steps, *_, bad=bad: [bad] * len(steps), generator)
    with pytest.raises(ValueError, match=re.escape("`ends` must hold at least 1 besides <eos>, <bos> and padding")):
        burst_end_noise(SPACE, source, [EOS])
    with pytest.raises(ValueError, match=re.escape("`ends` must hold token ids in [0, 6); <bkspc> can't be noise.")):
        burst_end_noise(SPACE, source, [BK])
    with pytest.raises(
        ValueError, match=re.escape("`logits` must have 6 columns, or 7 with <bkspc>. Got shape (4, 3).")
    ):
        model_noise(SPACE, torch.zeros(4, 3))
    with pytest.raises(
        ValueError, match=re.escape("`logits` must have a row for every clean step: more than 10000. Got 5.")
    ):
        add_noise(LONG, 1.0, model_noise(SPACE, torch.zeros(5, 6)), generator)
