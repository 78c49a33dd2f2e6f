"""A measured number: value, interval, sample count, and a signature like sacrebleu's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from sequencematch.metrics.bootstrap import METHOD, interval_of_mean


@dataclass(frozen=True)
class Measure:
    """A number measured on `count` samples, with a 95 % interval and a `signature` that names every choice behind it.

    Compare two measures only if their signatures agree in everything except `n`.
    """

    name: str
    value: float
    low: float
    high: float
    count: int
    signature: str

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Measure":
        """The measure that was written as JSON, where NaN is null."""
        found: dict[str, Any] = {name: math.nan if value is None else value for name, value in values.items()}
        return cls(**found)

    def __str__(self) -> str:
        """Like `rep-2 12.31 [11.80, 12.84]`: the value to four significant digits, at most four decimals."""
        decimals = 4
        if self.value and math.isfinite(self.value):
            decimals = min(max(3 - math.floor(math.log10(abs(self.value))), 0), 4)
        value, low, high = (f"{number:.{decimals}f}" for number in (self.value, self.low, self.high))
        return f"{self.name} {value} [{low}, {high}]"


def signature(name: str, facts: Mapping[str, object]) -> str:
    """`name|fact:value|…` in the order of `facts`, such as `rep-2|unit:tokens|n:1000`. A fact that is None is left out."""
    parts = [name, *(f"{fact}:{value}" for fact, value in facts.items() if value is not None)]
    wrong = [part for part in parts if "|" in part]
    if wrong:
        raise ValueError(f"`facts` must not hold '|', which separates the facts of a signature. Got {wrong[0]!r}.")
    return "|".join(parts)


def mean_of(name: str, samples: Float[np.ndarray, "sample"], facts: Mapping[str, object]) -> Measure:
    """The unweighted mean over samples, with its bootstrap interval."""
    low, high = interval_of_mean(samples)
    text = signature(name, {**facts, "n": len(samples), "interval": METHOD})
    return Measure(name, float(samples.mean()), low, high, len(samples), text)
