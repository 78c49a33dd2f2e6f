"""Exact-match accuracy."""

import math
import re

import pytest

from sequencematch.metrics.accuracy import accuracy


def test_three_right_of_four_by_hand() -> None:
    """Right, wrong, right, right: 3/4. A resample of four has k right with C(4,k) ¾^k ¼^(4−k): the 2.5 % quantile is k = 1."""
    measure = accuracy([True, False, True, True])
    assert (measure.value, measure.low, measure.high, measure.count) == (0.75, 0.25, 1.0, 4)
    assert measure.signature.startswith("accuracy|mean:questions|n:4|")


def test_the_interval_is_the_binomial_one() -> None:
    """60 of 200: 0.3 ± 1.96 √(.3·.7/200) = 0.3 ± 0.0635, to a quantile's error of 0.34 · 0.0324 (four standard deviations)."""
    measure = accuracy([True] * 60 + [False] * 140)
    assert measure.low == pytest.approx(0.3 - 0.0635, abs=0.012)
    assert measure.high == pytest.approx(0.3 + 0.0635, abs=0.012)
    assert math.isclose(measure.value, 0.3)


def test_the_order_of_questions_does_not_change_the_value() -> None:
    assert accuracy([True, False, False]).value == accuracy([False, False, True]).value


def test_no_questions_are_refused() -> None:
    with pytest.raises(
        ValueError, match=re.escape("`is_right` must give at least one sample to measure on. Got none.")
    ):
        accuracy([])
