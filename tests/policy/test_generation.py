"""The decoder is the naive sampler, only faster: same actions, no forward pass for a backspace."""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import sequencematch
from sequencematch.core import encode
from sequencematch.policy import Generation, Policy, Sampling, attention
from sequencematch.policy.decoding.cache import StackCache
from sequencematch.policy.decoding.choice import SAMPLING_BLOCK, Choice, choose, uniforms
from sequencematch.policy.decoding.cuda_graphs import GraphDecoder
from sequencematch.policy.decoding.decoder import Decoder, Limits
from sequencematch.policy.generation import rollouts
from tests.oracles.naive_sampler import Step, fresh_logits, log_sum_exp, naive_rollout
from tests.policy.tiny_models import DECODED, HIDDEN, WINDOW, character_tokenizer, exact_llama, llama, mistral

VOCAB, BOS, EOS = DECODED["vocab_size"], DECODED["bos_token_id"], DECODED["eos_token_id"]
BK = VOCAB
#: The smallest difference that float32 rounding can't explain: logits here are of size 10, so it is worth about 1e-6.
TIE = 1e-5
#: float32 keeps seven digits, and log-probabilities and values here are below 20.
FLOAT32 = 1e-5


def gemma3() -> Any:
    torch.manual_seed(0)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "head_dim": 8}
    config = transformers.Gemma3TextConfig(**DECODED, **layers, query_pre_attn_scalar=8, tie_word_embeddings=False)
    return transformers.Gemma3ForCausalLM(config).eval()


MODELS: dict[str, Callable[[], Any]] = {"float64": exact_llama, "float32": llama, "mistral": mistral, "gemma3": gemma3}


def with_row(model: Any, tokenizer: Any = None) -> Policy:
    """A policy whose <bkspc> row is as large as the others: it deletes in some states and not in others."""
    policy = Policy(model, tokenizer)
    with torch.no_grad():
        policy.backspace.row.copy_(torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.6)
    return policy


@functools.cache
def policy_of(name: str) -> Policy:
    return with_row(MODELS[name]())


@pytest.fixture
def policy() -> Policy:
    """In float64, so that rounding decides nothing."""
    return policy_of("float64")


def ragged_prompts(count: int, seed: int, *, longest: int = 12) -> list[list[int]]:
    """Lengths 1 to 12, any token: an <eos> in the initial state ends nothing."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True)
class Script:
    """A processor that leaves one action open: the next of a list. For one row at a time, called once for each action."""

    actions: Iterator[int]

    def __call__(self, _: Tensor, logits: Tensor) -> Tensor:
        only = torch.full_like(logits, -torch.inf)
        only[0, next(self.actions)] = 0
        return only


def follow(policy: Policy, prompt: list[int], actions: list[int], **options: Any) -> Generation:
    """Generate with every action prescribed."""
    script = Script(iter(actions))
    result = policy.generate(prompt, temperature=0.0, logits_processor=script, **options)
    assert next(script.actions, None) is None, "not every action was asked for"
    return result


@contextmanager
def backbone_calls(policy: Policy) -> Iterator[list[tuple[int, int]]]:
    """(rows, tokens per row) of every real call of the transformer."""
    calls: list[tuple[int, int]] = []
    hook = policy.base.base_model.register_forward_pre_hook(
        lambda _, __, inputs: calls.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        hook.remove()


# A script checked by hand


def test_a_script_is_executed_as_written_and_the_final_state_is_what_was_not_deleted(policy: Policy) -> None:
    # 5 6 | 7, 8, delete 8, delete 7, delete 6, 9, <eos>: the stack goes 567, 5678, 567, 56, 5, 59.
    result = follow(policy, [5, 6], [7, 8, BK, BK, BK, 9, EOS], max_new_tokens=4)
    (trajectory,) = result.trajectories
    assert trajectory.executed == (7, 8, BK, BK, BK, 9, EOS)
    assert trajectory.final_state.tokens == (5, 9, EOS)
    assert not trajectory.truncated
    assert result.forward_passes == 1 + 3  # the prompt, then 7, 8 and 9


def test_choosing_inverts_the_cumulative_distribution_and_never_picks_the_impossible() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 0.0, 4.0, 0.0]]).log()  # cumulative 0, 1/8, 4/8, 4/8, 1, 1
    for number, expected in [(0.0, 1), (0.1249, 1), (0.1251, 2), (0.4999, 2), (0.5001, 4), (1 - 2**-53, 4)]:
        assert int(choose(logits, torch.tensor([number], dtype=torch.float64))[0]) == expected
    assert int(choose(logits, None)[0]) == 4


def test_rounding_never_makes_the_impossible_chosen() -> None:
    """Where a block of the vocabulary ends, sums in another order differ in the last bit; behind it nothing is possible."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 2 * SAMPLING_BLOCK, generator=generator, dtype=torch.float64)
    logits[:, SAMPLING_BLOCK:] = -torch.inf
    action, _ = choose(logits, torch.full((4000,), 1 - 2**-53, dtype=torch.float64))
    assert logits.gather(1, action[:, None]).isfinite().all()


# The naive sampler


@dataclass(frozen=True)
class Case:
    """How to choose, and from which prompts."""

    options: dict[str, Any]
    prompts: list[list[int]]

    @property
    def sampling(self) -> Sampling:
        return Sampling(**self.options)


REPETITION = transformers.RepetitionPenaltyLogitsProcessor(1.5)
GREEDY: dict[str, Any] = {"temperature": 0.0}
STOPS = (7, 11, 23, 37, 41)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY | {"backspace_bias": 1.0},
    "greedy, prompt protected": GREEDY | {"backspace_bias": 0.5, "protect_prompt": True},
    "greedy, deleted tokens banned": GREEDY | {"backspace_bias": 3.0, "ban_deleted": True},
    "greedy, repetition penalty": GREEDY | {"backspace_bias": 1.0, "logits_processor": REPETITION},
    "sampled": {"seed": 1, "backspace_bias": 5.0},
    "sampled, prompt protected": {"seed": 2, "backspace_bias": 4.0, "protect_prompt": True},
    "sampled, deleted tokens banned": {"seed": 3, "backspace_bias": 5.0, "ban_deleted": True},
    "sampled, repetition penalty": {"seed": 4, "backspace_bias": 4.0, "logits_processor": REPETITION},
    "top-k at temperature 0.7": {"seed": 5, "backspace_bias": 4.0, "temperature": 0.7, "top_k": 5},
    "top-p at temperature 1.4": {"seed": 6, "backspace_bias": 4.0, "temperature": 1.4, "top_p": 0.8},
    "min-p": {"seed": 7, "backspace_bias": 4.0, "min_p": 0.1},
    "all at once": {
        "seed": 8,
        "backspace_bias": 4.0,
        "temperature": 1.3,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "protect_prompt": True,
        "ban_deleted": True,
        "stop_tokens": (7, 11),
        "max_actions": 14,
        "logits_processor": REPETITION,
    },
    "sampled, self-loops": {"seed": 11, "backspace_bias": 7.0, "self_loops": True},
    "sampled, prompt protected, self-loops": {
        "seed": 14,
        "backspace_bias": 6.0,
        "protect_prompt": True,
        "self_loops": True,
    },
    "sampled, held back by two": {"seed": 12, "backspace_bias": 5.0, "hold_back": 2},
    "sampled, at least five tokens": {"seed": 13, "backspace_bias": 3.0, "min_new_tokens": 5},
    "stop tokens, few actions": {"seed": 10, "backspace_bias": 4.0, "stop_tokens": STOPS, "max_actions": 7},
    "search": {"search": True, "backspace_bias": 1.0, "max_actions": 40},
    "search at temperature 1.2": {
        "search": True,
        "seed": 15,
        "temperature": 1.2,
        "backspace_bias": 3.0,
        "min_p": 0.2,
        "max_actions": 30,
    },
    "search, few actions": {"search": True, "backspace_bias": 4.0, "min_p": 0.3, "max_actions": 16},
    "search, stop tokens": {"search": True, "backspace_bias": 2.0, "stop_tokens": STOPS, "max_actions": 40},
    "search, at least three tokens": {
        "search": True,
        "seed": 17,
        "temperature": 1.0,
        "min_p": 0.4,
        "backspace_bias": 4.0,
        "min_new_tokens": 3,
        "max_new_tokens": 4,
        "max_actions": 20,
    },
    "search, repetition penalty": {
        "search": True,
        "seed": 16,
        "temperature": 1.0,
        "top_k": 9,
        "backspace_bias": 2.0,
        "logits_processor": REPETITION,
        "max_actions": 30,
    },
}
every_setting = pytest.mark.parametrize("setting", SETTINGS)
PROMPTS = {"float64": 30, "float32": 6, "mistral": 6, "gemma3": 6}


def case_of(model: str, setting: str) -> Case:
    """Other prompts for every model and setting."""
    seed = 100 * list(MODELS).index(model) + list(SETTINGS).index(setting)
    return Case({"max_new_tokens": 8} | SETTINGS[setting], ragged_prompts(PROMPTS[model], seed))


@functools.cache
def naive(model: str, setting: str) -> list[list[Step]]:
    """A state that a row comes back to is looked at once: its logits are from its tokens alone."""
    case, policy = case_of(model, setting), policy_of(model)
    known = functools.cache(lambda state: fresh_logits(policy, list(state)))
    return [
        naive_rollout(policy, prompt, row, case.sampling, lambda _, state: list(known(tuple(state))))
        for row, prompt in enumerate(case.prompts)
    ]


@dataclass(frozen=True)
class Difference:
    """The first action in which a row departs from the oracle, and how little was missing for the oracle to do the same."""

    row: int
    action: int
    chosen: int
    expected: int
    margin: float


def first_differences(result: Generation, oracle: list[list[Step]]) -> list[Difference]:
    """One for each row that differs."""
    assert len(result.trajectories) == len(oracle)
    found = []
    for row, (trajectory, steps) in enumerate(zip(result.trajectories, oracle, strict=True)):
        pairs = zip(trajectory.chosen, steps, strict=False)
        differing = [(t, chosen, step) for t, (chosen, step) in enumerate(pairs) if chosen != step.chosen]
        if differing:
            t, chosen, step = differing[0]
            found.append(Difference(row, t, chosen, step.chosen, step.margin(chosen)))
        else:  # the same choices must also have been carried out alike
            assert trajectory.executed == tuple(step.executed for step in steps)
    return found


