"""The text of the study: documents split into training and test, then cut into passages that the tokenizer can spell."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sequencematch.data.files import write_files
from sequencematch.data.rows import ending
from sequencematch.evaluation.generations import digest
from sequencematch.experiments import networks
from sequencematch.experiments.text.cells import Budget
from sequencematch.experiments.tuning import load_tokenizer
from sequencematch.tasks import Text

SOURCE, TRAIN, TEST = "data.json", "train.jsonl", "test.jsonl"
#: The reference manual that comes inside Python.
MANUAL = "pydoc_data.topics"
#: Share of documents held out. More than usual: every draw has prompts of its own.
TEST_SHARE = 0.2
#: A title in WikiText begins a document.
TITLE = "= [^=]+ ="
#: Passages are longer than needed by this factor: tokens have more or fewer characters than on average.
MARGIN = 1.2
#: Characters that a tokenizer of ASCII does not know → what stands for them.
_ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\u00a0": " "})


@dataclass(frozen=True)
class Source:
    """Where documents come from: a file, or `MANUAL`."""

    data: str


def prepare(folder: Path, data: Path | None, budget: Budget) -> dict[str, Any]:
    """Write the passages to train on and those to continue, once; returns what `SOURCE` says of them."""
    source = Source(MANUAL if data is None else str(data))
    found = networks.once(folder / SOURCE, source, budget, partial(_written, folder, data, budget))
    if found["cell"] != {"data": source.data}:
        raise ValueError(
            f"`--data` must be that of the folder's other models. Got {source.data}, and {folder / SOURCE} was made from "
            f"{found['cell']['data']}. Choose another folder."
        )
    return found


def text_task(folder: Path, budget: Budget) -> Text:
    """The passages in a folder as a task."""
    return Text(
        files=folder / TRAIN,
        test_files=folder / TEST,
        test_size=budget.draws * budget.samples,
        prompt_length=budget.prompt_length,
        max_new_tokens=budget.max_new_tokens,
    )


def documents(data: Path | None) -> tuple[list[str], list[str]]:
    """Documents to train on, and others that are held out."""
    options: dict[str, Any] = {"test_size": 10**9, "test_share": TEST_SHARE}
    if data is None:
        options["dataset"] = [{"text": topic} for topic in manual()]
    elif ending(data) in (".csv", ".json", ".parquet"):
        options["dataset"] = str(data)
    else:
        options |= {"files": data, "separator": TITLE}
    try:
        task = Text(**options)
        train, test = task.train(), task.test()
    except ValueError as error:
        raise ValueError(
            f"`--data` must be a file of two documents or more: rows with `text`, or text with titles as in WikiText, "
            f"`= Title =`. Got {data}: {error}"
        ) from error
    return [row["text"] for row in train], [row["text"] for row in test]


def manual() -> list[str]:
    """The prose of Python's reference manual, a document per topic. A paragraph that occurs in several is left in the first."""
    from pydoc_data.topics import topics

    seen, found = set[str](), []
    for name in sorted(topics):
        paragraphs = [" ".join(paragraph.split()) for paragraph in _paragraphs(topics[name])]
        prose = [text for text in paragraphs if re.fullmatch(r"[A-Z].*[.:]", text) and text not in seen]
        seen |= set(prose)
        found.append("\n\n".join(dict.fromkeys(prose)))
    return found


def passages(document: str, characters: float) -> Iterator[str]:
    """Whole sentences, as many as make up so many characters at least; those at the end may have fewer."""
    taken = ""
    for sentence in re.split(r"(?<=[.:!?]\s)", document):
        taken += sentence
        if len(taken) >= characters:
            yield taken.strip()
            taken = ""
    if taken.strip():
        yield taken.strip()


def spelled(text: str, tokenizer: Any) -> str | None:
    """A text as the tokenizer can spell it: as it is, or else in ASCII and on one line; None if it can't spell that either."""
    for version in (text, " ".join(text.translate(_ASCII).split())):
        if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in tokenizer(version)["input_ids"]:
            return version
    return None


def _paragraphs(text: str) -> list[str]:
    return [paragraph for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def _written(folder: Path, data: Path | None, budget: Budget) -> dict[str, Any]:
    train, test = documents(data)
    tokenizer = load_tokenizer(budget.model)
    width = _characters_per_token(train, tokenizer)
    shortest, wanted = budget.prompt_length + budget.max_new_tokens, budget.draws * budget.samples
    left_out: list[str] = []

    def spell(texts: Sequence[str], tokens: int) -> Iterator[str]:
        """The first passages of all documents, then the second ones, and so on, without those that can't be spelled."""
        cut = (passages(text, MARGIN * tokens * width) for text in texts)
        for passage in (text for turn in itertools.zip_longest(*cut) for text in turn if text is not None):
            text = spelled(passage, tokenizer)
            if text is None:
                left_out.append(passage)
            else:
                yield text

    kept = _first(budget.steps * budget.batch_size, spell(train, budget.context))  # no row is needed twice
    long = (text for text in spell(test, shortest) if len(tokenizer(text)["input_ids"]) >= shortest)
    given = _first(wanted, long)
    if len(given) < wanted:
        raise ValueError(
            f"`--data` must have at least {wanted} passages of {shortest} tokens in the {TEST_SHARE:.0%} of documents that are "
            f"held out: {budget.draws} draws of {budget.samples}. Got {len(given)}; {len(left_out)} of all passages have "
            f"characters that the tokenizer does not know. Give more text, or choose a smaller --preset."
        )
    rows = {TRAIN: [{"text": text} for text in kept], TEST: [{"text": text} for text in given]}
    lines = {name: [json.dumps(row, ensure_ascii=False) + "\n" for row in of] for name, of in rows.items()}
    write_files(folder, {name: "".join(of) for name, of in lines.items()})
    return {
        "documents": {"train": len(train), "test": len(test)},
        "passages": {"train": len(kept), "test": len(given), "left out for unknown characters": len(left_out)},
        "characters per token": width,
        "digest": digest(rows),
    }


def _first(count: int, texts: Iterable[str]) -> list[str]:
    """The first different texts."""
    found: dict[str, None] = {}
    for text in texts:
        found[text] = None
        if len(found) == count:
            break
    return list(found)


def _characters_per_token(texts: Sequence[str], tokenizer: Any) -> float:
    """The mean over the beginnings of some documents."""
    some = [text[:2000] for text in texts[:: math.ceil(len(texts) / 100)]]
    return sum(map(len, some)) / sum(len(tokenizer(text)["input_ids"]) for text in some)
