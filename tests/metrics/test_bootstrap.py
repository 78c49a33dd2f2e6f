"""Percentile bootstrap intervals."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from sequencematch.metrics.bootstrap import METHOD, interval, interval_of_mean, interval_of_ratio

VALUES = np.random.default_rng(3).normal(5, 2, 400)


def test_two_samples_by_hand() -> None:
    """Of 0 and 1 a resample has mean 0, ½ or 1 with probability ¼, ½, ¼: the 2.5 % quantile is 0, those at 30 and 70 % are ½."""
    values = np.array([0.0, 1.0])
    assert interval_of_mean(values) == (0.0, 1.0)
    assert interval(lambda index: float(values[index].mean()), 2, level=0.4) == (0.5, 0.5)


def test_one_sample_gives_an_interval_of_no_width() -> None:
    assert interval_of_mean(np.array([3.5])) == (3.5, 3.5)
    assert interval_of_ratio(np.array([3.0]), np.array([2.0])) == (1.5, 1.5)


def test_scipy_gives_the_same_interval_from_the_same_generator() -> None:
    theirs = scipy.stats.bootstrap(
        (VALUES,), np.mean, n_resamples=1000, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    assert interval_of_mean(VALUES) == pytest.approx((theirs.low, theirs.high), rel=1e-12)


def test_a_mean_has_the_closed_form_of_its_standard_error() -> None:
    """mean ± 1.96 σ/√n, to four times the error of a quantile of 1,000 draws: √(.025·.975/1000)/φ(1.96) = 0.085 standard errors."""
    error = VALUES.std() / math.sqrt(len(VALUES))
    low, high = interval_of_mean(VALUES)
    assert low == pytest.approx(VALUES.mean() - 1.96 * error, abs=0.34 * error)
    assert high == pytest.approx(VALUES.mean() + 1.96 * error, abs=0.34 * error)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    """300 samples of 60: 80 % of intervals hold the mean, within four standard deviations √(.8·.2/300) = 2.3 %."""
    generator = np.random.default_rng(5)
    covered = 0
    for _ in range(300):
        values = generator.normal(1, 1, 60)
        low, high = interval(lambda index, v=values: float(v[index].mean()), 60, resamples=200, level=0.8)  # type: ignore[misc]
        covered += low <= 1 <= high
    assert abs(covered / 300 - 0.8) < 4 * 0.023


@settings(max_examples=40)
@given(
    pairs=st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 10)), min_size=1, max_size=20),
    factor=st.floats(0.1, 10),
)
def test_a_ratio_resamples_both_sums_alike(pairs: list[tuple[float, float]], factor: float) -> None:
    """Proportional sums have one ratio whatever is drawn; and equal denominators leave the mean."""
    numerators, denominators = np.array(pairs).T
    assert interval_of_ratio(factor * denominators, denominators) == pytest.approx((factor, factor))
    equal = np.full(len(pairs), factor)
    low, high = interval_of_mean(numerators)
    assert interval_of_ratio(numerators, equal) == pytest.approx((low / factor, high / factor), abs=1e-12)


def test_sequences_and_not_tokens_are_resampled() -> None:
    """50 sequences of 16 equal tokens: resampling tokens would give an interval √16 = 4 times too narrow."""
    levels = np.random.default_rng(7).normal(size=50)
    low, high = interval_of_ratio(16 * levels, np.full(50, 16.0))
    tokens_low, tokens_high = interval_of_mean(np.repeat(levels, 16))
    assert (high - low) / (tokens_high - tokens_low) == pytest.approx(4, rel=0.15)


def test_a_wider_level_holds_the_narrower_one() -> None:
    intervals = [interval(lambda index: float(VALUES[index].mean()), 400, level=level) for level in (0.5, 0.8, 0.95)]
    for narrow, wide in pairwise(intervals):
        assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_the_seed_alone_decides_the_draws() -> None:
    def of_seed(seed: int) -> tuple[float, float]:
        return interval(lambda index: float(VALUES[index].mean()), 400, seed=seed)

    assert of_seed(0) == of_seed(0) == interval_of_mean(VALUES)
    assert of_seed(0) != of_seed(1)


def test_the_method_names_the_settings_in_use() -> None:
    drawn: list[int] = []
    interval(lambda index: float(drawn.append(len(index)) or 0), 3)  # type: ignore[func-returns-value]
    assert drawn == [3] * 1000
    assert METHOD == "bootstrap 95%, 1000 resamples, seed 0"


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("`count` must give at least one sample to measure on. Got none.")):
        interval_of_mean(np.array([]))
    with pytest.raises(ValueError, match=re.escape("`resamples` must be at least 1. Got resamples=0.")):
        interval(lambda _: 0.0, 3, resamples=0)
    with pytest.raises(ValueError, match=re.escape("`level` must lie strictly between 0 and 1. Got level=95.")):
        interval(lambda _: 0.0, 3, level=95)
    with pytest.raises(ValueError, match=re.escape("`denominators` must be positive") + r".*Got 0\."):
        interval_of_ratio(np.array([1.0, 1.0]), np.array([1.0, 0.0]))
