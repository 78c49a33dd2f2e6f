"""§6.2: rep-n, diversity and n-gram entropy, against the formulas written out."""

import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sequencematch.metrics.repetition import _check_items, diversity, ngram_entropy, rep_n

generations = st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=30), min_size=1, max_size=5)


def all_ngrams(x: Sequence[int], n: int) -> list[list[int]]:
    return [list(x[start : start + n]) for start in range(len(x) - n + 1)]


def unique_ngrams(x: Sequence[int], n: int) -> list[list[int]]:
    unique: list[list[int]] = []
    for ngram in all_ngrams(x, n):
        if ngram not in unique:
            unique.append(ngram)
    return unique


def slow_rep(x: Sequence[int], n: int) -> float:
    return 100 * (1.0 - len(unique_ngrams(x, n)) / len(all_ngrams(x, n)))


def slow_diversity(x: Sequence[int]) -> float:
    product = 1.0
    for n in (2, 3, 4):
        product *= 1.0 - slow_rep(x, n) / 100
    return product


def slow_entropy(x: Sequence[int], n: int) -> float:
    total = all_ngrams(x, n)
    return sum(-total.count(g) / len(total) * math.log(total.count(g) / len(total)) for g in unique_ngrams(x, n))


def test_one_sentence_by_hand() -> None:
    """a b a b a: 2-grams ab ba ab ba, 2 of 4; 3-grams aba bab aba, 2 of 3; 4-grams abab baba, 2 of 2; a 3/5, b 2/5."""
    sentence = [["a", "b", "a", "b", "a"]]
    assert rep_n(sentence, 1, unit="words").value == pytest.approx(60)
    assert rep_n(sentence, 2, unit="words").value == 50
    assert rep_n(sentence, 3, unit="words").value == pytest.approx(100 / 3)
    assert rep_n(sentence, 4, unit="words").value == 0
    assert diversity(sentence, unit="words").value == pytest.approx(1 / 2 * 2 / 3 * 1)
    entropy = -3 / 5 * math.log(3 / 5) - 2 / 5 * math.log(2 / 5)
    assert ngram_entropy(sentence, unit="words").value == pytest.approx(entropy)
    assert ngram_entropy(sentence, 2, unit="words").value == pytest.approx(math.log(2))


def test_generations_count_alike_whatever_their_length() -> None:
    """rep-2 of 1 1 1 is 50, of 1 … 9 is 0: the mean is 25. All 2-grams in one bag would give 100 · (1 − 9/10) = 10."""
    assert rep_n([[1, 1, 1], list(range(1, 10))], 2).value == 25


@settings(max_examples=50)
@given(generations=generations, n=st.integers(1, 4))
def test_each_equals_the_formula_written_out(generations: list[list[int]], n: int) -> None:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    assert rep_n(generations, n).value == pytest.approx(mean([slow_rep(x, n) for x in generations]), abs=1e-12)
    assert diversity(generations).value == pytest.approx(mean([slow_diversity(x) for x in generations]))
    entropies = [slow_entropy(x, n) for x in generations]
    assert ngram_entropy(generations, n).value == pytest.approx(mean(entropies), abs=1e-12)


@settings(max_examples=20)
@given(generations=generations, names=st.permutations("abcd"))
def test_only_which_items_are_equal_matters(generations: list[list[int]], names: list[str]) -> None:
    words = [[names[token] for token in x] for x in generations]
    assert rep_n(words, 2).value == rep_n(generations, 2).value
    assert diversity(words).value == diversity(generations).value
    assert ngram_entropy(words).value == pytest.approx(ngram_entropy(generations).value)


def test_text_that_never_repeats_reaches_the_bounds() -> None:
    """256 different tokens: rep-n 0, diversity 1, entropy log 256 = 5.545; one token 256 times: 100 · (1 − 1/255), nothing, 0."""
    assert rep_n([range(256)], 2).value == 0
    assert diversity([range(256)]).value == 1
    assert ngram_entropy([range(256)]).value == pytest.approx(math.log(256))
    assert ngram_entropy([range(256)], 2).value == pytest.approx(math.log(255))
    assert rep_n([[7] * 256], 2).value == pytest.approx(100 * (1 - 1 / 255))
    assert diversity([[7] * 256]).value == pytest.approx(1 / (255 * 254 * 253))
    assert ngram_entropy([[7] * 256]).value == 0


def test_zipfian_text_has_the_entropy_the_paper_reports_for_one_token_and_not_for_two() -> None:
    """The paper has 4.43 to 4.60. 256 words of a Zipfian vocabulary of 32,000 come near it with n = 1; with n = 2 few repeat."""
    weights = 1 / np.arange(1, 32_001)
    drawn = np.random.default_rng(0).choice(32_000, size=(50, 256), p=weights / weights.sum()).tolist()
    assert ngram_entropy(drawn).value == pytest.approx(4.57, abs=0.3)
    assert ngram_entropy(drawn, 2).value > 5.3


class Item(int):
    """A token that counts how often tokens are hashed or compared."""

    looked_at = 0

    def __hash__(self) -> int:
        Item.looked_at += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Item.looked_at += 1
        return super().__eq__(other)


def test_the_work_grows_with_the_length_of_a_generation_and_not_with_its_square() -> None:
    def work(length: int) -> int:
        drawn = [[Item(token) for token in np.random.default_rng(0).integers(0, 50, length)]]
        Item.looked_at = 0
        for n in (2, 3, 4):
            rep_n(drawn, n)
        diversity(drawn)
        ngram_entropy(drawn, 4)
        return Item.looked_at

    assert 0 < work(2000) <= 2.5 * work(1000)


def test_the_signature_names_unit_and_mean() -> None:
    words = [["a", "b", "c", "d"]]
    assert rep_n([[1, 2]] * 3, 2).signature == (
        "rep-2|unit:tokens|mean:generations|n:3|interval:bootstrap 95%, 1000 resamples, seed 0"
    )
    assert diversity(words, unit="words").signature.startswith("diversity|unit:words|mean:generations|n:1|")
    assert ngram_entropy(words).signature.startswith("1-gram entropy|unit:tokens|log:nats|mean:generations|n:1|")


def test_generations_without_ngrams_are_left_out_and_counted() -> None:
    """1 1 1 alone has a 2-gram; nothing else may enter the mean, as 0 or otherwise."""
    measure = rep_n([[1, 1, 1], [1], []], 2)
    assert (measure.value, measure.count) == (50, 1)
    assert "|left out:2 shorter than 2|n:1|" in measure.signature
    assert "|left out:1 shorter than 4|" in diversity([[1, 2, 3, 4], [1, 2, 3]]).signature
    assert "left out" not in rep_n([[1, 1, 1]], 2).signature


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("`generations` must give at least one sample")):
        rep_n([], 2)
    with pytest.raises(ValueError, match=re.escape("`n` must be at least 1. Got n=0.")):
        ngram_entropy([[1]], 0)
    with pytest.raises(
        ValueError, match=re.escape("one of at least 4 tokens, or there are no 4-grams. Got at most 3.")
    ):
        diversity([[1, 2, 3], []])
    with pytest.raises(ValueError, match=re.escape("Got a str. Use `text.split()` or `tensor.tolist()`.")):
        rep_n(["a text"], 2)


def test_a_tensor_whose_items_are_never_equal_is_refused() -> None:
    """Items of a tensor are keys by identity: 1 1 1 would have three different 1-grams. (The shape checker refuses it earlier.)"""
    row = torch.tensor([1, 1, 1])
    assert len(set(zip(row, strict=True))) == 3
    with pytest.raises(ValueError, match=re.escape("no two items of a tensor are equal as keys. Got a Tensor.")):
        _check_items([[1, 1], row])
