"""Rows of a dataset: from a file, or from the hub."""

import csv
import importlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def read_rows(name: str, source: str, config: str | None, split: str) -> Any:
    """The rows of a file, or of a dataset on the hub; `name` is the setting that says which."""
    path = Path(source)
    if path.suffix in READERS or path.is_file():
        return _read_file(name, path)
    expected = f"`{name}` must be a {_ENDINGS} file, or a dataset on the hub. Got {source!r}"
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(f"{expected}, which is no file; to look on the hub, pip install datasets.") from error
    try:
        return datasets.load_dataset(source, config, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(f"{expected}: {next(iter(str(error).splitlines()), '')}") from error


def _read_file(name: str, path: Path) -> list[Any]:
    if path.suffix not in READERS:
        raise ValueError(f"`{name}` must be a {_ENDINGS} file. Got {path}.")
    try:
        return READERS[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"`{name}` must be a file that can be read. Got {path}: {error.strerror}.") from error
    except (ValueError, csv.Error) as error:
        raise ValueError(f"`{name}` must be {_FORMATS[path.suffix]}. Got {path}: {error}.") from error


def _json_lines(text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
    return rows


def _json(text: str) -> list[Any]:
    rows = json.loads(text)
    if not isinstance(rows, list):
        raise ValueError(f"it holds one {type(rows).__name__}")
    return rows


#: The end of a file's name → how to read it.
READERS: Mapping[str, Callable[[str], list[Any]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": lambda text: list(csv.DictReader(io.StringIO(text, newline=""))),
    ".txt": lambda text: [{"text": line} for line in text.splitlines() if line.strip()],
}
_FORMATS = {".jsonl": "JSON lines", ".json": "a list in JSON", ".csv": "CSV", ".txt": "text"}
_ENDINGS = ", ".join(list(READERS)[:-1]) + f" or {list(READERS)[-1]}"
