"""A task: rows to train on, rows to test on, and when an answer is right."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from sequencematch.data.files import write_files

#: A row as TRL and `datasets` know it: `prompt`, `completion` and perhaps `noise_tokens`; or `text`.
Row = dict[str, Any]


class Task(ABC):
    """Data and how it is judged. A subclass is a frozen dataclass whose fields are the options of the task.

    `metrics` names the default metrics. Completions are sampled at `temperature` (0: greedily) and have at most
    `max_new_tokens` tokens. The prompt of a row of `text` is its first `prompt_length` tokens.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    temperature: ClassVar[float] = 0.0
    max_new_tokens: int | None
    prompt_length: int | None = None

    @abstractmethod
    def train(self, tokenizer: Any = None) -> list[Row]:
        """The rows to train on; a task that counts tokens needs the model's tokenizer."""

    @abstractmethod
    def test(self, tokenizer: Any = None) -> list[Row]:
        """The rows to test on. None of them is in `train`."""

    def fitted(self, tokenizer: Any) -> "Task":  # noqa: ARG002
        """The task with all its options set, also those that depend on the model's tokenizer."""
        return self

    def is_right(self, answer: str, row: Row) -> bool:
        """Whether `answer`, the text after the prompt, equals the completion, ignoring surrounding spaces."""
        if "completion" not in row:
            raise ValueError(
                f"`row` must have a `completion` to compare the answer with. Got {', '.join(map(repr, row))}."
            )
        return answer.strip() == str(row["completion"]).strip()


def write_rows(task: Task, folder: str | Path, tokenizer: Any = None) -> None:
    """Write `train.jsonl` and `test.jsonl`, the splits that `datasets.load_dataset(folder)` finds; both or neither."""
    splits = {"train": task.train(tokenizer), "test": task.test(tokenizer)}
    for split, rows in splits.items():
        if not rows:
            raise ValueError(f"`task` must have rows in both splits to be written. Got none in {split}.")
    write_files(folder, {f"{split}.jsonl": _json_lines(rows) for split, rows in splits.items()})


def check_at_least(task: Task, least: Mapping[str, int]) -> None:
    """Refuse a task with an option below its minimum; None, the default, is allowed."""
    for name, minimum in least.items():
        value = getattr(task, name)
        if value is not None and value < minimum:
            raise ValueError(f"`{name}` must be at least {minimum}. Got {name}={value}.")


def _json_lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
