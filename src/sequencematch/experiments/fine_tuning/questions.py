"""The questions of a study: the rows to train and to test on, and how answers are measured."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sequencematch.experiments.fine_tuning.cells import Budget, task
from sequencematch.extras import require
from sequencematch.tasks import Task
from sequencematch.tasks.task import Row


@dataclass(frozen=True)
class Questions:
    """A task, the metrics of its answers, and the context: tokens pushed by the longest row, noise included.

    `rollout_rows` makes the rows that rollouts start from, if these are not those to train on.
    """

    task: Task
    metrics: tuple[str, ...] = ("accuracy", "own_errors", "backspace_rate")
    max_length: int = 128
    rollout_rows: Callable[[], list[Row]] | None = None


def arithmetic(module: str, preset: str, budget: Budget, data: Path | None = None) -> Questions:  # noqa: ARG001
    """The questions of a module of DeepMind's generator   (App. E)."""
    require("mathematics_dataset", "arithmetic", "Drawing the questions")
    return Questions(task(module, preset, budget))
