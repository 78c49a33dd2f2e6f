"""Misspelt words: errors suggest the word that was likely meant."""

import difflib
from collections.abc import Iterable


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value that is none of the choices, and suggest the nearest; `name` is the setting."""
    known = list(choices)
    if value not in known:
        near = did_you_mean(str(value), known) or "."
        raise ValueError(f"`{name}` must be one of {', '.join(known)}. Got {value!r}{near}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the nearest known word; empty if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