def assert_same_but_for_ties(model: str, setting: str, tie: float) -> None:
    """All prompts in batches, and an eighth of them one by one."""
    case, policy = case_of(model, setting), policy_of(model)
    for batch_size, count in ((16, len(case.prompts)), (1, -(-len(case.prompts) // 8))):
        result = policy.generate(case.prompts[:count], batch_size=batch_size, **case.options)
        differences = first_differences(result, naive(model, setting)[:count])
        wrong = [difference for difference in differences if not difference.margin < tie]
        assert not wrong, (
            f"at batch size {batch_size} {len(wrong)} of {count} rows differ by more than a tie, "
            f"{len(differences) - len(wrong)} by a tie: {wrong}"
        )


@every_setting
def test_in_float64_generation_equals_the_naive_sampler_action_for_action(setting: str) -> None:
    assert_same_but_for_ties("float64", setting, tie=0)


@every_setting
def test_in_float32_generation_differs_from_the_naive_sampler_at_ties_only(setting: str) -> None:
    assert_same_but_for_ties("float32", setting, TIE)


@pytest.mark.parametrize("model", ["mistral", "gemma3"])
@every_setting
def test_with_sliding_windows_generation_differs_from_the_naive_sampler_at_ties_only(model: str, setting: str) -> None:
    assert_same_but_for_ties(model, setting, TIE)


@dataclass
class Census:
    """What a set of rollouts contains."""

    prompts: int = 0
    actions: int = 0
    backspaces: int = 0
    into_the_prompt: int = 0
    at_the_initial_state: int = 0
    at_a_protected_prompt: int = 0

    def count(self, model: str, setting: str) -> None:
        case = case_of(model, setting)
        for prompt, steps in zip(case.prompts, naive(model, setting), strict=True):
            depths = [len(step.state) for step in steps if step.executed == BK]
            self.prompts += 1
            self.actions += len(steps)
            self.backspaces += len(depths)
            if case.sampling.protect_prompt:
                self.at_a_protected_prompt += depths.count(len(prompt))
            else:
                self.into_the_prompt += sum(1 < depth <= len(prompt) for depth in depths)
                self.at_the_initial_state += depths.count(1)

    @property
    def share(self) -> float:
        return self.backspaces / self.actions


def test_the_float64_comparisons_cover_deletions_everywhere_in_more_than_500_prompts() -> None:
    whole = Census()
    for setting in SETTINGS:
        part = Census()
        part.count("float64", setting)
        whole.count("float64", setting)
        assert 0.03 <= part.share <= 0.6, f"{setting}: {part.share:.1%} backspaces"
    print(whole, f"{whole.share:.1%} backspaces")
    assert whole.prompts >= 500
    assert whole.into_the_prompt >= 20
    assert whole.at_the_initial_state >= 10  # self-loops
    assert whole.at_a_protected_prompt >= 10  # self-loops


@pytest.mark.parametrize("model", ["float32", "mistral", "gemma3"])
def test_the_other_comparisons_delete_too(model: str) -> None:
    whole = Census()
    for setting in SETTINGS:
        whole.count(model, setting)
    print(whole, f"{whole.share:.1%} backspaces")
    assert 0.05 <= whole.share <= 0.4
    assert whole.into_the_prompt >= 5


@pytest.mark.parametrize("model", MODELS)
def test_the_comparison_with_stop_tokens_has_rows_that_stop_and_rows_that_are_cut(model: str) -> None:
    setting = "stop tokens, few actions"
    sampling, rows = case_of(model, setting).sampling, naive(model, setting)
    stopped = [steps[-1].chosen in sampling.stop_tokens for steps in rows]
    assert True in stopped
    assert any(len(steps) == sampling.max_actions for steps, was in zip(rows, stopped, strict=True) if not was)


# Negative controls: the comparison notices what it is there to notice


def test_if_a_deleted_token_stays_in_the_cache_the_comparison_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    update = StackCache.update

    def keeps_what_was_first_written(
        self: StackCache, key: Tensor, value: Tensor, layer_idx: int, *args: Any
    ) -> tuple[Tensor, Tensor]:
        if self.column.ndim == 1:
            old_key, old_value = (part[self.row, :, self.column][:, :, None] for part in self.stored[layer_idx])
            is_written = old_key.abs().sum((1, 2, 3), keepdim=True) > 0
            key, value = torch.where(is_written, old_key, key), torch.where(is_written, old_value, value)
        return update(self, key, value, layer_idx, *args)

    monkeypatch.setattr(StackCache, "update", keeps_what_was_first_written)
    case = case_of("float64", "sampled")
    result = policy_of("float64").generate(case.prompts, **case.options)
    differences = first_differences(result, naive("float64", "sampled"))
    assert len([difference for difference in differences if difference.margin > TIE]) >= 10


@pytest.mark.parametrize("model", ["mistral", "gemma3"])
def test_if_the_window_counts_nothing_the_comparison_fails(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    windows = attention.windows
    monkeypatch.setattr(attention, "windows", lambda config: dict.fromkeys(windows(config)))
    case = case_of(model, "sampled")
    result = policy_of(model).generate(case.prompts, **case.options)
    differences = first_differences(result, naive(model, "sampled"))
    assert len([difference for difference in differences if difference.margin > TIE]) >= 3


def test_if_positions_count_pushes_instead_of_depth_the_comparison_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Decoder._forward

    def counts_pushes(self: Decoder, tokens: Tensor, keep: Tensor, positions: Tensor) -> Tensor:
        pushes = (self.prompt + self.forwards - 1)[:, None]
        return forward(self, tokens, keep, positions if tokens.shape[1] > 1 else pushes)

    monkeypatch.setattr(Decoder, "_forward", counts_pushes)
    case = case_of("float64", "sampled")
    result = policy_of("float64").generate(case.prompts, **case.options)
    differences = first_differences(result, naive("float64", "sampled"))
    assert len([difference for difference in differences if difference.margin > TIE]) >= 10


# Cost


@every_setting
def test_a_batch_takes_one_forward_pass_for_the_prompts_and_one_for_each_push_of_its_longest_row(setting: str) -> None:
    case, policy = case_of("float64", setting), policy_of("float64")
    with backbone_calls(policy) as calls:
        result = policy.generate(case.prompts, batch_size=64, **case.options)
    pushes = [sum(action not in (BK, EOS) for action in t.executed) for t in result.trajectories]
    assert sum(t.executed.count(BK) for t in result.trajectories) > 0
    assert len(calls) == result.forward_passes == 1 + max(pushes)
    assert calls[0] == (len(case.prompts), max(map(len, case.prompts)))
    assert {tokens for _, tokens in calls[1:]} == {1}


def test_backspaces_cost_no_forward_pass(policy: Policy) -> None:
    straight = [5, 6, 7, 8, EOS]
    deleting = [5, BK, BK, BK, BK, 6, 7, BK, BK, BK, 8, BK, BK, EOS]
    counts = []
    for actions in (straight, deleting):
        with backbone_calls(policy) as calls:
            result = follow(policy, [3, 4, 9], actions, max_new_tokens=8)
        assert len(calls) == result.forward_passes
        counts.append(len(calls))
    assert counts == [1 + 4, 1 + 4]


def test_ended_rows_leave_the_batch(policy: Policy) -> None:
    def ends_at_a_length_told_by_the_first_token(state: Tensor, logits: Tensor) -> Tensor:
        only = logits.clone()
        only[0, [EOS, BK]] = -torch.inf
        if state.shape[1] > state[0, 0]:
            only[0] = -torch.inf
            only[0, EOS] = 0
        return only

    prompts = [[length] for length in range(1, 17)]
    options: dict[str, Any] = {"temperature": 0.0, "logits_processor": ends_at_a_length_told_by_the_first_token}
    with backbone_calls(policy) as calls:
        result = policy.generate(prompts, batch_size=16, max_new_tokens=20, **options)
    assert [len(t) for t in result.trajectories] == [1 + length for length in range(1, 17)]
    sizes = [rows for rows, _ in calls]
    running = [16, *range(16, 0, -1)]  # at the prefill, then in the pass that pushes the n-th token
    assert len(sizes) == len(running)
    # At most a quarter of the rows in a pass have ended; the last one runs alone.
    assert all(size >= rows > 0.75 * size or size == rows for size, rows in zip(sizes, running, strict=True)), sizes
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    alone = [policy.generate(prompt, max_new_tokens=20, **options).trajectories[0] for prompt in prompts]
    assert [t.executed for t in alone] == [t.executed for t in result.trajectories]


def test_a_row_that_filled_the_context_does_not_disturb_the_rows_that_run_on() -> None:
    # GPT-2 looks positions up in a table, so an ended row that is still in the batch must not ask for one behind its end.
    torch.manual_seed(0)
    sizes = {"n_positions": 9, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.5}
    config = transformers.GPT2Config(vocab_size=VOCAB, bos_token_id=BOS, eos_token_id=EOS, **sizes)
    policy = with_row(transformers.GPT2LMHeadModel(config).eval())

    def one_row_writes_on_and_the_others_think_twice(state: Tensor, logits: Tensor) -> Tensor:
        only = logits.clone()
        only[0, EOS] = -torch.inf
        only[0, BK] = -torch.inf if state[0, 0] == 5 else logits.max()
        return only

    prompts = [[5, 6]] + [[7, token] for token in range(8, 23)]
    options: dict[str, Any] = {"seed": 0, "logits_processor": one_row_writes_on_and_the_others_think_twice}
    result = policy.generate(prompts, batch_size=16, max_new_tokens=6, **options)
    assert len(result.trajectories[0]) == 7  # six tokens, and the one that was cut
    assert max(map(len, result.trajectories)) > 10
    sampling = Sampling(max_new_tokens=6, **options)
    oracle = [naive_rollout(policy, prompt, row, sampling) for row, prompt in enumerate(prompts)]
    assert all(difference.margin < TIE for difference in first_differences(result, oracle))


# Randomness


def test_a_rows_random_numbers_depend_on_seed_row_and_action_alone(policy: Policy) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "backspace_bias": 4.0, "seed": 11}
    ours, others = ragged_prompts(12, 50), ragged_prompts(12, 51, longest=30)
    expected = policy.generate(ours, batch_size=1, **options).trajectories
    mixed = [mine if row % 3 == 0 else other for row, (mine, other) in enumerate(zip(ours, others, strict=True))]
    for batch_size in (2, 5, 64):
        assert policy.generate(ours, batch_size=batch_size, **options).trajectories == expected
        assert policy.generate(mixed, batch_size=batch_size, **options).trajectories[::3] == expected[::3]
    assert policy.generate(ours[0], **options).trajectories == expected[:1]


def test_rows_made_on_their_own_are_those_of_the_whole_if_they_keep_their_numbers(policy: Policy) -> None:
    sampling = Sampling(max_new_tokens=8, backspace_bias=4.0, seed=11)
    prompts = ragged_prompts(12, 50)
    expected = {rollout.row: rollout.trajectory for rollout in rollouts(policy, prompts, sampling)}
    rows = [7, 2, 11]
    part = [prompts[row] for row in rows]
    again = {rollout.row: rollout.trajectory for rollout in rollouts(policy, part, sampling, rows=rows)}
    assert again == {row: expected[row] for row in rows}
    # Control: numbered from 0 they are others.
    assert {rollout.trajectory for rollout in rollouts(policy, part, sampling)} != set(again.values())
    with pytest.raises(ValueError, match=r"`rows` must have one number per prompt\. Got 2 for 3\."):
        rollouts(policy, part, sampling, rows=[1, 2])


def test_prompts_of_one_length_are_taken_in_their_order(policy: Policy) -> None:
    """So that someone who watches sees the first ones first."""
    sampling = Sampling(max_new_tokens=4, seed=0)
    assert [rollout.row for rollout in rollouts(policy, [[5], [6], [7, 8], [9], [5]], sampling, 1)] == [0, 1, 3, 4, 2]


def test_another_seed_or_another_row_gives_other_actions(policy: Policy) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "backspace_bias": 4.0}
    same = [[5, 6, 7]] * 8
    first = [t.chosen for t in policy.generate(same, seed=0, **options).trajectories]
    second = [t.chosen for t in policy.generate(same, seed=1, **options).trajectories]
    assert len({*first, *second}) == 16


def test_the_numbers_of_a_row_do_not_depend_on_how_many_are_drawn_and_look_uniform() -> None:
    numbers = torch.stack([uniforms(3, row, 200) for row in range(100)])
    assert torch.equal(uniforms(3, 17, 7), numbers[17, :7])
    # The mean of 20,000 uniform numbers is within five standard errors, 5 · 0.2887/√20000 = 0.0102, of a half; so are
    # the correlations of neighbours in a row and of neighbouring rows, 5/√20000 = 0.035, of zero.
    assert abs(float(numbers.mean()) - 0.5) < 0.0102
    centred = (numbers - 0.5) * math.sqrt(12)
    assert abs(float((centred[:, 1:] * centred[:, :-1]).mean())) < 0.036
    assert abs(float((centred[1:] * centred[:-1]).mean())) < 0.036


def test_every_bit_of_seed_and_row_gives_other_numbers() -> None:
    keys = [(0, 0)] + [(1 << bit, 0) for bit in range(64)] + [(0, 1 << bit) for bit in range(32)] + [(-1, 0)]
    numbers = {tuple(uniforms(seed, row, 4).tolist()) for seed, row in keys}
    assert len(numbers) == len(keys)


def test_without_a_seed_torchs_own_generator_decides(policy: Policy) -> None:
    def sample(seed: int) -> Any:
        torch.manual_seed(seed)
        return policy.generate([5, 6], max_new_tokens=8).trajectories

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)


# Limits


def test_max_new_tokens_limits_the_net_length_and_not_the_number_of_pushes(policy: Policy) -> None:
    # Three tokens may stand behind the prompt. Five are pushed, two of them deleted; the next, 15, is one too many.
    (trajectory,) = follow(policy, [5, 6], [10, 11, BK, 12, BK, 13, 14, 15], max_new_tokens=3).trajectories
    assert trajectory.final_state.tokens == (5, 6, 10, 13, 14, EOS)
    assert trajectory.chosen[-1] == 15
    assert trajectory.truncated


def test_a_prompt_that_was_partly_deleted_leaves_room_for_more(policy: Policy) -> None:
    (trajectory,) = follow(policy, [5, 6], [BK, 10, 11, 12, 13], max_new_tokens=2).trajectories
    assert trajectory.final_state.tokens == (5, 10, 11, 12, EOS)
    assert trajectory.truncated


def test_at_full_length_a_row_may_still_end_or_delete(policy: Policy) -> None:
    (ended,) = follow(policy, [5], [10, 11, EOS], max_new_tokens=2).trajectories
    assert not ended.truncated
    assert ended.final_state.tokens == (5, 10, 11, EOS)
    (deleted,) = follow(policy, [5], [10, 11, BK, 12, EOS], max_new_tokens=2).trajectories
    assert not deleted.truncated
    assert deleted.final_state.tokens == (5, 10, 12, EOS)


@pytest.mark.parametrize("last", [12, BK])
def test_max_actions_counts_deletions_and_cuts_whatever_the_last_action_is(policy: Policy, last: int) -> None:
    (trajectory,) = follow(policy, [5], [10, BK, 11, last], max_new_tokens=8, max_actions=4).trajectories
    assert trajectory.chosen == (10, BK, 11, last)
    assert trajectory.executed == (10, BK, 11, EOS)
    assert trajectory.truncated


def test_an_eos_chosen_as_the_last_action_is_no_cut(policy: Policy) -> None:
    (trajectory,) = follow(policy, [5], [10, BK, 11, EOS], max_new_tokens=8, max_actions=4).trajectories
    assert not trajectory.truncated


def test_by_default_a_row_may_take_four_actions_per_token_and_one(policy: Policy) -> None:
    (trajectory,) = follow(policy, [5], [BK] * 9, max_new_tokens=2).trajectories
    assert trajectory.executed == (BK,) * 8 + (EOS,)
    assert trajectory.final_state.tokens == (5, EOS)


def test_a_stop_token_ends_the_row_and_is_not_in_its_state(policy: Policy) -> None:
    (trajectory,) = follow(policy, [5], [10, 20, BK, 30], max_new_tokens=8, stop_tokens=(30, 31)).trajectories
    assert trajectory.chosen == (10, 20, BK, 30)
    assert trajectory.final_state.tokens == (5, 10, EOS)
    assert trajectory.truncated  # <eos> was executed and not chosen


def test_a_protected_prompt_is_the_floor_of_the_stack(policy: Policy) -> None:
    actions = [10, BK, BK, BK, 11, EOS]
    (free,) = follow(policy, [5, 6, 7], actions, max_new_tokens=8).trajectories
    (safe,) = follow(policy, [5, 6, 7], actions, max_new_tokens=8, protect_prompt=True).trajectories
    assert free.final_state.tokens == (5, 11, EOS)
    assert safe.final_state.tokens == (5, 6, 7, 11, EOS)


def test_a_banned_token_returns_once_the_state_it_was_deleted_from_is_gone(policy: Policy) -> None:
    open_actions: list[set[int]] = []
    script = iter([10, 11, BK, 12, BK, BK, 13, EOS])

    def watch(_: Tensor, logits: Tensor) -> Tensor:
        open_actions.append(set(logits[0].isfinite().nonzero().flatten().tolist()))
        return Script(script)(_, logits)

    policy.generate([5], temperature=0.0, max_new_tokens=8, ban_deleted=True, logits_processor=watch)
    # in 5 | 5 10 | 5 10 11 | 5 10 | 5 10 12 | 5 10 | 5 | 5 13
    everything = set(range(VOCAB + 1))
    closed = [{BK}, set(), set(), {11}, set(), {11, 12}, {10, BK}, set()]  # <bkspc> where nothing can be deleted
    assert [everything - actions for actions in open_actions] == closed


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 5}], ids=["greedy", "sampled"])
def test_streaming_yields_the_actions_of_generate_as_they_happen(policy: Policy, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 8, "backspace_bias": 3.0} | options
    backspaces = 0
    for prompt in ragged_prompts(8, 60):
        result = policy.generate(prompt, **options)
        events = list(policy.stream(prompt, **options))
        (trajectory,) = result.trajectories
        assert tuple(event.chosen for event in events) == trajectory.chosen
        assert tuple(event.executed for event in events) == trajectory.executed
        assert [event.tokens for event in events] == [state.tokens for state in trajectory.states()][1:]
        assert torch.equal(torch.tensor([event.log_prob for event in events]), result.log_probs[0])
        backspaces += trajectory.executed.count(BK)
    assert backspaces > 0


