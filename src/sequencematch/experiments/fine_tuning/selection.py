"""The experiment `selection`: the settings that each method is compared with, chosen before any test question is asked.

Every method has six runs on sums, with digits as noise at a rate of 0.1. The questions, to train on and to choose by, are drawn
with another seed than those of the comparisons.
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
RATES = (5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 8e-4)
#: α and γ, those of the paper's text first; and the learning rate of the offset head over that of the others.
OBJECTIVES = (
    {"alpha": 0.01, "gamma": 0.998},
    {"alpha": 0.1, "gamma": 0.99},
    {"alpha": 0.1, "gamma": 0.99, "offset_lr_multiplier": 100.0},
)
#: Method → the settings that it tries.
TRIED: Mapping[str, Sequence[Mapping[str, float]]] = {
    "mle": [{"learning_rate": rate} for rate in RATES],
    "bc": [{"learning_rate": rate} for rate in RATES],
    "sequencematch": [{"learning_rate": rate, **own} for rate, own in itertools.product((1e-4, 3e-4), OBJECTIVES)],
}
#: Ways to decode whose mean accuracy decides.
DECIDE = ("temperature 1", "greedy")
_SHORT = {"learning_rate": "rate", "alpha": "α", "gamma": "γ", "offset_lr_multiplier": "offset head ×"}


def variants() -> list[Variant]:
    """Every method with everything that it tries."""
    return [Variant(_name(method, settings), method, settings) for method, tried in TRIED.items() for settings in tried]


def _name(method: str, settings: Mapping[str, float]) -> str:
    return ", ".join([METHODS[method], *(f"{_SHORT[name]} {value:g}" for name, value in settings.items())])


def run(folder: Path, command: str, *, preset: str = "cpu", jobs: int = 1, model: str | None = None) -> None:
    """Run every variant on a preset's budget, `jobs` at a time, and choose the best settings of each method."""
    budget = replace(chosen(BUDGETS, preset, model), own={}, seeds=1)
    questions = arithmetic(MODULE, preset, budget)
    assert isinstance(questions.task, Arithmetic)
    questions = replace(questions, task=replace(questions.task, seed=QUESTIONS))
    found = run_trials([Trial(variant, 0) for variant in variants()], questions, budget, folder, jobs)
    record = {"command": command, "chosen": best(found), "models": found}
    write_files(folder, {RESULTS: json_text(record)})


def score(result: Mapping[str, Any]) -> float:
    """The mean accuracy of the ways to decode that decide."""
    measures = (measure for way in DECIDE for measure in result["decodings"][way])
    return mean(float(measure["value"]) for measure in measures if measure["name"] == "accuracy")


def best(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Method → its settings with the highest score; of equals the first."""
    scores = {result["variant"]: score(result) for result in found}
    top = {method: max((v for v in variants() if v.method == method), key=lambda v: scores[v.name]) for method in TRIED}
    return {method: dict(variant.settings) for method, variant in top.items()}


def draw(folder: Path) -> None:
    """The figure and the table, from the results alone."""
    found = json.loads((folder / RESULTS).read_text())["models"]
    write_files(folder, {TABLE: report.table(found)})
    report.draw(found, folder / FIGURE)
