"""Rows come from files of five kinds, or from the hub; prompts from text or JSON lines."""

import gzip
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from sequencematch.data.rows import read_prompts, read_rows


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` keeps what it read."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def read(path: Path) -> Any:
    return read_rows("dataset", str(path))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", '{"text": "é"}\n\n  \n{"text": "b"}', [{"text": "é"}, {"text": "b"}]),
        ("a.json", '[{"prompt": "a", "completion": "b"}]', [{"prompt": "a", "completion": "b"}]),
        (
            "a.csv",
            'prompt,completion\r\n"a, b",c\nd,"e\r\nf"\n',
            [{"prompt": "a, b", "completion": "c"}, {"prompt": "d", "completion": "e\nf"}],
        ),
        ("a.txt", "one\n\n two \r\nth\u2028ree\n", [{"text": "one"}, {"text": " two "}, {"text": "th\u2028ree"}]),
    ],
)
def test_a_file_is_read_by_its_ending_packed_or_not(
    tmp_path: Path, name: str, text: str, expected: list[dict[str, str]]
) -> None:
    (tmp_path / name).write_bytes(text.encode())
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    assert read(tmp_path / name) == expected == read(tmp_path / f"{name}.gz")


def test_a_parquet_file_is_read(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "é", "completion": "c"}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    assert list(read(tmp_path / "a.parquet")) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": }',
            "`dataset` must be JSON lines. Got {path}: line 3, column 10: Expecting",
        ),
        ("a.json", b'{"text": "a"}', "`dataset` must be a list in JSON. Got {path}: it holds one dict."),
        ("a.json", b"[1", "`dataset` must be a list in JSON. Got {path}: Expecting ',' delimiter"),
        ("a.csv", b'a\n"' + b"x" * 200_000, "`dataset` must be CSV. Got {path}: field larger than field limit"),
        ("a.txt", "é".encode("latin-1"), "`dataset` must be text in UTF-8. Got {path}: 'utf-8' codec can't decode"),
        ("a.txt", b" \n", "`dataset` must not be an empty or blank file. Got {path}."),
        ("a.csv.gz", b"a,b\n", "`dataset` must be a file that can be read. Got {path}: Not a gzipped file"),
        (
            "a.parquet",
            b"nonsense",
            "`dataset` must be a .jsonl, .json, .csv, .parquet or .txt file, or a dataset on the hub. Got '{path}': Parquet magic",
        ),
        ("a.arrow", b"", "or .txt file, or a dataset on the hub. Got '{path}', another kind of file."),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read(tmp_path / name)
    assert message.format(path=tmp_path / name) in str(error.value)


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Got .*nowhere.jsonl: No such file or directory\."):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match=r"Got '.*nowhere.parquet': Unable to find "):
        read(tmp_path / "nowhere.parquet")


def test_parquet_and_the_hub_need_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    remedy = r"needs the package datasets: pip install 'sequencematch\[datasets\]'\.$"
    with pytest.raises(ValueError, match=rf"^`dataset`='someone/something', which is not a file, {remedy}"):
        read_rows("dataset", "someone/something")
    with pytest.raises(ValueError, match=rf"^`dataset`='a\.parquet', which is Parquet, {remedy}"):
        read_rows("dataset", "a.parquet")


def test_the_hub_is_asked_for_the_configuration_and_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows = [{"text": "a"}]

    def load_dataset(*names: Any, **options: Any) -> Any:
        asked.append((names, options))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_rows("dataset", "someone/something", "en", "train[:10]") is rows
    assert asked == [(("someone/something", "en"), {"split": "train[:10]"})]


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("Dataset 'x' doesn't exist\non the Hub"),
        ValueError("Unknown split"),
        datasets.exceptions.DatasetGenerationError("An error occurred"),
    ],
)
def test_what_the_hub_says_is_passed_on_in_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"`eval_dataset` must be .* Got 'x': ") as raised:
        read_rows("eval_dataset", "x", None, "test")
    assert str(raised.value).endswith(str(error).splitlines()[0])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "cat\n\n a dog \r\n  \n"),
        ("prompts", "cat\n a dog "),
        ("a.jsonl", '{"prompt": "cat", "id": 1}\n\n{"prompt": " a dog "}\n'),
    ],
)
def test_prompts_are_lines_of_text_or_a_field_of_json_lines(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert read_prompts("--prompts-file", tmp_path / name) == ["cat", " a dog "]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, "`--prompts-file` must be a file that can be read. Got {path}: No such file or directory."),
        ("a.txt", b"\n \n", "`--prompts-file` must not be an empty or blank file. Got {path}."),
        ("a.txt", b"caf\xe9\n", "`--prompts-file` must be text in UTF-8. Got {path}: 'utf-8' codec can't decode"),
        (
            "a.jsonl",
            b'{"prompt": "cat"}\n\n{"prompt": \n',
            "`--prompts-file` must be JSON lines. Got {path}: line 3, column 12: Expecting value.",
        ),
        (
            "a.jsonl",
            b'["cat"]\n',
            '"prompt" that is text, like {{"prompt": "2 + 2 ="}}. {path}, line 1 holds something else.',
        ),
        ("a.jsonl", b'{"prompt": "cat"}\n{"text": "cat"}\n', "{path}, line 2 holds something else."),
        ("a.jsonl", b'\n{"prompt": 3}\n', "{path}, line 2 holds something else."),
    ],
)
def test_prompts_that_can_not_be_read_are_named_with_their_line(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read_prompts("--prompts-file", tmp_path / name)
    assert message.format(path=tmp_path / name) in str(error.value)
