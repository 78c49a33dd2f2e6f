"""Words that a model made up: those that are in no training text."""

import re
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from sequencematch.metrics.bootstrap import METHOD, check_some, interval_of_ratio
from sequencematch.metrics.measure import Measure, signature

#: Letters, with apostrophes between them.
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


def words(text: str) -> list[str]:
    """The words of a text, without regard to case."""
    return [word.casefold() for word in WORD.findall(text)]


def known_words(texts: Iterable[str]) -> set[str]:
    """Every word of some texts."""
    return {word for text in texts for word in words(text)}


def unknown_words(texts: Sequence[str], known: Collection[str]) -> Measure:
    """The share of words that are not in `known`, such as the words of the training text.

    The first and the last word of a text are left out: a continuation may begin in a word, and a limit may cut its last. Both
    counts are summed over texts before dividing, and the interval resamples whole texts.
    """
    check_some("texts", len(texts))
    inner = [found for found in (words(text)[1:-1] for text in texts) if found]
    if not inner:
        raise ValueError("`texts` must hold one of three words or more: the first and the last are left out. Got none.")
    counts = np.array([[sum(word not in known for word in of), len(of)] for of in inner], dtype=np.float64)
    unknown, all_words = counts.T
    low, high = interval_of_ratio(unknown, all_words)
    short = len(texts) - len(inner)
    facts = {
        "known": len(known),
        "ratio": "sums over texts",
        "left out": f"first and last words{f', {short} texts of fewer than three' if short else ''}",
        "n": len(inner),
        "interval": METHOD,
    }
    value = float(unknown.sum() / all_words.sum())
    return Measure("unknown words", value, low, high, len(inner), signature("unknown words", facts))
