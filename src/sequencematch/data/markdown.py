"""Markdown: escaped text, tables, and pieces with deletions struck through."""

import re
from collections.abc import Iterable, Sequence

from sequencematch.data.pieces import Piece

#: A zero-width space. `~~` beside a space or punctuation strikes nothing unless this separates the two.
_GUARD = "\u200b"


def escaped(text: str) -> str:
    """Text on one line, with Markdown's special characters escaped."""
    return re.sub(r"([\\`*_\[\]<>|~&$#])", r"\\\1", text.replace("\n", "↵"))


def quoted(markdown: str) -> str:
    """A line of Markdown as a quotation, guarded so that it does not begin a list, rule or code block."""
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
