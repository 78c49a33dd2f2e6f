"""How steadily a network trains: the gradient norms of all steps, and runs that stopped at a number that is not finite."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sequencematch.experiments import networks
from sequencematch.training import SequenceMatchTrainer
from sequencematch.training.callbacks import NonFiniteError


class WatchedTrainer(SequenceMatchTrainer):
    """A trainer that keeps the gradient norm of every step, before clipping; log lines have those of a few."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As its parent."""
        super().__init__(*arguments, **options)
        self._norms: list[Any] = []

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self._norms.append(super()._get_grad_norm(model, grad_norm=grad_norm))
        return self._norms[-1]

    @property
    def gradient_norms(self) -> list[float]:
        """One for each step. They stay on a GPU until they are asked for."""
        return [float(norm) for norm in self._norms]


def run_or_stop(cell: Any, run: Callable[..., dict[str, Any]], budget: Any, folder: Path) -> dict[str, Any]:
    """The result of `run(cell, budget=budget, folder=folder)`. If the run stops at a non-finite number, that is its result."""
    try:
        return run(cell, budget=budget, folder=folder)
    except NonFiniteError as error:
        stopped = {"stopped": str(error)}
        return networks.once(folder / "cells" / cell.file, cell, budget, lambda: stopped)
