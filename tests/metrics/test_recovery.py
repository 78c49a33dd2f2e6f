"""Mistakes, and whether a policy recovers from them."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sequencematch.metrics.recovery import append_mistake, recovery

DIGITS = range(10)


def test_with_one_wrong_candidate_the_mistake_is_known(generator: torch.Generator) -> None:
    """Behind an empty prefix 7 is right, so of 7 and 8 only 8 can be appended; three mistakes go on with either."""
    assert append_mistake([7], [7, 8], generator) == (8,)
    first, *rest = append_mistake([7], [7, 8], generator, mistakes=3)
    assert first == 8
    assert len(rest) == 2
    assert set(rest) <= {7, 8}


def check_mistake(completion: list[int], candidates: list[int], mistakes: int, prompt: tuple[int, ...]) -> None:
    """The oracle: all but the last `mistakes` tokens are the completion's, the next one is not."""
    kept = len(prompt) - mistakes
    assert 0 <= kept < len(completion)
    assert prompt[:kept] == tuple(completion[:kept])
    assert prompt[kept] != completion[kept]
    assert set(prompt[kept:]) <= set(candidates)


completions = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(
    completion=completions,
    candidates=st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(lambda c: len(set(c)) > 1),
    mistakes=st.integers(1, 4),
    seed=st.integers(0, 9999),
)
def test_a_right_prefix_is_followed_by_a_wrong_token(
    completion: list[int], candidates: list[int], mistakes: int, seed: int
) -> None:
    draws = torch.Generator().manual_seed(seed)
    check_mistake(completion, candidates, mistakes, append_mistake(completion, candidates, draws, mistakes))


def test_a_plain_draw_would_sometimes_be_right(generator: torch.Generator) -> None:
    """The negative control: without leaving the right token out, the oracle fails."""
    plain = [(int(torch.randint(2, (), generator=generator)),) for _ in range(50)]
    right = next(prompt for prompt in plain if prompt == (1,))
    with pytest.raises(AssertionError):
        check_mistake([1], [0, 1], 1, right)


def test_prefixes_and_mistakes_are_uniform(generator: torch.Generator) -> None:
    """1,200 draws, to five standard deviations: each length and each second mistake 300 times, each first one a third."""
    drawn = [append_mistake([0, 1, 2, 3], [0, 1, 2, 3, 3], generator, mistakes=2) for _ in range(1200)]
    for kept in range(4):
        prompts = [prompt for prompt in drawn if len(prompt) == kept + 2]
        assert abs(len(prompts) - 300) < 5 * math.sqrt(1200 * 3 / 16)
        first = [prompt[kept] for prompt in prompts]
        for wrong in {0, 1, 2, 3} - {kept}:
            assert abs(first.count(wrong) - len(first) / 3) < 5 * math.sqrt(len(first) * 2 / 9)
    second = [prompt[-1] for prompt in drawn]
    for token in range(4):
        assert abs(second.count(token) - 300) < 5 * math.sqrt(1200 * 3 / 16)


def test_the_same_seed_makes_the_same_mistakes() -> None:
    def of_seed(seed: int) -> list[tuple[int, ...]]:
        draws = torch.Generator().manual_seed(seed)
        return [append_mistake([1, 2, 3, 4], DIGITS, draws) for _ in range(10)]

    assert of_seed(0) == of_seed(0) != of_seed(1)


def test_the_papers_table_by_hand() -> None:
    """All four delete first, and three of four end right as its caption counts (by its own column of answers, two do)."""
    deletes, recovers = recovery([True] * 4, [False, True, True, True])
    assert (deletes.name, deletes.value, deletes.low, deletes.high, deletes.count) == ("deletes first", 1, 1, 1, 4)
    assert (recovers.name, recovers.value, recovers.count) == ("recovers", 0.75, 4)
    assert recovers.signature.startswith("recovers|after:mistakes|mean:completions|n:4|interval:bootstrap 95%")


def test_wrong_arguments_are_refused(generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match=re.escape("`completion` must hold at least one token")):
        append_mistake([], [1, 2], generator)
    with pytest.raises(ValueError, match=re.escape("`mistakes` must be at least 1 wrong token. Got mistakes=0.")):
        append_mistake([1], [1, 2], generator, mistakes=0)
    for candidates, got in (([2, 2], "[2]"), ([], "[]")):
        with pytest.raises(
            ValueError, match=re.escape(f"two different tokens suffice. Got {got}, none of them wrong in place of")
        ):
            append_mistake([1, 2, 1, 1], candidates, generator)
    with pytest.raises(ValueError, match=re.escape("`deletes_first` must give at least one sample")):
        recovery([], [])
    with pytest.raises(ValueError, match=re.escape("must have one entry per completion. Got 2 and 1.")):
        recovery([True, True], [True])
