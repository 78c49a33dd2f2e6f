"""The questions of a study: the rows to train and to test on, and how answers are measured."""

from dataclasses import dataclass
from pathlib import Path

from sequencematch.experiments.fine_tuning.cells import Budget, task
from sequencematch.extras import require
from sequencematch.tasks import Task


@dataclass(frozen=True)
class Questions:
    """A task, the metrics of its answers, and the context: tokens pushed by the longest row, noise included."""

    task: Task
    metrics: tuple[str, ...] = ("accuracy", "own_errors", "backspace_rate")
    max_length: int = 128


def arithmetic(module: str, preset: str, budget: Budget, data: Path | None = None) -> Questions:  # noqa: ARG001
    """The questions of a module of DeepMind's generator   (App. E)."""
    require("mathematics_dataset", "arithmetic", "Drawing the questions")
    return Questions(task(module, preset, budget))