def test_streaming_stops_calling_the_model_when_nobody_asks_for_more(policy: Policy) -> None:
    with backbone_calls(policy) as calls:
        script = Script(iter([10, 11, 12]))
        stream = policy.stream([5], temperature=0.0, max_new_tokens=8, logits_processor=script)
        assert [next(stream).executed for _ in range(3)] == [10, 11, 12]
    assert len(calls) == 3  # the prompt, 10 and 11


# Scores


@pytest.mark.parametrize(
    "setting",
    ["greedy, repetition penalty", "sampled, deleted tokens banned", "top-k at temperature 0.7", "all at once"],
)
def test_log_probs_are_of_the_processed_logits_and_values_of_the_models_own(setting: str) -> None:
    case, policy = case_of("float64", setting), policy_of("float64")
    result = policy.generate(case.prompts, **case.options)
    compared = 0
    for steps, log_probs, values in zip(naive("float64", setting), result.log_probs, result.values, strict=True):
        expected = torch.tensor([step.log_prob for step in steps])
        torch.testing.assert_close(log_probs, expected, atol=FLOAT32, rtol=0)
        torch.testing.assert_close(values, torch.tensor([step.value for step in steps]), atol=FLOAT32, rtol=0)
        compared += len(steps)
    assert compared > 200


