"""Markdown that shows the text it was given, and nothing else."""

import re
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sequencematch.data.markdown import as_markdown, escaped, quoted, table_lines
from sequencematch.data.pieces import Piece

GITHUB = MarkdownIt("commonmark").enable(["strikethrough", "table"])


def shown(markdown: str) -> str:
    """The text a reader sees, what is struck between `[-` and `-]`."""
    html = GITHUB.render(markdown).replace("<s>", "[-").replace("</s>", "-]")
    plain = re.sub("<[^>]+>", "", html).replace("\u200b", "")
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        plain = plain.replace(entity, character)
    return plain.strip()


def test_pieces_by_hand() -> None:
    pieces = [Piece("a*", "prompt"), Piece("b\n", "deleted"), Piece("c", "replacement"), Piece("…", "end")]
    assert as_markdown(pieces) == "a\\*~~b↵\u200b~~c…"


@given(
    st.lists(
        st.tuples(st.text("a1 *_~`|<>&[]()#+-=.!\\$\n\"'é", min_size=1, max_size=6), st.booleans()),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_was_written_reads_as_it_was_with_the_deleted_struck(drawn: list[tuple[str, bool]]) -> None:
    # Neighbours of one fate are one piece.
    runs = ((deleted, list(run)) for deleted, run in groupby(drawn, key=lambda pair: pair[1]))
    merged = [Piece("".join(text for text, _ in run), "deleted" if deleted else "kept") for deleted, run in runs]
    expected = "".join(f"[-{text}-]" if fate == "deleted" else text for text, fate in merged).replace("\n", "↵")
    assert shown(as_markdown([Piece("x", "kept"), *merged, Piece("x", "kept")])) == f"x{expected}x"


@pytest.mark.parametrize(
    "text", ["# no heading", "- no list", "---", "1. no list", "12) no", "> no quote", "=== no", "+ no", "    no code"]
)
def test_a_quotation_begins_nothing_else(text: str) -> None:
    html = GITHUB.render(quoted(escaped(text)))
    assert re.findall("<([a-z0-9]+)>", html) == ["blockquote", "p"]
    assert shown(quoted(escaped(text))) == text.strip()


def test_a_table_by_hand() -> None:
    lines = table_lines(["what", "n"], [["a \\| b", "1"], ["", "22"]])
    assert lines == ["| what | n |", "|---|---|", "| a \\| b | 1 |", "|  | 22 |"]
    html = GITHUB.render("\n".join(lines))
    assert re.findall("<t[hd]>(.*?)</t[hd]>", html) == ["what", "n", "a | b", "1", "", "22"]


def test_a_table_may_have_no_rows() -> None:
    assert table_lines(["what"], []) == ["| what |", "|---|"]
