"""Atomic writes: files and folders are written under a temporary name, flushed to disk, then renamed.

A reader never sees half of one, wherever the writer is killed.
"""

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

#: Inside a folder: files that are written whole and still have to be moved up into it.
SAVING = ".saving"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_files(folder: str | Path, texts: Mapping[str, str]) -> None:
    """Write text files, name → text, into a folder, created if missing. All are written before the first is renamed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as scratch:
        for name, text in texts.items():
            Path(scratch, name).write_text(text, "utf-8")
        flush_below(Path(scratch))
        for name in texts:
            Path(scratch, name).replace(folder / name)
    flush(folder)


def write_folder(folder: Path, write: Callable[[Path], None], marker: str | None) -> None:
    """Let `write` fill a folder beside the target, then swap the two.

    An existing folder is replaced only if it is empty or holds the file `marker`, a sign that this function wrote it. Without
    a `marker` it is always replaced.
    """
    folder = folder.absolute()
    settle(folder)
    if marker and folder.exists() and not (folder / marker).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"`folder` must be new, empty, or hold {marker} from an earlier save. Got {folder}, which has none."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        write(new)
        replace_folder(new, folder)


def write_beside(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a scratch folder, then move its files into `folder`, whose other files stay.

    The scratch folder is renamed to `SAVING` once it is whole. If the move is interrupted after that, `settle` finishes it.
    """
    settle(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        write(new)
        flush_below(new)
        new.rename(folder / SAVING)
        flush(folder)
    settle(folder)


def settle(folder: Path) -> None:
    """Put right what a killed writer left: a folder moved aside gets its name back, files of `SAVING` are moved up.

    Two processes may do so at once: both make the same moves.
    """
    if not folder.exists() and _aside(folder).is_dir():
        _aside(folder).rename(folder)
    saving = folder / SAVING
    if saving.is_dir():
        for path in sorted(saving.rglob("*")):
            target = folder / path.relative_to(saving)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                with suppress(FileNotFoundError):  # another process moved it
                    path.replace(target)
        flush_below(folder, files=False)
        shutil.rmtree(saving, ignore_errors=True)


def replace_folder(new: Path, folder: Path) -> None:
    """Flush a folder to disk and rename it, replacing an older one of that name.

    Linux exchanges the two names in one step. Where the system or the file system can't, the older folder is moved aside
    first, and `settle` moves it back if the process is killed in between.
    """
    flush_below(new)
    aside = _aside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if not folder.exists():
        new.rename(folder)
    elif _exchange(new, folder):
        aside = new
    else:
        folder.rename(aside)
        new.rename(folder)
    flush(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def flush_below(folder: Path, *, files: bool = True) -> None:
    """Flush a folder with everything below it, or its folders alone, to disk; files before the folders that name them."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if files or path.is_dir():
            flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk (`fsync`)."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):  # Windows can't open a folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where that is not possible."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