def test_values_count_the_backspace_and_know_nothing_of_its_bias(policy: Policy) -> None:
    # Without the bias the logits are the model's own, so the value of s₀ = 5 6 is their logsumexp.
    own = fresh_logits(policy, [5, 6])
    for bias in (0.0, 3.0, -math.inf):
        result = policy.generate([5, 6], temperature=0.0, max_new_tokens=1, backspace_bias=bias)
        assert float(result.values[0][0]) == pytest.approx(log_sum_exp(own), abs=FLOAT32)
    assert log_sum_exp(own) - log_sum_exp(own[:-1]) > 100 * FLOAT32


# Text


@pytest.fixture(scope="module")
def speaking() -> Policy:
    return with_row(llama(), character_tokenizer())


def keys(policy: Policy, text: str) -> list[int]:
    """Actions as typed: `⌫` deletes, `⏎` ends."""
    assert policy.tokenizer is not None
    names = {"⌫": BK, "⏎": EOS}
    return [names[key] if key in names else policy.tokenizer.convert_tokens_to_ids(key) for key in text]


@pytest.mark.parametrize(
    ("prompt", "typed", "text"),
    [
        ("a cat", " sat⏎", " sat"),
        ("a cat", " sot⌫⌫at⏎", " sat"),
        ("a cat", "⌫⌫⌫dog⏎", "dog"),  # behind "a ", which is what survived
        ("a cat", "⌫⌫⌫cat ran⏎", "cat ran"),  # what was written again did not survive
        ("a cat", "⌫⌫⏎", ""),
        ("a", "⌫⌫⌫b⏎", "b"),  # the first token is the floor
    ],
)
def test_the_text_is_what_stands_behind_as_much_of_the_prompt_as_survived(
    speaking: Policy, prompt: str, typed: str, text: str
) -> None:
    script = Script(iter(keys(speaking, typed)))
    result = speaking.generate(prompt, temperature=0.0, max_new_tokens=16, logits_processor=script)
    assert result.texts == [text]
    assert result.actions == [typed.replace("⌫", "<bkspc>").replace("⏎", "<eos>")]


