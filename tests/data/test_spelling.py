"""A wrong word is refused with the word that was likely meant."""

import pytest

from sequencematch.data.spelling import check_choice, did_you_mean


def test_a_word_near_a_known_one_is_suggested_and_others_are_not() -> None:
    assert did_you_mean("learning_rat", ["learning_rate", "seed"]) == "; did you mean 'learning_rate'?"
    assert did_you_mean("xyz", ["learning_rate", "seed"]) == ""


def test_a_choice_that_is_none_is_refused() -> None:
    check_choice("colour", "red", ["red", "green"])
    for value, text in (
        ("gren", r"^`colour` must be one of red, green\. Got 'gren'; did you mean 'green'\?$"),
        (7, r"^`colour` must be one of red, green\. Got 7\.$"),
    ):
        with pytest.raises(ValueError, match=text):
            check_choice("colour", value, (name for name in ("red", "green")))
