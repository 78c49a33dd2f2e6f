"""Rows come from files of four kinds, or from the hub."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from sequencematch.data.rows import read_rows


def read(path: Path) -> Any:
    return read_rows("dataset", str(path), None, "train")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", '{"text": "é"}\n\n  \n{"text": "b"}', [{"text": "é"}, {"text": "b"}]),
        ("a.json", '[{"prompt": "a", "completion": "b"}]', [{"prompt": "a", "completion": "b"}]),
        ("a.csv", 'prompt,completion\n"a, b",c\nd,"e\nf"\n', [("a, b", "c"), ("d", "e\nf")]),
        ("a.txt", "one\n\n two \n", [{"text": "one"}, {"text": " two "}]),
    ],
)
def test_a_file_is_read_by_its_ending(tmp_path: Path, name: str, text: str, expected: list[Any]) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    pairs = [
        dict(zip(("prompt", "completion"), row, strict=True)) if isinstance(row, tuple) else row for row in expected
    ]
    assert read(tmp_path / name) == pairs


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
        ("a.txt", "é".encode("latin-1"), "`dataset` must be text. Got {path}: 'utf-8' codec can't decode"),
        ("a.parquet", b"", "`dataset` must be a .jsonl, .json, .csv or .txt file. Got {path}."),
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


def test_what_is_no_file_needs_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"Got 'someone/something', which is no file; .* pip install datasets\."):
        read_rows("dataset", "someone/something", None, "train")


def test_the_hub_is_asked_for_the_configuration_and_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows = [{"text": "a"}]

    def load_dataset(*names: Any, **options: Any) -> Any:
        asked.append((names, options))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert read_rows("dataset", "someone/something", "en", "train[:10]") is rows
    assert asked == [(("someone/something", "en"), {"split": "train[:10]"})]


@pytest.mark.parametrize(
    "error", [FileNotFoundError("Dataset 'x' doesn't exist\non the Hub"), ValueError("Unknown split")]
)
def test_what_the_hub_says_is_passed_on_in_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"`eval_dataset` must be .* Got 'x': ") as raised:
        read_rows("eval_dataset", "x", None, "test")
    assert str(raised.value).endswith(str(error).splitlines()[0])