def test_the_text_of_a_cut_row_ends_before_the_action_that_was_one_too_many(speaking: Policy) -> None:
    script = Script(iter(keys(speaking, "⌫dog")))
    result = speaking.generate("a c", temperature=0.0, max_new_tokens=2, max_actions=4, logits_processor=script)
    assert result.texts == ["do"]
    assert result.actions == ["<bkspc>do<eos>"]
    assert result.trajectories[0].truncated


def test_texts_come_back_in_the_order_of_their_prompts(speaking: Policy) -> None:
    prompts = ["a cat sat on", "a", "dog", "", "the end."]
    result = speaking.generate(prompts, temperature=0.0, max_new_tokens=8, batch_size=2)
    alone = [speaking.generate(prompt, temperature=0.0, max_new_tokens=8) for prompt in prompts]
    assert result.texts == [one.texts[0] for one in alone]
    assert result.actions == [one.actions[0] for one in alone]
    assert len(set(result.texts)) == len(prompts)
    assert result.trajectories[3].initial == (BOS,)  # an empty text is <bos>


@pytest.mark.parametrize(("is_cast", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_under_autocast_keys_and_values_are_kept_as_attention_takes_them(is_cast: bool, dtype: torch.dtype) -> None:
    policy = with_row(MODELS["float32"]())
    limits = Limits(policy.space.eos, policy.space.ends, policy.space.bkspc, 4, 17)
    decoder = Decoder(policy.base, policy.action_logits, limits, Choice(greedy=True), slots=2, longest_prompt=2)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        decoder.fill([0, 1], [0, 1], [[5, 6], [7]], [])
        decoder.advance()
    assert {part.dtype for layer in decoder.cache.stored.values() for part in layer} == {dtype}


@pytest.mark.parametrize(
    ("due", "steps"),
    [
        ({0: 100, 1: 3}, 8),  # the first goes on
        ({0: 5, 1: 3}, 5),
        ({0: 1, 1: 0}, 8),  # the second has deleted: nobody knows how long it takes
        ({0: 2, 1: 1, 2: 100}, 2),  # the third has ended
    ],
)
def test_a_replayed_decoder_looks_again_when_all_rows_may_have_ended(due: dict[int, int], steps: int) -> None:
    policy = with_row(MODELS["float32"]())
    limits = Limits(policy.space.eos, policy.space.ends, policy.space.bkspc, 200, 801)
    decoder = GraphDecoder(policy.base, policy.action_logits, limits, Choice(greedy=True), slots=3, longest_prompt=2)
    decoder.numbers, decoder.due = [7, 8, None], due
    assert decoder._steps() == steps


def test_without_a_tokenizer_there_are_actions_as_numbers_but_no_texts(policy: Policy) -> None:
    result = policy.generate([[5, 6], [7]], max_new_tokens=4, seed=0)
    assert result.texts == ["", ""]
    assert result.actions == [t.render() for t in result.trajectories]
    assert [t.initial for t in result.trajectories] == [(5, 6), (7,)]


# Bad input


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (
            [[5] * 60],
            {"max_new_tokens": 5},
            r"context of 64 tokens, with room for <eos>\. Got a prompt of 60 and max_new_tokens=5",
        ),
        ([], {}, "`prompts` must hold at least one prompt"),
        ([[5], []], {}, "`prompts` must not be empty: the policy needs a state to act in"),
        ([[5]], {"max_new_tokens": 0}, "`max_new_tokens` must be a whole number of at least 1"),
        ([[5]], {"max_actions": 0}, "`max_actions` must be a whole number of at least 1"),
        ([[5, VOCAB]], {}, r"`prompts` must hold token ids in \[0, 48\)\. Got 5 to 48"),
        ([[-1, 5]], {}, r"`prompts` must hold token ids in \[0, 48\)\. Got -1 to 5"),
        ([[5]], {"temperature": -0.5}, "`temperature` must be 0 .greedy., or a number of at least 1e-6. Got -0.5"),
        ([[5]], {"temperature": math.nan}, "`temperature` must be 0 .greedy., or a number of at least 1e-6. Got nan"),
        ([[5]], {"temperature": 0.0, "top_k": 3}, "would be ignored at temperature 0"),
        ([[5]], {"temperature": 0.0, "top_p": 0.9}, "would be ignored at temperature 0"),
        ([[5]], {"temperature": 0.0, "min_p": 0.1}, "would be ignored at temperature 0"),
        ([[5]], {"temperature": 0.0, "seed": 3}, "would be ignored at temperature 0"),
        ([[5]], {"batch_size": 0}, "`batch_size` must be at least 1"),
        ("some text", {}, "this policy was made without a tokenizer"),
    ],
)
def test_bad_input_is_refused_by_name(policy: Policy, prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy.generate(prompts, **({"max_new_tokens": 4} | options))


def test_a_prompt_its_new_tokens_and_eos_may_fill_the_context_and_be_scored() -> None:
    """GPT-2 looks positions up in a table: with one token more there would be none for <eos>."""
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(vocab_size=VOCAB, bos_token_id=BOS, eos_token_id=EOS, **sizes)
    policy = with_row(transformers.GPT2LMHeadModel(config).eval())
    (trajectory,) = follow(policy, [5] * 12, [6, 7, 8, 9], max_new_tokens=3).trajectories
    assert len(trajectory.final_state.tokens) == 16
    policy(encode([trajectory]))
    with pytest.raises(
        ValueError, match="`max_new_tokens` must fit the model's context of 16 tokens, with room for <eos>"
    ):
        policy.generate([5] * 12, max_new_tokens=4)


def test_logits_that_are_nan_are_refused_and_not_sampled_from() -> None:
    broken = with_row(llama())
    with torch.no_grad():
        broken.base.get_output_embeddings().weight[7, 0] = math.nan
    for options in ({"temperature": 0.0}, {"seed": 0}):
        with pytest.raises(ValueError, match="logits are NaN: nothing can be chosen from them"):
            broken.generate([5, 6], max_new_tokens=4, **options)


@pytest.mark.parametrize("spoilt", [-math.inf, math.nan])
def test_a_processor_that_leaves_nothing_to_choose_is_refused_and_not_taken_for_a_backspace(
    policy: Policy, spoilt: float
) -> None:
    with pytest.raises(ValueError, match="nothing can be chosen"):
        policy.generate(
            [5, 6], max_new_tokens=4, seed=0, logits_processor=lambda _, logits: torch.full_like(logits, spoilt)
        )


# Inside Hugging Face's own `generate`


def plain_prompts(seed: int) -> list[list[int]]:
    """Without padding and <eos>, which transformers would take for padding."""
    return [[token % (VOCAB - 3) + 3 for token in prompt] for prompt in ragged_prompts(12, seed)]


def own_and_backtracking(model: Any, ids: Tensor, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    own = model.generate(ids, do_sample=False, **options)
    ours = model.generate(ids, do_sample=False, custom_generate=sequencematch.generate, **options)
    return own.tolist(), ours.tolist()


def left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    attends = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, attends


def test_without_backspace_it_is_the_models_own_greedy_decoding() -> None:
    model = llama()
    for prompt in plain_prompts(70):
        own, ours = own_and_backtracking(model, torch.tensor([prompt]), max_new_tokens=10)
        assert ours == own


def test_without_backspace_a_left_padded_batch_is_the_models_own_greedy_decoding() -> None:
    ids, attends = left_padded(plain_prompts(71))
    own, ours = own_and_backtracking(llama(pad_token_id=0), ids, attention_mask=attends, max_new_tokens=10)
    assert ours == own


def test_the_mask_is_what_makes_a_left_padded_batch_right() -> None:
    ids, attends = left_padded([[5, 6, 7, 8, 9, 10], [5]])
    model = llama()
    options: dict[str, Any] = {"max_new_tokens": 10, "custom_generate": sequencematch.generate, "do_sample": False}
    masked = model.generate(ids, attention_mask=attends, **options)[1, 6:]
    alone = model.generate(torch.tensor([[5]]), **options)[0, 1:]
    unmasked = model.generate(ids, attention_mask=torch.ones_like(attends), **options)[1, 6:]
    length = len(alone)
    assert masked[:length].tolist() == alone.tolist()
    assert unmasked[:length].tolist() != alone.tolist()


def test_an_eos_behind_the_last_token_there_is_room_for_is_not_returned() -> None:
    model, ids = llama(), torch.tensor([[5, 6, 7]])
    written = model.generate(ids, do_sample=False, max_new_tokens=6)[0, 3:].tolist()
    first = next(n for n in range(1, 6) if written[n] not in written[:n])
    for room in (first, first + 1, first + 2):
        own, ours = own_and_backtracking(model, ids, eos_token_id=written[first], max_new_tokens=room)
        assert ours == own, f"room for {room} tokens, the <eos> is number {first + 1}"


def test_any_of_several_eos_tokens_ends_a_row_and_is_returned() -> None:
    model, ids = llama(), torch.tensor([[5, 6, 7]])
    written = model.generate(ids, do_sample=False, max_new_tokens=6)[0, 3:].tolist()
    first = next(n for n in range(1, 6) if written[n] not in written[:n])
    own, ours = own_and_backtracking(model, ids, eos_token_id=[EOS, written[first]], max_new_tokens=6)
    assert own[0][-1] == written[first]
    assert ours == own


def test_with_a_backspace_id_that_row_of_the_output_layer_deletes() -> None:
    # The model's own token 9 is taken for <bkspc>: every time it would be written, it deletes.
    model, bkspc = llama(), 9
    deleted = 0
    for seed, prompt in enumerate(plain_prompts(72)):
        options: dict[str, Any] = {"do_sample": True, "seed": seed, "bkspc_token_id": bkspc, "backspace_bias": 4.0}
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, top_k=0, custom_generate=sequencematch.generate, **options
        )[0].tolist()
        stack = list(prompt)
        for number in uniforms(seed, 0, 32).tolist():  # action 4 · 8 + 1 is cut, whatever it is
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([stack])).logits[:, -1]
            logits[0, bkspc] += 4.0 if len(stack) > len(prompt) else -torch.inf
            action = int(choose(logits, torch.tensor([number], dtype=torch.float64))[0])
            if action == bkspc:
                deleted += len(stack) > len(prompt)
                del stack[max(len(prompt), len(stack) - 1) :]
            elif len(stack) == len(prompt) + 8:
                break
            else:
                stack.append(action)
                if action == EOS:
                    break
        assert ids == stack
        assert bkspc not in ids[len(prompt) :]
    assert deleted >= 12


def test_with_a_backspace_id_the_output_is_not_the_models_own() -> None:
    model, ids = llama(), torch.tensor([[5, 6, 7]])
    own = model.generate(ids, do_sample=False, max_new_tokens=8)[0].tolist()
    options: dict[str, Any] = {"bkspc_token_id": own[4], "ban_deleted": True, "max_new_tokens": 8}
    ours = model.generate(ids, do_sample=False, custom_generate=sequencematch.generate, **options)[0].tolist()
    assert ours[:3] == own[:3]
    assert own[4] not in ours[3:]
