"""Text: documents, whose beginning a model continues   (§6.2)."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from sequencematch.data.rows import ending, read_json_lines, read_rows, read_text, text_in
from sequencematch.tasks.splits import check_share, hold_out, shuffle
from sequencematch.tasks.task import Row, Task, check_at_least

Files = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Text(Task):
    """Documents from files or from the hub, as rows of `text`; the paper gives 256 tokens and generates 256   (App. E).

    A row of a `.jsonl` file is a document; any other file is one document, or several with `separator`. Duplicates are dropped.
    Training cuts documents to its `max_length`, 1,024 tokens in the paper.
    """

    name: ClassVar[str] = "text"
    metrics: ClassVar[tuple[str, ...]] = ("mauve", "ngram_entropy", "diversity", "perplexity", "backspace_rate")
    temperature: ClassVar[float] = 1.0
    files: Files = field(default=(), metadata={"help": "Text or .jsonl files; their names may end in .gz."})
    test_files: Files = field(default=(), metadata={"help": "The same, held out. Default: a share of the documents."})
    dataset: Any = field(
        default=None,
        metadata={
            "help": "In place of files: a dataset on the hub, with a configuration as name:config; or a .parquet file."
        },
    )
    text_field: str = field(default="text", metadata={"help": "The field of a row that holds its text."})
    separator: str | None = field(
        default=None,
        metadata={"help": "Regular expression: a line that begins a document in a text file. WikiText: '= [^=]+ ='."},
    )
    test_size: int = field(default=1000, metadata={"help": "Documents to test on, at most."})
    test_share: float | None = field(default=None, metadata={"help": "Share of documents held out. Default: 0.1."})
    seed: int = field(default=0, metadata={"help": "Which documents are held out, and their order."})
    prompt_length: int = field(default=256, metadata={"help": "How many tokens of a document are given."})
    max_new_tokens: int = field(default=256, metadata={"help": "How many tokens are generated after them."})

    def __post_init__(self) -> None:
        """Refuse options that make no sense."""
        if bool(self.files) == (self.dataset is not None):
            raise ValueError(
                f"`files` or `dataset` must be given, and not both. Got {'both' if self.files else 'neither'}."
            )
        check_share(self.test_share, bool(self.test_files), "test_files")
        check_at_least(self, {"test_size": 0, "prompt_length": 1, "max_new_tokens": 1})
        try:
            re.compile(self.separator or "")
        except re.error as error:
            raise ValueError(f"`separator` must be a regular expression. Got {self.separator!r}: {error}.") from error

    def train(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        """All documents that are not held out."""
        documents = self._documents()
        held_out = set(self._held_out(documents))
        return [{"text": document} for document in documents if document not in held_out]

    def test(self, tokenizer: Any = None) -> list[Row]:
        """Documents held out; with a tokenizer, only those long enough for prompt and completion."""
        held_out = self._held_out(self._documents())
        if tokenizer is None or not self.test_size:
            return [{"text": document} for document in held_out[: self.test_size]]
        least = self.prompt_length + self.max_new_tokens
        long = (document for document in held_out if len(tokenizer(document)["input_ids"]) >= least)
        rows = [{"text": document} for document in itertools.islice(long, self.test_size)]
        if not rows:
            raise ValueError(
                f"`prompt_length` and `max_new_tokens` must fit some document held out: {least} tokens. "
                f"Got {len(held_out)} documents, all of them shorter."
            )
        return rows

    def _documents(self) -> list[str]:
        return _different(self._rows() if self.dataset is not None else self._read("files", self.files))

    def _held_out(self, documents: list[str]) -> list[str]:
        if not self.test_files:
            remedy = "Give `test_files`, or cut text files into documents with `separator`."
            return hold_out(documents, self.test_share, self.seed, remedy)
        return shuffle(_different(self._read("test_files", self.test_files)), self.seed)

    def _read(self, option: str, files: Files) -> Iterator[str]:
        for path in [files] if isinstance(files, str | Path) else files:
            if ending(path) == ".jsonl":
                rows = read_json_lines(option, path)
                yield from (text_in(row, "text_field", self.text_field, f"{path}, line {n}") for n, row in rows)
            else:
                yield from _cut(read_text(option, path), self.separator)

    def _rows(self) -> Iterator[str]:
        rows = read_rows("dataset", *self.dataset.split(":", 1)) if isinstance(self.dataset, str) else self.dataset
        return (text_in(row, "text_field", self.text_field, f"row {i} of `dataset`") for i, row in enumerate(rows))


def _cut(text: str, separator: str | None) -> Iterator[str]:
    lines: list[str] = []
    for line in text.split("\n"):
        if separator is not None and re.fullmatch(separator, line.strip()):
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def _different(documents: Iterable[str]) -> list[str]:
    """Each document once, without spaces around; empty ones are dropped."""
    return [document for document in dict.fromkeys(map(str.strip, documents)) if document]
