"""What files hold: text, lines or JSON lines; and which share of it is held out."""

import gzip
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TEST_SHARE = 0.1  # of what is read, where nothing else is given for the test
_NOT_TEXT = {".arrow", ".csv", ".json", ".parquet", ".tsv"}


def read_text(name: str, path: str | Path) -> str:
    """A file's text, unpacked where it ends in `.gz`; `name` is the option that says which file."""
    path = Path(path)
    if _ending(path) in _NOT_TEXT:
        raise ValueError(f"`{name}` must be text, or JSON lines in a file that ends in .jsonl. Got {path}.")
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"`{name}` must be text in UTF-8. Got {path}: {error}.") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"`{name}` must be a file that can be read. Got {path}: {reason}.") from error
    if not text.strip():
        raise ValueError(f"`{name}` must be a file with something in it. Got {path}, which is empty.")
    return text


def read_lines(name: str, path: str | Path) -> list[str]:
    """A file's lines, empty ones too, without spaces around. Only a newline ends one; `splitlines` knows ten others."""
    return [line.strip() for line in read_text(name, path).removesuffix("\n").split("\n")]


def is_json_lines(path: str | Path) -> bool:
    """Whether each line of the file is an object in JSON, by its name."""
    return _ending(Path(path)) == ".jsonl"


def read_records(name: str, path: str | Path, fields: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The text in these fields of every row; `fields` says which option names which field."""
    found = []
    for number, line in enumerate(read_lines(name, path), 1):
        if line:
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"`{name}` must be JSON lines. Got {path}, line {number}: {error.msg}.") from error
            found.append(tuple(text_in(row, *names, f"{path}, line {number}") for names in fields.items()))
    return found


def text_in(row: Any, option: str, field: str, place: str) -> str:
    """The text in a field of a row, without spaces around; `option` names the field, and `place` is where the row is."""
    if not isinstance(row, Mapping) or field not in row:
        got = f"the fields {', '.join(map(repr, row))}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise ValueError(f"`{option}` must be a field of every row, {field!r} here. Got {got} in {place}.")
    if not isinstance(row[field], str):
        raise ValueError(f"`{option}` must be a field that holds text. Got {type(row[field]).__name__} in {place}.")
    return str(row[field]).strip()


def shuffle(items: Sequence[Any], seed: int) -> list[Any]:
    """The items in an order that depends on the seed alone."""
    return random.Random(seed).sample(items, len(items))


def hold_out(items: Sequence[Any], share: float | None, seed: int, remedy: str) -> list[Any]:
    """A random share of the items, one at least, and not all; `remedy` is what to do where there is but one item."""
    if len(items) < 2:
        raise ValueError(f"`test_share` must find two or more to hold some of them out. Got {len(items)}. {remedy}")
    count = round((TEST_SHARE if share is None else share) * len(items))
    return shuffle(items, seed)[: min(max(count, 1), len(items) - 1)]


def check_share(share: float | None, is_given: bool, instead: str) -> None:
    """Refuse a share that is none, or that the option `instead` would have ignored."""
    if share is not None and not 0 < share < 1:
        raise ValueError(f"`test_share` must lie strictly between 0 and 1. Got test_share={share}.")
    if share is not None and is_given:
        raise ValueError(f"`test_share` must be left out where `{instead}` is given. Got test_share={share}.")


def _ending(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix
