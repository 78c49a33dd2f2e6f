"""A report is Markdown that shows what was written and what was deleted, and nothing else."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from sequencematch.data.pieces import Fate, Piece
from sequencematch.evaluation import Record, Sample, report, table
from sequencematch.evaluation.report import actions, escaped, quoted
from sequencematch.metrics import Measure

ANSWERED = Sample(
    question="In base 8, what is 4354 + 33? Solution:",
    handed="",
    written=(
        Piece(" 5", "deleted"),
        Piece(" 44", "kept"),
        Piece("1*", "deleted"),
        Piece("07", "kept"),
        Piece("<eos>", "end"),
    ),
    final=" 4407",
    reference=" 4407",
    is_right=True,
)
RECOVERED = Sample(
    question="In base 8, what is 4354 + 33? Solution:",
    handed=" 5",
    written=(Piece("5", "deleted"), Piece("4417", "kept"), Piece("…", "end")),
    final=" 4417",
    reference=" 4407",
    is_right=False,
)
RECORD = Record(
    model="out/my_model",
    weights="0123456789ab",
    dtype="float32",
    task="arithmetic",
    options={"module": "add_or_sub_in_base", "seed": 0},
    data="ba9876543210",
    count=200,
    sampling={"temperature": 0.0, "max_new_tokens": 32, "max_actions": 129},
    seed=0,
    mistakes=1,
    measures=(
        Measure("accuracy", 0.875, 0.83, 0.92, 200, "accuracy|match:exact|n:200"),
        Measure("perplexity, <bkspc> kept", 12.345, 11.2, 13.9, 200, "perplexity|<bkspc>:kept|n:200"),
    ),
    samples=(ANSWERED, RECOVERED),
    versions={"sequencematch": "0.1.0"},
    machine="cpu",
    seconds=12.4,
    command="sequencematch evaluate out/my_model --task arithmetic",
)
EXPECTED = r"""# arithmetic: out/my\_model

200 rows of arithmetic, at most 32 tokens behind each prompt, the likeliest actions; 12 s on cpu.

| metric | value | 95 % interval | n |
| --- | --- | --- | --- |
| accuracy | 0.8750 | 0.8300 – 0.9200 | 200 |
| perplexity, \<bkspc\> kept | 12.35 | 11.20 – 13.90 | 200 |

## Generations

What was deleted is ~~struck~~; ↵ is a new line, … a row that was cut.

| prompt | actions | in the end | reference | right |
| --- | --- | --- | --- | --- |
| In base 8, what is 4354 + 33? Solution: | ~~! 5~~ 44~~1\*!~~07\<eos\> | 4407 | 4407 | ✓ |

## After a mistake

The same rows, handed over with a right beginning and a wrong token.

| prompt | handed over | actions | in the end | reference | right |
| --- | --- | --- | --- | --- | --- |
| In base 8, what is 4354 + 33? Solution: | 5 | ~~5~~4417… | 4417 | 4407 | ✗ |

## Signatures

```text
evaluation|model:out/my_model|weights:0123456789ab|dtype:float32|task:arithmetic(module=add_or_sub_in_base, seed=0)|@
accuracy|match:exact|n:200
perplexity|<bkspc>:kept|n:200
```

## Again

```bash
sequencematch evaluate out/my_model --task arithmetic
```
""".replace("!", "\u200b").replace(
    "@",
    "rows:200|data:ba9876543210|temperature:0.0|max_new_tokens:32|max_actions:129|seed:0|mistakes:1|"
    "texts:behind the prompt|sequencematch:0.1.0",
)
GITHUB = MarkdownIt("commonmark").enable(["strikethrough", "table"])


def shown(markdown: str) -> str:
    """The text a reader sees, what is struck between `[-` and `-]`."""
    html = GITHUB.render(markdown).replace("<s>", "[-").replace("</s>", "-]")
    plain = re.sub("<[^>]+>", "", html).replace("\u200b", "")
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        plain = plain.replace(entity, character)
    return plain.strip()


def test_a_record_by_hand() -> None:
    assert report(RECORD) == EXPECTED


def test_it_reads_as_it_should() -> None:
    page = shown(report(RECORD))
    assert "[- 5-] 44[-1*-]07<eos>" in page
    assert "perplexity, <bkspc> kept" in page
    assert GITHUB.render(report(RECORD)).count("<table>") == 3


def test_long_texts_are_not_put_into_a_table() -> None:
    story = Sample(
        question="Once upon a time " * 20 + "\nThe end",
        handed="",
        written=(Piece(" of", "kept"), Piece("\nit", "deleted"), Piece(" all", "kept"), Piece("…", "end")),
        final=" of all",
        reference=" of the\nday",
        is_right=None,
    )
    text = report(dataclasses.replace(RECORD, samples=(story,), mistakes=None, command=None))
    assert re.search(r"\n\*\*1\.\*\* ….{192}↵The end\n", text)
    assert "time ↵The end\n\n> of~~\u200b↵it~~ all…\n\nIn the data:  of the↵day\n\n## Signatures" in text
    assert "## After a mistake" not in text
    assert "## Again" not in text
    assert "✗" not in text


@pytest.mark.parametrize("mistakes", [1, 3])
def test_it_says_how_many_tokens_were_wrong(mistakes: int) -> None:
    text = report(dataclasses.replace(RECORD, mistakes=mistakes))
    assert ("a right beginning and 3 wrong tokens." in text) == (mistakes == 3)


def test_what_was_drawn_says_its_temperature() -> None:
    drawn = dataclasses.replace(RECORD, sampling={**RECORD.sampling, "temperature": 0.7})
    assert "32 tokens behind each prompt, drawn at temperature 0.7; 12 s on cpu." in report(drawn)


@given(
    st.lists(
        st.tuples(st.text("a1 *_~`|<>&[]()#+-=.!\\$\n\"'é", min_size=1, max_size=6), st.booleans()),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_was_written_reads_as_it_was_with_the_deleted_struck(pieces: list[tuple[str, bool]]) -> None:
    # Neighbours of one fate are one piece, as in a sample.
    merged: list[tuple[str, bool]] = []
    for text, deleted in pieces:
        if merged and merged[-1][1] == deleted:
            merged[-1] = (merged[-1][0] + text, deleted)
        else:
            merged.append((text, deleted))
    fates: dict[bool, Fate] = {True: "deleted", False: "kept"}
    written = tuple(Piece(text, fates[deleted]) for text, deleted in merged)
    sample = dataclasses.replace(ANSWERED, written=(Piece("x", "kept"), *written, Piece("x", "kept")))
    expected = "".join(f"[-{text}-]" if deleted else text for text, deleted in merged).replace("\n", "↵")
    assert shown(actions(sample)) == f"x{expected}x"


@pytest.mark.parametrize(
    "text", ["# no heading", "- no list", "---", "1. no list", "12) no", "> no quote", "=== no", "+ no", "    no code"]
)
def test_a_quotation_begins_nothing_else(text: str) -> None:
    html = GITHUB.render(quoted(escaped(text)))
    assert re.findall("<([a-z0-9]+)>", html) == ["blockquote", "p"]
    assert shown(quoted(escaped(text))) == text.strip()


def test_the_table_for_the_terminal_has_the_measures() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(RECORD))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capture.get().splitlines()]
    assert ["accuracy", "0.8750", "0.8300 – 0.9200", "200"] in rows
    assert ["perplexity, <bkspc> kept", "12.35", "11.20 – 13.90", "200"] in rows
