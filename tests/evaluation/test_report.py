"""A report is Markdown that shows what was written and what was deleted, and nothing else."""

import dataclasses
import math
import re

import pytest
from rich.console import Console

from sequencematch.data.pieces import Piece
from sequencematch.evaluation import Record, Sample, report, table
from sequencematch.metrics import Measure
from tests.data.test_markdown import GITHUB, shown

ANSWERED = Sample(
    question="In base 8, what is 4354 + 33? Solution:",
    given="",
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
    given=" 5",
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

200 rows of arithmetic, at most 32 tokens after each prompt, greedy decoding; 12 s on cpu.

| metric | value | 95 % interval | n |
|---|---|---|---|
| accuracy | 0.8750 | 0.8300 – 0.9200 | 200 |
| perplexity, \<bkspc\> kept | 12.35 | 11.20 – 13.90 | 200 |

## Generations

Deleted text is ~~struck~~; ↵ is a new line, … a row that was cut.

| prompt | actions | in the end | reference | right |
|---|---|---|---|---|
| In base 8, what is 4354 + 33? Solution: | ~~! 5~~ 44~~1\*!~~07\<eos\> | 4407 | 4407 | ✓ |

## After a mistake

The same rows, with a correct prefix of the answer and a wrong token after the prompt.

| prompt | given | actions | in the end | reference | right |
|---|---|---|---|---|---|
| In base 8, what is 4354 + 33? Solution: | 5 | ~~5~~4417… | 4417 | 4407 | ✗ |

## Signatures

```text
evaluation|model:out/my_model|weights:0123456789ab|dtype:float32|task:arithmetic(module=add_or_sub_in_base, seed=0)|@
accuracy|match:exact|n:200
perplexity|<bkspc>:kept|n:200
```

## Command

```bash
sequencematch evaluate out/my_model --task arithmetic
```
""".replace("!", "\u200b").replace(
    "@",
    "rows:200|data:ba9876543210|temperature:0.0|max_new_tokens:32|max_actions:129|seed:0|mistakes:1|"
    "texts:after the prompt|sequencematch:0.1.0",
)


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
        given="",
        written=(Piece(" of", "kept"), Piece("\nit", "deleted"), Piece(" all", "kept"), Piece("…", "end")),
        final=" of all",
        reference=" of the\nday",
        is_right=None,
    )
    text = report(dataclasses.replace(RECORD, samples=(story,), mistakes=None, command=None))
    assert re.search(r"\n\*\*1\.\*\* ….{192}↵The end\n", text)
    assert "time ↵The end\n\n> of~~\u200b↵it~~ all…\n\nIn the data:  of the↵day\n\n## Signatures" in text
    assert "## After a mistake" not in text
    assert "## Command" not in text
    assert "✗" not in text


@pytest.mark.parametrize("mistakes", [1, 3])
def test_it_says_how_many_tokens_were_wrong(mistakes: int) -> None:
    text = report(dataclasses.replace(RECORD, mistakes=mistakes))
    assert ("a correct prefix of the answer and 3 wrong tokens after the prompt." in text) == (mistakes == 3)


def test_what_was_drawn_says_its_temperature() -> None:
    drawn = dataclasses.replace(RECORD, sampling={**RECORD.sampling, "temperature": 0.7})
    assert "32 tokens after each prompt, drawn at temperature 0.7; 12 s on cpu." in report(drawn)


def test_a_share_of_nothing_is_a_dash() -> None:
    nothing = Measure("own errors deleted", math.nan, math.nan, math.nan, 0, "own errors deleted|n:0")
    assert "\n| own errors deleted | – | – | 0 |\n" in report(dataclasses.replace(RECORD, measures=(nothing,)))


def test_the_table_for_the_terminal_has_the_measures() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(RECORD))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capture.get().splitlines()]
    assert ["accuracy", "0.8750", "0.8300 – 0.9200", "200"] in rows
    assert ["perplexity, <bkspc> kept", "12.35", "11.20 – 13.90", "200"] in rows
