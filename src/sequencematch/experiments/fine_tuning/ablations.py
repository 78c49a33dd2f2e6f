"""The experiment `ablations`: SequenceMatch on sums with one part changed at a time, and cloning with other noise."""

import json
from pathlib import Path

from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.experiments.fine_tuning import variants_report as report
from sequencematch.experiments.fine_tuning.cells import BUDGETS, chosen
from sequencematch.experiments.fine_tuning.questions import arithmetic
from sequencematch.experiments.fine_tuning.variants import (
    MODULE,
    Trial,
    Variant,
    distinct,
    fresh_prompts,
    run_trials,
)

RESULTS, FIGURE, TABLE = "results.json", "ablations.png", "table.md"
_D_OF_DATA = {"model_value_from": "data"}
#: Each has the settings that `selection` chose for its method, but for its own.
VARIANTS = (
    Variant("MLE", "mle"),
    Variant("BC", "bc"),
    Variant("BC, bursts of up to 3", "bc", {"noise_burst": 3}),
    Variant("BC, own mistakes corrected", "bc", {"correction_rate": 0.5}),
    Variant("SequenceMatch", "sequencematch"),
    Variant("D of the rollouts", "sequencematch", {"model_value_from": "rollouts"}),
    Variant("D of the data", "sequencematch", _D_OF_DATA),
    Variant("no on-policy term", "sequencematch", {"mixture_weight": 1.0, **_D_OF_DATA}),
    Variant("rollouts used once", "sequencematch", {"replay_reuse": 1.0}),
    Variant("rollouts from fresh prompts", "sequencematch", _D_OF_DATA, fresh_prompts),
    Variant("no cloning at the end", "sequencematch", {"bc_weight_final": 0.0}),
    Variant("offset head at rest", "sequencematch", {"offset_lr_multiplier": 1e-6}),
    Variant("offset head × 100", "sequencematch", {"offset_lr_multiplier": 100.0}),
    Variant("α 0.01", "sequencematch", {"alpha": 0.01}),
    Variant("α 0.1", "sequencematch", {"alpha": 0.1}),
    Variant("α 0.5", "sequencematch", {"alpha": 0.5}),
    Variant("γ 0.9", "sequencematch", {"gamma": 0.9}),
    Variant("γ 0.998", "sequencematch", {"gamma": 0.998}),
)
#: Presets with fewer seeds than their other studies have.
_AT_MOST = {"gpu": 2}


def run(folder: Path, command: str, *, preset: str = "cpu", jobs: int = 1, model: str | None = None) -> None:
    """Run every variant, but for repetitions, on a preset's budget and test questions, `jobs` at a time."""
    budget = chosen(BUDGETS, preset, model)
    questions = arithmetic(MODULE, preset, budget)
    seeds = range(min(budget.seeds, _AT_MOST.get(preset, budget.seeds)))
    trials = [Trial(variant, seed) for seed in seeds for variant in distinct(VARIANTS, budget)]
    found = run_trials(trials, questions, budget, folder, jobs)
    write_files(folder, {RESULTS: json_text({"command": command, "models": found})})


def draw(folder: Path) -> None:
    """The figure and the table, from the results alone."""
    found = json.loads((folder / RESULTS).read_text())["models"]
    write_files(folder, {TABLE: report.table(found)})
    report.draw(found, folder / FIGURE)
