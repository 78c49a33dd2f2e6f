"""A file of prompts and completions is a task."""

import gzip
import json
from pathlib import Path

import datasets
import pytest

from sequencematch.evaluation import find_task
from sequencematch.tasks import Rows, write_rows
from tests.policy.tiny_models import character_tokenizer

ROWS = [{"prompt": "ab", "completion": "cde"}, {"prompt": "a", "completion": "b"}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_its_rows_are_the_files_whatever_the_format(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "a.csv").write_text("prompt,completion\nab,cde\na,b\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "a.parquet"))
    for path in (file, tmp_path / "a.csv", tmp_path / "a.jsonl.gz", tmp_path / "a.parquet"):
        assert find_task(str(path)).test() == ROWS
        assert find_task("rows", ["--file", str(path)]) == find_task(str(path))


def test_answers_may_be_eight_tokens_longer_than_the_longest_completion(file: Path) -> None:
    """`cde` has three tokens, a token being a character."""
    task = Rows(file)
    assert task.fitted(character_tokenizer()).max_new_tokens == 11
    assert Rows(file, max_new_tokens=2).fitted(character_tokenizer()).max_new_tokens == 2
    assert find_task(str(file), ["--max-new-tokens", "5"]) == Rows(file, max_new_tokens=5)


def test_it_has_nothing_to_train_on(file: Path, tmp_path: Path) -> None:
    assert Rows(file).train() == []
    with pytest.raises(ValueError, match=r"must have rows in both splits to be written. Got none in train"):
        write_rows(Rows(file), tmp_path / "out")
