"""Networks that only note what was there before them. A module of its own: a process that runs them imports little else."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """A network that starts from another one, or fails."""

    name: str
    start: "Cell | None" = None


def note(cell: Cell, folder: Path) -> None:
    """Write what was there before; stands for training."""
    if cell.name == "broken":
        raise OSError("the disk is full")
    (folder / cell.name).write_text(" ".join(sorted(path.name for path in folder.iterdir())))
