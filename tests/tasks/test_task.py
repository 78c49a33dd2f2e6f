"""What every task must be, and a task of one's own."""

import dataclasses
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pytest

from sequencematch.data.examples import Reader
from sequencematch.tasks import TASKS, Arithmetic, Row, Rows, Task, write_rows
from tests.policy.tiny_models import character_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "new_task.py"


@dataclass(frozen=True)
class Fixed(Task):
    """Rows that are given."""

    name: ClassVar[str] = "fixed"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    rows: tuple[Any, ...] = ({"prompt": "é", "completion": " a"},)
    held_out: tuple[Any, ...] = ({"prompt": "b", "completion": " b"},)
    max_new_tokens: int = 4

    def train(self, tokenizer: Any = None) -> list[Row]:
        return [row if tokenizer is None else row | {"tokenizer": tokenizer} for row in self.rows]

    def test(self, tokenizer: Any = None) -> list[Row]:
        return [row if tokenizer is None else row | {"tokenizer": tokenizer} for row in self.held_out]


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("new_task", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_answer_is_right_if_it_is_the_completion_spaces_around_it_aside() -> None:
    row = {"prompt": "1 + 1? Solution:", "completion": " 2"}
    assert [Fixed().is_right(answer, row) for answer in ("2", " 2", "2 \n", "", "22", "2 2", "-2")] == [True] * 3 + [
        False
    ] * 4
    with pytest.raises(ValueError, match=r"`row` must have a `completion` to compare the answer with\. Got 'text'\."):
        Fixed().is_right("2", {"text": "2"})


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_every_task_explains_each_of_its_options(task: type[Task]) -> None:
    assert TASKS[task.name] is task
    assert task.metrics
    assert dataclasses.is_dataclass(task)
    for option in dataclasses.fields(task):
        assert option.metadata["help"].endswith((".", "'.")), option.name
    drawn = set() if task is Rows else {"test_size", "seed"}  # a file is there already
    assert {"max_new_tokens", *drawn} <= {option.name for option in dataclasses.fields(task)}


def test_rows_that_were_written_are_what_datasets_loads(tmp_path: Path) -> None:
    task = Arithmetic(train_size=40, test_size=10)
    write_rows(task, tmp_path / "new" / "data")
    assert sorted(path.name for path in (tmp_path / "new" / "data").iterdir()) == ["test.jsonl", "train.jsonl"]
    loaded = datasets.load_dataset(str(tmp_path / "new" / "data"), cache_dir=str(tmp_path / "cache"))
    assert set(loaded) == {"train", "test"}
    assert loaded["train"].to_list() == task.train()
    assert loaded["test"].to_list() == task.test()


def test_the_tokenizer_reaches_the_task_and_letters_stay_as_they_are(tmp_path: Path) -> None:
    write_rows(Fixed(), tmp_path, tokenizer="any")
    assert (tmp_path / "train.jsonl").read_text("utf-8") == '{"prompt": "é", "completion": " a", "tokenizer": "any"}\n'
    assert json.loads((tmp_path / "test.jsonl").read_text("utf-8"))["tokenizer"] == "any"


def test_both_splits_are_written_or_neither(tmp_path: Path) -> None:
    write_rows(Fixed(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_rows(Fixed(rows=({"text": "new"},), held_out=({"text": {1}},)), tmp_path)
    with pytest.raises(ValueError, match=r"`task` must have rows in both splits to be written\. Got none in test\."):
        write_rows(Fixed(rows=({"text": "new"},), held_out=()), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_example_is_a_task(example: Any) -> None:
    task = example.Reverse(train_size=50, test_size=10)
    train, test = task.train(), task.test()
    assert (len(train), len(test)) == (50, 10)
    assert not [row for row in test if row in train]
    assert example.Reverse(train_size=500, test_size=10).test() == test
    tokenizer = character_tokenizer()
    read = Reader(tokenizer, frozenset({tokenizer.eos_token_id}), max_length=64, needs_noise=True)
    for row in train + test:
        word = row["prompt"].split()[2]
        assert row == {
            "prompt": f"What is {word} backwards? Solution:",
            "completion": " " + "".join(reversed(word)),
            "noise_tokens": list("abcdefghijklmnopqrstuvwxyz"),
        }
        assert tokenizer.decode(read(row).completion) == row["completion"]
        assert task.is_right("".join(reversed(word)), row)
        assert task.is_right(word, row) == (word == word[::-1])


def test_the_example_writes_what_can_be_trained_on(example: Any, tmp_path: Path) -> None:
    write_rows(example.Reverse(train_size=5, test_size=2), tmp_path)
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 5
    assert len((tmp_path / "test.jsonl").read_text().splitlines()) == 2
