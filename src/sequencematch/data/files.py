"""Atomic writes: files and folders are written under a temporary name, then renamed. A reader never sees half of one."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path


def write_files(folder: str | Path, texts: Mapping[str, str]) -> None:
    """Write text files, name → text, into a folder, created if missing. All are written before the first is renamed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as scratch:
        for name, text in texts.items():
            Path(scratch, name).write_text(text, "utf-8")
        for name in texts:
            Path(scratch, name).replace(folder / name)


def write_folder(folder: Path, write: Callable[[Path], None], marker: str | None) -> None:
    """Let `write` fill a folder beside the target, then swap the two.

    An existing folder is replaced only if it is empty or holds the file `marker`, a sign that this function wrote it. Without
    a `marker` it is always replaced.
    """
    folder = folder.absolute()
    if marker and folder.exists() and not (folder / marker).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"`folder` must be new, empty, or hold {marker} from an earlier save. Got {folder}, which has none."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        write(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
