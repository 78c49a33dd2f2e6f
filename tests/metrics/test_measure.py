"""A number with its interval and its signature."""

import dataclasses
import math
import re

import numpy as np
import pytest

from sequencematch.metrics.measure import Measure, mean_of, signature


def test_a_mean_says_what_it_is() -> None:
    """(1 + 2 + 6) / 3 = 3; the lowest of 27 equally likely resamples, 1 1 1, has 3.7 % and is the 2.5 % quantile."""
    measure = mean_of("rep-2", np.array([1.0, 2.0, 6.0]), {"unit": "tokens", "mean": "generations"})
    assert (measure.name, measure.value, measure.low, measure.high, measure.count) == ("rep-2", 3.0, 1.0, 6.0, 3)
    assert measure.signature == (
        "rep-2|unit:tokens|mean:generations|n:3|interval:bootstrap 95%, 1000 resamples, seed 0"
    )


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (12.314, 11.8, 12.841, "12.31 [11.80, 12.84]"),
        (0.49, 0.4213, 0.5551, "0.4900 [0.4213, 0.5551]"),
        (1.5, 1.25, 2, "1.500 [1.250, 2.000]"),
        (1234.5, 1000, 2000, "1234 [1000, 2000]"),
        (0.0, 0.0, 0.0, "0.0000 [0.0000, 0.0000]"),
        (0.00123, 0.0, 0.01, "0.0012 [0.0000, 0.0100]"),
        (math.inf, 1.0, math.inf, "inf [1.0000, inf]"),
    ],
)
def test_a_measure_is_printed_with_four_digits(value: float, low: float, high: float, text: str) -> None:
    assert str(Measure("x", value, low, high, 10, "x")) == f"x {text}"


def test_a_measure_is_a_value() -> None:
    first, second = (Measure("x", 1.0, 0.0, 2.0, 10, "x|n:10") for _ in range(2))
    assert first == second
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.value = 2.0  # type: ignore[misc]


def test_facts_keep_their_order_and_those_that_are_none_are_left_out() -> None:
    assert signature("x", {"b": 2, "a": None, "left out": "1 short"}) == "x|b:2|left out:1 short"


def test_a_fact_that_would_break_the_signature_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("`facts` must not hold '|'") + r".*Got 'encoder:a\|b'\."):
        signature("x", {"encoder": "a|b"})
