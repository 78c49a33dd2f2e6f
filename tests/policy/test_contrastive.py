"""Contrastive search is its definition computed from scratch, and it leaves the loops that greedy decoding falls into."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sequencematch.policy import Policy, contrastive_search
from sequencematch.policy.contrastive import contrastive_searches
from tests.policy.tiny_models import DECODED, exact_llama, llama, mistral

VOCAB, EOS = DECODED["vocab_size"], DECODED["eos_token_id"]
BK = VOCAB
#: The library takes cosines in float32, which keeps seven digits. A choice won by more can't be rounding's.
TIE = 1e-5


@pytest.fixture(scope="module")
def policy() -> Policy:
    """In float64."""
    return Policy(exact_llama())


@pytest.fixture(scope="module")
def sliding() -> Policy:
    """With a window of four tokens, in float32."""
    return Policy(mistral())


@dataclass(frozen=True)
class Naive:
    """The tokens chosen, and at each step by how much the best candidate won."""

    tokens: tuple[int, ...]
    margins: list[float]


def fresh(policy: Policy, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Every token's last hidden vector and the logits behind the last, from the tokens alone."""
    with torch.no_grad():
        output = policy.model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return output.hidden_states[-1][0].double(), output.logits[0, -1].double()


def naive_search(policy: Policy, prompt: list[int], max_new_tokens: int, top_k: int, penalty_alpha: float) -> Naive:
    """(1 − α) p(x|s) − α max_j cos(h_x, h_j), each term from its own fresh pass."""
    tokens, margins = list(prompt), list[float]()
    while True:
        context, logits = fresh(policy, tokens)
        probability = torch.softmax(logits, 0)
        scores: list[tuple[float, int]] = []
        for candidate in logits.argsort(descending=True)[:top_k].tolist():
            hidden = fresh(policy, [*tokens, candidate])[0][-1]
            cosines = [float(hidden @ h / (hidden.norm() * h.norm())) for h in context]
            scores.append(
                ((1 - penalty_alpha) * float(probability[candidate]) - penalty_alpha * max(cosines), candidate)
            )
        ranked = sorted(scores, reverse=True)
        margins.append(ranked[0][0] - ranked[1][0] if top_k > 1 else 1.0)
        tokens.append(ranked[0][1])
        if tokens[-1] == EOS or len(tokens) == len(prompt) + max_new_tokens + 1:
            return Naive(tuple(tokens[len(prompt) :]), margins)


def prompts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def repeated_share(tokens: tuple[int, ...], n: int = 3) -> float:
    """The share of n-grams that occurred before."""
    grams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@pytest.mark.parametrize(("top_k", "penalty_alpha"), [(4, 0.6), (2, 0.3), (8, 0.9), (5, 1.0)])
def test_it_chooses_what_its_definition_computed_from_scratch_chooses(
    policy: Policy, top_k: int, penalty_alpha: float
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "top_k": top_k, "penalty_alpha": penalty_alpha}
    for prompt in prompts(6, seed=top_k):
        naive = naive_search(policy, prompt, **options)
        assert min(naive.margins) > TIE, "a tie: draw other prompts"
        trajectory = contrastive_search(policy, prompt, **options)
        assert trajectory.chosen == naive.tokens
        assert trajectory.initial == tuple(prompt)


def test_with_a_sliding_window_it_does_so_too(sliding: Policy) -> None:
    for prompt in prompts(6, seed=9):
        naive = naive_search(sliding, prompt, 10, 4, 0.6)
        assert min(naive.margins) > TIE, "a tie: draw other prompts"
        assert contrastive_search(sliding, prompt, max_new_tokens=10).chosen == naive.tokens


def test_another_penalty_chooses_otherwise(policy: Policy) -> None:
    # The negative control of the comparison above: it would notice a penalty that is not the one asked for.
    different = 0
    for prompt in prompts(6, seed=4):
        naive = naive_search(policy, prompt, 8, 4, 0.6)
        different += contrastive_search(policy, prompt, max_new_tokens=8, penalty_alpha=0.3).chosen != naive.tokens
    assert different >= 3


def greedy(policy: Policy, prompt: list[int], max_new_tokens: int) -> tuple[int, ...]:
    """Without <bkspc>, which takes no part in contrastive search."""
    options: dict[str, Any] = {"temperature": 0.0, "backspace_bias": -torch.inf, "max_new_tokens": max_new_tokens}
    return policy.generate(prompt, **options).trajectories[0].chosen


@pytest.mark.parametrize("top_k", [1, 4, VOCAB])
def test_without_a_penalty_it_is_greedy_whatever_the_number_of_candidates(policy: Policy, top_k: int) -> None:
    for prompt in prompts(6, seed=20):
        trajectory = contrastive_search(policy, prompt, max_new_tokens=10, top_k=top_k, penalty_alpha=0.0)
        assert trajectory.chosen == greedy(policy, prompt, 10)


