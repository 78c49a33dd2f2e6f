"""The experiment `selection`: the settings that each method is compared with, chosen before any test question is asked.

Every method has six runs on sums, with digits as noise at a rate of 0.1; SequenceMatch has them twice, with D of Eq. 4 taken from
rollouts, as the paper prints it, and from the data. The questions, to train on and to choose by, are drawn with another seed than
those of the comparisons.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.experiments.fine_tuning import variants_report as report
from sequencematch.experiments.fine_tuning.cells import BUDGETS, METHODS, chosen
from sequencematch.experiments.fine_tuning.questions import arithmetic
from sequencematch.experiments.fine_tuning.variants import MODULE, Trial, Variant, run_trials
from sequencematch.tasks import Arithmetic

RESULTS, FIGURE, TABLE = "results.json", "selection.png", "table.md"
#: The task's seed of the questions to choose by.
QUESTIONS = 1
#: Learning rates, in multiples of the preset's; those of SequenceMatch, which has more to choose, come second.
RATES = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
FEW_RATES = (1.0, 3.0)
#: α and γ, those of the paper's text first; and the learning rate of the offset head over that of the others.
OBJECTIVES = (
    {"alpha": 0.01, "gamma": 0.998},
    {"alpha": 0.1, "gamma": 0.99},
    {"alpha": 0.1, "gamma": 0.99, "offset_lr_multiplier": 100.0},
)
#: Where D of Eq. 4 is taken: as the paper prints it, which is the studies' own, and as the library does.
VALUES: Sequence[Mapping[str, str]] = ({}, {"model_value_from": "data"})
#: Ways to decode whose mean accuracy decides.
DECIDE = ("temperature 1", "greedy")
_SHORT = {
    "learning_rate": "rate",
    "alpha": "α",
    "gamma": "γ",
    "offset_lr_multiplier": "offset head ×",
    "model_value_from": "D of the",
}
#: Settings of the trainer.
Settings = Mapping[str, float | str]


def tried(learning_rate: float) -> Mapping[str, Sequence[Settings]]:
    """Method → the settings that it tries, where the preset has this learning rate."""
    many, few = ([{"learning_rate": float(f"{learning_rate * x:g}")} for x in rates] for rates in (RATES, FEW_RATES))
    both: list[Settings] = [{**rate, **own, **value} for value, rate, own in itertools.product(VALUES, few, OBJECTIVES)]
    return {"mle": many, "bc": many, "sequencematch": both}


def variants(learning_rate: float) -> list[Variant]:
    """Every method with everything that it tries."""
    return [
        Variant(_name(method, settings), method, settings)
        for method, own in tried(learning_rate).items()
        for settings in own
    ]


def _name(method: str, settings: Settings) -> str:
    shown = ([_SHORT[name], f"{value:g}" if isinstance(value, float) else value] for name, value in settings.items())
    return ", ".join([METHODS[method], *map(" ".join, shown)])


def run(folder: Path, command: str, *, preset: str = "cpu", jobs: int = 1, model: str | None = None) -> None:
    """Run every variant on a preset's budget, `jobs` at a time, and choose the best settings of each method."""
    budget = replace(chosen(BUDGETS, preset, model), own={}, seeds=1)
    questions = arithmetic(MODULE, preset, budget)
    assert isinstance(questions.task, Arithmetic)
    questions = replace(questions, task=replace(questions.task, seed=QUESTIONS))
    trials = [Trial(variant, 0) for variant in variants(budget.learning_rate)]
    found = run_trials(trials, questions, budget, folder, jobs)
    record = {"command": command, "chosen": best(found, budget.learning_rate), "models": found}
    write_files(folder, {RESULTS: json_text(record)})


def score(result: Mapping[str, Any]) -> float:
    """The mean accuracy of the ways to decode that decide."""
    measures = (measure for way in DECIDE for measure in result["decodings"][way])
    return mean(float(measure["value"]) for measure in measures if measure["name"] == "accuracy")


def best(found: Sequence[Mapping[str, Any]], learning_rate: float) -> dict[str, dict[str, float | str]]:
    """Method → its settings with the highest score of those that were run; of equals the first."""
    scores = {result["variant"]: score(result) for result in found}

    def best_of(method: str, own: Sequence[Settings]) -> Settings:
        return max(own, key=lambda settings: scores.get(_name(method, settings), -1.0))

    return {method: dict(best_of(method, own)) for method, own in tried(learning_rate).items()}


def draw(folder: Path) -> None:
    """The figure and the table, from the results alone."""
    found = json.loads((folder / RESULTS).read_text())["models"]
    write_files(folder, {TABLE: report.table(found)})
    report.draw(found, folder / FIGURE)
