"""Markdown: text that stays as it is, tables, and pieces with deletions struck through."""

import re
from collections.abc import Iterable, Sequence

from sequencematch.data.pieces import Piece

#: A space without width. Beside a space or a punctuation mark, `~~` strikes nothing unless this stands between.
_GUARD = "\u200b"


def escaped(text: str) -> str:
    """Text that Markdown leaves as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>|~&$#])", r"\\\1", text.replace("\n", "↵"))


def quoted(markdown: str) -> str:
    """A line of Markdown as a quotation, in which it begins no list, rule or code."""
    return "> " + re.sub(r"^([+-]|\d+[.)])", _GUARD + r"\1", markdown.lstrip())


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; its cells are Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
    return [lines[0], "|" + "---|" * len(headings), *lines[1:]]


def as_markdown(written: Iterable[Piece]) -> str:
    """Pieces on one line, the deleted ones struck through."""
    return "".join(_struck(text) if fate == "deleted" else escaped(text) for text, fate in written)


def _struck(text: str) -> str:
    first, last = ("" if end.isalnum() else _GUARD for end in (text[0], text[-1]))
    return f"~~{first}{escaped(text)}{last}~~"
