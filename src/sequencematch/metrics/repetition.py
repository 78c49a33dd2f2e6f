"""Repetition in generated text: rep-n, diversity and n-gram entropy (§6.2).

Each is defined for one generation, a sequence of tokens or words, and averaged over generations, long and short alike. A
generation with fewer than n items has no n-grams and is left out; the signature counts those left out.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from torch import Tensor

from sequencematch.metrics.bootstrap import check_some
from sequencematch.metrics.measure import Measure, mean_of

Generation = Sequence[Hashable]


def rep_n(generations: Sequence[Generation], n: int, *, unit: str = "tokens") -> Measure:
    """rep-n = 100 · (1 − |unique n-grams(x̂)| / |total n-grams(x̂)|), in percent; `unit` names the items   (§6.2)."""
    return _mean_over_generations(f"rep-{n}", lambda x: 100 * (1 - _unique_share(x, n)), generations, n, unit)


def diversity(generations: Sequence[Generation], *, unit: str = "tokens") -> Measure:
    """diversity = Π_{n=2}^{4} (1 − rep-n / 100): 1 where no 2-gram occurs twice. Needs four items   (§6.2)."""
    return _mean_over_generations(
        "diversity", lambda x: math.prod(_unique_share(x, n) for n in (2, 3, 4)), generations, 4, unit
    )


def ngram_entropy(generations: Sequence[Generation], n: int = 1, *, unit: str = "tokens") -> Measure:
    """H = −Σ_g f(g) log f(g) in nats, f(g) the share of n-gram g among all n-grams of the generation.

    At most log |total n-grams(x̂)|. The paper gives neither a formula nor n (§6.2); for 256 tokens, whose entropy is at most
    log 256 = 5.55 nats, n = 1 gives values such as the paper's 4.57.
    """
    return _mean_over_generations(f"{n}-gram entropy", lambda x: _entropy(x, n), generations, n, unit, log="nats")


def _ngrams(generation: Generation, n: int) -> list[tuple[Hashable, ...]]:
    return list(zip(*(generation[start:] for start in range(n)), strict=False))


def _unique_share(generation: Generation, n: int) -> float:
    ngrams = _ngrams(generation, n)
    return len(set(ngrams)) / len(ngrams)


def _entropy(generation: Generation, n: int) -> float:
    counts = np.array(list(Counter(_ngrams(generation, n)).values()))
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _mean_over_generations(
    name: str,
    statistic: Callable[[Generation], float],
    generations: Sequence[Generation],
    shortest: int,
    unit: str,
    **facts: str,
) -> Measure:
    check_some("generations", len(generations))
    if shortest < 1:
        raise ValueError(f"`n` must be at least 1. Got n={shortest}.")
    _check_items(generations)
    kept = [x for x in generations if len(x) >= shortest]
    if not kept:
        raise ValueError(
            f"`generations` must hold one of at least {shortest} {unit}, or there are no {shortest}-grams. "
            f"Got at most {max(map(len, generations))}."
        )
    short = len(generations) - len(kept)
    left_out = f"{short} shorter than {shortest}" if short else None
    samples = np.array([statistic(x) for x in kept], dtype=np.float64)
    return mean_of(name, samples, {"unit": unit, **facts, "mean": "generations", "left out": left_out})


def _check_items(generations: Sequence[object]) -> None:
    wrong = next((x for x in generations if isinstance(x, str | Tensor)), None)
    if wrong is not None:
        raise ValueError(
            f"`generations` must hold lists of token ids or words: a text would be counted by characters, and no two items of a "
            f"tensor are equal as keys. Got a {type(wrong).__name__}. Use `text.split()` or `tensor.tolist()`."
        )
