"""Percentile bootstrap intervals: how far a number would move on another sample of the same size."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

RESAMPLES, LEVEL, SEED = 1000, 0.95, 0
#: How signatures describe an interval with these settings.
METHOD = f"bootstrap {LEVEL:.0%}, {RESAMPLES} resamples, seed {SEED}"


def interval(
    statistic: Callable[[Int[np.ndarray, "sample"]], float],
    count: int,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = SEED,
) -> tuple[float, float]:
    """The (1 ± level)/2 quantiles of `statistic` over index arrays drawn with replacement from 0 … count − 1.

    Samples must be independent of each other: whole sequences, never single tokens. If all samples are equal, as with a single
    sample or an accuracy of 0 or 1, the interval has no width, which understates the uncertainty.
    """
    check_some("count", count)
    if resamples < 1:
        raise ValueError(f"`resamples` must be at least 1. Got resamples={resamples}.")
    if not 0 < level < 1:
        raise ValueError(f"`level` must lie strictly between 0 and 1. Got level={level}.")
    generator = np.random.default_rng(seed)
    drawn = [statistic(generator.integers(0, count, count)) for _ in range(resamples)]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def interval_of_mean(values: Float[np.ndarray, "sample"]) -> tuple[float, float]:
    """The interval of a mean over samples."""
    return interval(lambda index: float(values[index].mean()), len(values))


def interval_of_ratio(
    numerators: Float[np.ndarray, "sample"], denominators: Float[np.ndarray, "sample"]
) -> tuple[float, float]:
    """The interval of Σ numerators / Σ denominators. Both sums are over the same resampled sequences, so long ones weigh more."""
    if len(denominators) and denominators.min() <= 0:
        raise ValueError(
            f"`denominators` must be positive, or a resample could divide by zero. Got {denominators.min():g}."
        )
    return interval(lambda index: float(numerators[index].sum() / denominators[index].sum()), len(numerators))


def check_some(argument: str, count: int) -> None:
    """Refuse to measure on no samples, by the name of the caller's argument."""
    if count < 1:
        raise ValueError(f"`{argument}` must give at least one sample to measure on. Got none.")
