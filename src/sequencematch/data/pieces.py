"""Everything written in a trajectory, as pieces of text that were kept or deleted."""

import html
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby, takewhile
from typing import Literal, NamedTuple

from sequencematch.core.mdp import Trajectory

#: Token ids → text.
Decode = Callable[[Sequence[int]], str]
#: A "replacement" was kept, in the place of a deleted token.
Fate = Literal["prompt", "kept", "deleted", "replacement", "end"]


class Piece(NamedTuple):
    """The text of neighbouring tokens that had the same fate."""

    text: str
    fate: Fate


def pieces(trajectory: Trajectory, decode: Decode, prompt: str = "") -> tuple[Piece, ...]:
    """The prompt, everything written after it in order, and `<eos>`, or `…` if the sequence was cut.

    `prompt` is the text of s₀. If its end was deleted, that end follows as deleted text.
    """
    tokens, depths, alive = trajectory.replay()
    initial, deepest = len(trajectory.initial), [-1, *accumulate(depths, max)]  # `deepest` before each node
    fates: list[Fate] = ["deleted"] * len(tokens)
    for node in alive:
        fates[node] = "prompt" if node < initial else "kept" if depths[node] > deepest[node] else "replacement"
    start = fates.count("prompt")
    runs = groupby(range(start, len(tokens) - 1), key=fates.__getitem__)
    found = [
        Piece(prompt.removesuffix(decode(tokens[start:initial])), "prompt"),
        *(Piece(decode([tokens[node] for node in run]), fate) for fate, run in runs),
        Piece("…" if trajectory.truncated else "<eos>", "end"),
    ]
    return tuple(piece for piece in found if piece.text)


def as_html(written: Iterable[Piece]) -> str:
    """Pieces as HTML, the deleted ones inside `<del>`."""
    escaped = ((html.escape(text), fate) for text, fate in written)
    return "".join(f"<del>{text}</del>" if fate == "deleted" else text for text, fate in escaped)


def text_behind(decode: Decode, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that `tokens` add after `before`. Decoded alone, a first token would lose its space with some tokenizers."""
    shorter, whole = decode(before), decode([*before, *tokens])
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(shorter, whole, strict=False))
    return whole[len(list(shared)) :]