def test_one_candidate_is_greedy_whatever_the_penalty(policy: Policy) -> None:
    for prompt in prompts(6, seed=21):
        trajectory = contrastive_search(policy, prompt, max_new_tokens=10, top_k=1, penalty_alpha=0.9)
        assert trajectory.chosen == greedy(policy, prompt, 10)


@pytest.fixture(scope="module")
def loops() -> Policy:
    """With tied embeddings, large beside what the layers add, a model likes best what it has just read."""
    model = llama(initializer_range=0.1, tie_word_embeddings=True)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.3)
    return Policy(model)


def test_it_leaves_the_loops_that_greedy_decoding_falls_into(loops: Policy) -> None:
    whole = 0
    for prompt in prompts(12, seed=30):
        options: dict[str, Any] = {"max_new_tokens": 30, "top_k": 4}
        assert repeated_share(greedy(loops, prompt, 30)) > 0.6
        assert repeated_share(contrastive_search(loops, prompt, penalty_alpha=0.0, **options).chosen) > 0.6
        trajectory = contrastive_search(loops, prompt, penalty_alpha=0.8, **options)
        assert repeated_share(trajectory.chosen) < 0.35
        whole += trajectory.truncated  # not ended early by <eos>, which would be a cheap way out
    assert whole >= 4


def test_backspace_takes_no_part_however_likely(policy: Policy) -> None:
    before = contrastive_search(policy, [5, 6, 7], max_new_tokens=10)
    eager = Policy(policy.base)
    with torch.no_grad():
        eager.backspace.row.copy_(100 * fresh(policy, [5, 6, 7])[0][-1])
    assert eager.generate([5, 6, 7], temperature=0.0, max_new_tokens=4).trajectories[0].chosen[0] == BK
    assert contrastive_search(eager, [5, 6, 7], max_new_tokens=10) == before


def test_max_new_tokens_is_the_net_length_and_the_token_behind_it_is_cut(policy: Policy) -> None:
    long = contrastive_search(policy, [5, 6, 7], max_new_tokens=12)
    short = contrastive_search(policy, [5, 6, 7], max_new_tokens=4)
    assert long.chosen[:5] == short.chosen
    assert short.executed == (*long.chosen[:4], EOS)
    assert short.truncated


def test_eos_ends_it(policy: Policy) -> None:
    wanted = contrastive_search(policy, [5, 6, 7], max_new_tokens=12).chosen
    first = next(n for n in range(2, 12) if wanted[n] not in wanted[:n])
    model = policy.base
    model.config.eos_token_id = wanted[first]
    try:
        trajectory = contrastive_search(Policy(model), [5, 6, 7], max_new_tokens=12)
    finally:
        model.config.eos_token_id = EOS
    assert trajectory.chosen == trajectory.executed == wanted[: first + 1]
    assert not trajectory.truncated


def test_it_takes_one_forward_pass_over_the_prompt_and_one_over_the_candidates_of_each_token(policy: Policy) -> None:
    calls: list[tuple[int, int]] = []
    hook = policy.base.base_model.register_forward_pre_hook(
        lambda _, __, inputs: calls.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    trajectory = contrastive_search(policy, [5, 6, 7], max_new_tokens=6, top_k=3)
    hook.remove()
    assert calls == [(1, 3)] + [(3, 1)] * len(trajectory)


def test_rows_side_by_side_are_what_each_is_alone_also_after_one_has_ended(policy: Policy) -> None:
    given = [[5, 6, 7], [8, 9, 10], [11, 5, 3]]
    alone = [contrastive_search(policy, prompt, max_new_tokens=10) for prompt in given]
    assert contrastive_searches(policy, given, max_new_tokens=10) == alone
    assert len({trajectory.chosen for trajectory in alone}) == 3
    model, early = policy.base, alone[1].chosen[1]
    model.config.eos_token_id = early
    try:
        ends = Policy(model)
        found = contrastive_searches(ends, given, max_new_tokens=10)
        assert found == [contrastive_search(ends, prompt, max_new_tokens=10) for prompt in given]
    finally:
        model.config.eos_token_id = EOS
    assert found[1].chosen == alone[1].chosen[:2]
    assert len(found[0]) > 2


def test_prompts_of_different_lengths_are_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"`prompts` must be at least one, all of one length.* Got \[1, 2\]"):
        contrastive_searches(policy, [[5], [5, 6]], max_new_tokens=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "`top_k` must lie between 1 and the vocabulary's size: it is the number of candidates. Got 0"),
        ({"penalty_alpha": -0.1}, r"`penalty_alpha` must lie in \[0, 1\].* Got -0.1"),
        ({"penalty_alpha": 1.5}, r"`penalty_alpha` must lie in \[0, 1\].* Got 1.5"),
    ],
)
def test_bad_options_are_refused_by_name(policy: Policy, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        contrastive_search(policy, [5], max_new_tokens=4, **options)
