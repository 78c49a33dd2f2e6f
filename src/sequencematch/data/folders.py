"""Folders that results go to, checked before the work begins."""

import tempfile
from pathlib import Path


def check_folder(name: str, folder: str | Path) -> None:
    """Refuse a folder that can't be written to; `name` is the setting that holds it. Nothing is left behind.

    A temporary folder is made and removed where the folder is, or where it would be made: permission bits alone say nothing
    of read-only file systems, and nothing to root.
    """
    folder = Path(folder).absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        inside = "" if there == folder else f"{folder}, inside "
        raise ValueError(f"`{name}` must be a folder. Got {inside}{there}, which is a file.")
    try:
        with tempfile.TemporaryDirectory(prefix=".sequencematch-", dir=there):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"`{name}` must be a folder that can be written to. Got {folder}: {there}: {reason}."
        ) from error
