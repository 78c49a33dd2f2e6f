"""Variants of the methods on sums: settings other than the preset's. `selection` and `ablations` are made of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from sequencematch.experiments import networks
from sequencematch.experiments.fine_tuning.cells import KEPT, Budget, Cell
from sequencematch.experiments.fine_tuning.questions import Questions
from sequencematch.experiments.fine_tuning.training import run_cell
from sequencematch.tasks import Arithmetic
from sequencematch.tasks.task import Row

MODULE = "add_or_sub_in_base"


@dataclass(frozen=True)
class Variant:
    """A method whose `settings` take the place of the preset's.

    `prompts` makes the prompts of rollouts from the task; without it, rollouts start from the training questions.
    """

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prompts: Callable[[Arithmetic], list[Row]] | None = None

    def within(self, budget: Budget) -> Budget:
        """The budget with its settings in place of the preset's; without those of other methods."""
        return replace(budget, own={self.method: {**budget.own.get(self.method, {}), **self.settings}})


@dataclass(frozen=True)
class Trial:
    """A variant with a seed: one model."""

    variant: Variant
    seed: int
    start: ClassVar[None] = None  # every model starts from the base model

    @property
    def cell(self) -> Cell:
        """Its method, with noise where the method has any."""
        noise, rate = ("none", 0.0) if self.variant.method == "mle" else KEPT
        return Cell(MODULE, self.variant.method, noise, rate, self.seed)

    def within(self, folder: Path) -> Path:
        """A folder of its variant, since models of the same method and seed have files of the same name."""
        words = "".join(letter if letter.isalnum() or letter == "." else " " for letter in self.variant.name).split()
        return folder / "_".join(words)

    def file(self, folder: Path) -> Path:
        """Its result."""
        return self.within(folder) / "cells" / self.cell.file


def fresh_prompts(task: Arithmetic) -> list[Row]:
    """Questions without answers, as many as there are to train on, and neither among these nor in the test."""
    size = len(task.train())
    return [{"prompt": row["prompt"]} for row in replace(task, train_size=2 * size).train()[size:]]


def distinct(variants: Iterable[Variant], budget: Budget) -> list[Variant]:
    """Variants without those that would repeat an earlier one, because the preset has their settings already."""
    kept: list[Variant] = []
    known: list[Any] = []
    for variant in variants:
        settings = Trial(variant, 0).cell.settings(variant.within(budget)), variant.prompts
        if settings not in known:
            known.append(settings)
            kept.append(variant)
    return kept


def run_trial(trial: Trial, questions: Questions, budget: Budget, folder: Path) -> None:
    """Fine-tune and measure a model, unless its result is there."""
    variant = trial.variant
    if variant.prompts is not None:
        assert isinstance(questions.task, Arithmetic)
        questions = replace(questions, rollout_rows=partial(variant.prompts, questions.task))
    run_cell(trial.cell, questions, variant.within(budget), trial.within(folder))


def run_trials(
    trials: Sequence[Trial], questions: Questions, budget: Budget, folder: Path, jobs: int
) -> list[dict[str, Any]]:
    """Every trial, `jobs` at a time; returns their results with the names of their variants."""
    networks.side_by_side(partial(run_trial, questions=questions, budget=budget, folder=folder), trials, jobs)
    return [{"variant": trial.variant.name, **networks.without_curves(trial.file(folder))} for trial in trials]
