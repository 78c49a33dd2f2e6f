"""Rows of a dataset, prompts and plain text, from files or from the hub. Errors name the setting, the file and the line."""

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sequencematch.data.packaged import find_packaged
from sequencematch.extras import require

#: File extensions that hold rows; all except Parquet's may be followed by `.gz`.
ENDINGS = (".jsonl", ".json", ".csv", ".parquet", ".txt")
#: The name of standard input.
STDIN = "-"
_NOT_TEXT = {".arrow", ".csv", ".json", ".parquet", ".tsv"}


class FileRows(list[Any]):
    """The rows of a file, which know the file and, of JSON lines, their lines."""

    def __init__(self, rows: Iterable[Any], path: Path, lines: Sequence[int] = ()) -> None:
        """`lines` are the numbers of the rows' lines, from 1."""
        super().__init__(rows)
        self.path, self.lines = path, lines

    def place(self, index: int) -> str:
        """Where a row is, for an error."""
        return f"{self.path}, line {self.lines[index]}" if self.lines else str(self.path)


def read_rows(name: str, source: str, config: str | None = None, split: str = "train") -> Any:
    """The rows of a file, or of a dataset on the hub; `name` is the setting that holds `source`.

    `datasets` reads Parquet and the hub. Other files are read here, because `datasets` would lose the number of a bad line, and
    so that JSON lines, JSON, CSV and text need no further package.
    """
    path, kind = find_packaged(source), ending(source)
    if kind == ".jsonl":
        numbered = read_json_lines(name, path)
        return FileRows((row for _, row in numbered), path, [line for line, _ in numbered])
    if kind in _PARSERS:
        return FileRows(_parse(name, path, *_PARSERS[kind]), path)
    expected = (
        f"`{name}` must be a {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]} file, or a dataset on the hub. Got {source!r}"
    )
    if path.is_file() and kind != ".parquet":
        raise ValueError(f"{expected}, another kind of file.")
    require(
        "datasets", "datasets", f"`{name}`={source!r}, which is {'Parquet' if kind == '.parquet' else 'not a file'},"
    )
    import datasets

    try:
        if kind == ".parquet":
            return datasets.load_dataset("parquet", data_files=source, split="train")
        return datasets.load_dataset(source, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{expected}: {next(iter(str(error).splitlines()), '')}") from error


def read_prompts(name: str, path: str | Path) -> list[str]:
    """The prompts of a file: the field `prompt` of JSON lines, or one per line of text. Blank lines are left out.

    `-` is standard input, which is text.
    """
    if ending(path) != ".jsonl":
        return [row["text"] for row in _parse(name, Path(path), *_PARSERS[".txt"])]
    rows = read_json_lines(name, path)
    for number, row in rows:
        if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str):
            raise ValueError(
                f'`{name}` must hold one JSON object per line with a "prompt" that is text, like {{"prompt": "2 + 2 ="}}. '
                f"{path}, line {number} holds something else."
            )
    return [row["prompt"] for _, row in rows]


def read_text(name: str, path: str | Path) -> str:
    """The text of a file that holds nothing else; `name` is the setting that names the file."""
    if ending(path) in _NOT_TEXT:
        raise ValueError(f"`{name}` must be text, or JSON lines in a file that ends in .jsonl. Got {path}.")
    return _content(name, Path(path))


def read_lines(name: str, path: str | Path) -> list[str]:
    """The lines of a text file, empty ones too, without spaces around. Only a newline ends a line."""
    return [line.strip() for line in read_text(name, path).removesuffix("\n").split("\n")]


def read_json_lines(name: str, path: str | Path) -> list[tuple[int, Any]]:
    """The rows of a file of JSON lines, each with the number of its line; blank lines are left out."""
    return _parse(name, Path(path), "JSON lines", _numbered)


def text_in(row: Any, option: str, field: str, place: str) -> str:
    """The text in a field of a row; `option` is the setting that names the field, and `place` is where the row is."""
    if not isinstance(row, Mapping) or field not in row:
        got = f"the fields {', '.join(map(repr, row))}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise ValueError(f"`{option}` must be a field of every row, {field!r} here. Got {got} in {place}.")
    if not isinstance(row[field], str):
        raise ValueError(f"`{option}` must be a field that holds text. Got {type(row[field]).__name__} in {place}.")
    return str(row[field])


def ending(path: str | Path) -> str:
    """A file's extension without `.gz`: the kind of the file."""
    return Path(Path(path).name.removesuffix(".gz")).suffix


def _content(name: str, path: Path) -> str:
    """A file's text, unpacked where its name ends in `.gz`."""
    try:
        content = sys.stdin.buffer.read() if str(path) == STDIN else path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"`{name}` must be text in UTF-8. Got {path}: {error}.") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"`{name}` must be a file that can be read. Got {path}: {reason}.") from error
    if not text.strip():
        raise ValueError(f"`{name}` must not be an empty or blank file. Got {path}.")
    return text


def _parse(name: str, path: Path, kind: str, parse: Callable[[str], Iterable[Any]]) -> list[Any]:
    text = _content(name, path)
    try:
        return list(parse(text))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"`{name}` must be {kind}. Got {path}: {error}.") from error


def _numbered(text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
                raise ValueError(f"line {number}: {error}") from error


def _json(text: str) -> list[Any]:
    try:
        rows = json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(rows, list):
        raise ValueError(f"it holds one {type(rows).__name__}")
    return rows


#: File extension → name of the format, and a parser from text to rows.
_PARSERS: Mapping[str, tuple[str, Callable[[str], Iterable[Any]]]] = {
    ".jsonl": ("JSON lines", lambda text: (row for _, row in _numbered(text))),
    ".json": ("a list in JSON", _json),
    ".csv": ("CSV", lambda text: csv.DictReader(io.StringIO(text, newline=None))),
    ".txt": ("text", lambda text: ({"text": line.rstrip("\r")} for line in text.split("\n") if line.strip())),
}
