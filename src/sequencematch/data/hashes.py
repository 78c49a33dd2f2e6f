"""SHA-256 of every file of a folder: listed when the folder is written, compared when it is read."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

#: The list that an export brings along, in the format of `sha256sum --check`.
SUMS = "SHA256SUMS"
Fingerprint = dict[str, int | str]


def fingerprint(path: Path) -> Fingerprint:
    """A file's size and SHA-256. The file is streamed, so it may be larger than the memory."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def fingerprints(folder: Path, *, without: Collection[str] = ()) -> dict[str, Fingerprint]:
    """Every file below a folder by its relative name, except those `without`."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return _all({name: path for name, path in paths.items() if name not in without})


def check_files(folder: Path, listed: Mapping[str, Any], remedy: str) -> None:
    """Refuse a folder with a missing, truncated or changed file. Lists of older versions may lack a hash or all but the size."""
    expected = {name: {"bytes": entry} if isinstance(entry, int) else entry for name, entry in listed.items()}
    for name, entry in expected.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{folder} is damaged: {name} is missing. {remedy}".strip())
        size = path.stat().st_size
        if entry.get("bytes", size) != size:
            raise ValueError(
                f"{folder} is damaged: {name} should have {entry['bytes']} bytes and has {size}. {remedy}".strip()
            )
    hashed = {name: entry["sha256"] for name, entry in expected.items() if "sha256" in entry}
    for name, found in _all({name: folder / name for name in hashed}).items():
        if found["sha256"] != hashed[name]:
            raise ValueError(
                f"{folder} is damaged: {name} does not have the content that was written. {remedy}".strip()
            )


def is_listing(value: Any) -> bool:
    """Whether a value, read from JSON, lists files: name → size, or name → size and perhaps SHA-256."""
    if not isinstance(value, dict):
        return False
    entries = [{"bytes": entry} if _is_size(entry) else entry for entry in value.values()]
    return all(
        isinstance(entry, dict)
        and entry.keys() in ({"bytes"}, {"bytes", "sha256"})
        and _is_size(entry["bytes"])
        and isinstance(entry.get("sha256", ""), str)
        for entry in entries
    )


def write_sums(folder: Path, *, without: Collection[str]) -> None:
    """List every file below a folder in `SHA256SUMS`."""
    found = fingerprints(folder, without=without)
    (folder / SUMS).write_text("".join(f"{entry['sha256']}  {name}\n" for name, entry in found.items()))


def check_sums(folder: Path) -> None:
    """Refuse a folder that differs from its `SHA256SUMS`, if it has one."""
    if (folder / SUMS).is_file():
        lines = [line.partition("  ") for line in (folder / SUMS).read_text().splitlines()]
        remedy = f"Copy it again; if you changed the file yourself, remove {SUMS}."
        check_files(folder, {name: {"sha256": digest} for digest, _, name in lines}, remedy)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _all(paths: Mapping[str, Path]) -> dict[str, Fingerprint]:
    """Several files at a time: hashing lets other threads run."""
    with ThreadPoolExecutor() as pool:
        found: Iterable[Fingerprint] = pool.map(fingerprint, paths.values())
        return dict(zip(paths, found, strict=True))
