"""Words that are in no training text."""

import pytest

from sequencematch.metrics import known_words, unknown_words


def test_two_of_three_inner_words_are_unknown() -> None:
    known = known_words(["A dog runs.", "Don’t run!"])
    assert known == {"a", "dog", "runs", "don’t", "run"}
    # inner words: dog, blorp, naps
    found = unknown_words(["A dog blorp naps there"], known)
    assert found.value == pytest.approx(2 / 3)
    assert found.signature.startswith("unknown words|known:5|ratio:sums over texts|left out:first and last words|n:1|")


def test_words_are_compared_without_case_numbers_or_punctuation() -> None:
    assert unknown_words(["x DOG, 12 Dog-dog; x"], known_words(["dog"])).value == 0


def test_a_word_that_the_limit_cut_does_not_count_and_a_long_text_weighs_more() -> None:
    known = known_words(["cat"])
    assert unknown_words(["ing cat catc"], known).value == 0
    # 1 of 1, and 0 of 3
    assert unknown_words(["a blorp b", "a cat cat cat b"], known).value == 0.25


def test_texts_of_two_words_are_left_out_and_counted() -> None:
    found = unknown_words(["one two", "a blorp b"], {"a"})
    assert (found.value, found.count) == (1.0, 1)
    assert "left out:first and last words, 1 texts of fewer than three|" in found.signature
    with pytest.raises(ValueError, match=r"`texts` must hold one of three words or more: .* Got none\."):
        unknown_words(["one two"], {"a"})
