"""The experiments that `sequencematch reproduce` runs. Each is a module, imported when it runs."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast, runtime_checkable

#: Name → what it shows, in one line.
EXPERIMENTS: Mapping[str, str] = MappingProxyType(
    {
        "exact_search": "Path-star graphs as a table, solved exactly: who leaves a dead end? A minute.",
        "path_star": "Networks on path-star graphs beside their peers. --preset gpu: hours on a GPU; cpu: only a trial.",
        "sudoku": "Networks on Sudoku 6 x 6 beside their peers. --preset gpu: half an hour on a GPU; cpu: only a trial.",
    }
)
#: The module of an experiment in `sequencematch.experiments`, where it has another name.
MODULES: Mapping[str, str] = MappingProxyType({"path_star": "path_star.study", "sudoku": "sudoku.study"})


@runtime_checkable
class Experiment(Protocol):
    """What the module of an experiment defines."""

    #: The files that `run` and `draw` write.
    RESULTS: str
    FIGURE: str

    def run(self, folder: Path, command: str, **options: Any) -> None:
        """Compute, and write RESULTS into a folder; `command` is recorded in it. Some take `preset` and `jobs`."""

    def draw(self, folder: Path) -> None:
        """Write FIGURE from RESULTS, computing nothing."""


def find(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        raise ValueError(f"`NAME` must be one of: {', '.join(EXPERIMENTS)}. Got {name!r}.")
    return cast(Experiment, importlib.import_module(f"sequencematch.experiments.{MODULES.get(name, name)}"))
