"""A task from a file of your own: rows with a prompt and a completion."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from sequencematch.data.packaged import find_packaged
from sequencematch.data.rows import ENDINGS, ending, read_rows
from sequencematch.tasks.task import Row, Task, check_at_least

#: How many tokens an answer may be longer than the longest completion.
_ROOM = 8


@dataclass(frozen=True)
class Rows(Task):
    """The rows of a file. An answer is right if it equals the completion, ignoring surrounding spaces.

    Rows may have `noise_tokens`, from which mistakes are drawn. The file is all test: it has no rows to train on.
    """

    name: ClassVar[str] = "rows"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "recovery", "own_errors", "backspace_rate")
    file: Path = field(
        metadata={
            "help": f"Rows with prompt and completion: {', '.join(ENDINGS[:-1])}. --task test.jsonl is short for --task rows "
            f"--file test.jsonl."
        }
    )
    max_new_tokens: int | None = field(
        default=None, metadata={"help": f"Longest answer. Default: the longest completion and {_ROOM} tokens more."}
    )

    def __post_init__(self) -> None:
        """Refuse what is not a file of rows."""
        check_at_least(self, {"max_new_tokens": 1})
        is_there = find_packaged(self.file).is_file()
        if ending(self.file) not in ENDINGS[:-1] or not is_there:
            raise ValueError(
                f"`file` must be an existing file of rows: {', '.join(ENDINGS[:-1])}. Got {self.file}"
                f"{'' if is_there else ', which is not there'}."
            )

    def train(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        """None."""
        return []

    def test(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        """All rows of the file."""
        rows = list(read_rows("file", str(self.file)))
        for number, row in enumerate(rows):
            for column in ("prompt", "completion"):
                value = row.get(column) if isinstance(row, Mapping) else None
                if not isinstance(value, str):
                    has = ", ".join(map(repr, row)) if isinstance(row, Mapping) else type(row).__name__
                    got = f"a {type(value).__name__}" if value is not None else f"none beside {has}"
                    raise ValueError(f"Row {number} of {self.file} must have a `{column}` that is text. Got {got}.")
        return rows

    def fitted(self, tokenizer: Any) -> "Rows":
        """Answers may be `_ROOM` tokens longer than the longest completion, unless the caller says how long."""
        if self.max_new_tokens is not None:
            return self
        texts = [row["completion"] for row in self.test()]
        longest = max((len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]), default=0)
        return replace(self, max_new_tokens=longest + _ROOM)
