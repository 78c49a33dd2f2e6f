"""The experiment `divergences`: Eq. 4 with every divergence of the library, on sums and on path-star graphs   (App. G.1, widened).

The paper compares Jensen-Shannon with the χ²-mixture on sums, and prints one number for each. Here every divergence has the same
budget and the settings of the χ²-mixture, as in the paper, beside behavioural cloning, which has none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sequencematch.core.divergences import DIVERGENCES
from sequencematch.core.integral_metrics import INTEGRAL_METRICS
from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.data.spelling import check_choice
from sequencematch.experiments import divergences_report as report
from sequencematch.experiments import networks
from sequencematch.experiments.fine_tuning import cells as sums
from sequencematch.experiments.fine_tuning import training as fine_tuning
from sequencematch.experiments.fine_tuning.questions import arithmetic
from sequencematch.experiments.path_star import cells as stars
from sequencematch.experiments.path_star import training as path_star
from sequencematch.experiments.stability import run_or_stop

RESULTS, FIGURE, TABLE = "results.json", "divergences.png", "table.md"
#: Every divergence, after cloning alone.
NAMES = (report.CLONING, *DIVERGENCES, *INTEGRAL_METRICS)
MODULE, NOISE, RATE = "add_or_sub_in_base", "digits", 0.1
#: Sums are also measured after a wrong digit.
METRICS = ("accuracy", "recovery", "own_errors", "backspace_rate")


@dataclass(frozen=True)
class Preset:
    """How large: the budgets of both tasks, the shape of the graphs, and how many networks a divergence has on them.

    Without `star_seeds` there are sums alone.
    """

    sums: sums.Budget
    stars: networks.Budget
    arms: int
    length: int
    star_seeds: int


#: Presets by name. The paper has no path-star graphs: its preset has those of `gpu`.
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "cpu": Preset(replace(sums.BUDGETS["cpu"], steps=120), stars.CPU, arms=2, length=2, star_seeds=1),
        # No graphs: networks that learn to follow edges take hours of a core.
        "small": Preset(sums.BUDGETS["small"], stars.CPU, arms=2, length=2, star_seeds=0),
        "gpu": Preset(replace(sums.BUDGETS["gpu"], seeds=2), stars.GPU, arms=3, length=4, star_seeds=3),
        "paper": Preset(sums.BUDGETS["paper"], stars.GPU, arms=3, length=4, star_seeds=3),
    }
)


def sum_cell(name: str, seed: int) -> sums.Cell:
    """The fine-tuned model of a divergence."""
    if name == report.CLONING:
        return sums.Cell(MODULE, "bc", NOISE, RATE, seed)
    return sums.Cell(MODULE, "sequencematch", NOISE, RATE, seed, name)


def star_cell(name: str, seed: int, size: Preset) -> stars.Cell:
    """The network of a divergence on path-star graphs."""
    return stars.Cell("bc" if name == report.CLONING else stars.of_divergence(name), seed, size.arms, size.length)


def run(folder: Path, command: str, *, preset: str = "cpu", jobs: int = 1, model: str | None = None) -> None:
    """Train and measure the models of a preset, `jobs` at a time, and collect what they found; `model` is the sums' base model.

    A run that stops at a non-finite number is a result, and the others go on.
    """
    check_choice("--preset", preset, PRESETS)
    size = PRESETS[preset]
    budget = replace(size.sums, model=model or size.sums.model)
    questions = replace(arithmetic(MODULE, preset, budget), metrics=METRICS)
    models: dict[str, list[tuple[str, Any]]] = {
        report.SUMS: [(name, sum_cell(name, seed)) for seed in range(budget.seeds) for name in NAMES],
        report.STARS: [(name, star_cell(name, seed, size)) for seed in range(size.star_seeds) for name in NAMES],
    }
    if models[report.STARS]:  # once, before processes need them
        path_star.load(models[report.STARS][0][1], size.stars, folder / report.STARS)
    train: dict[str, dict[str, Any]] = {
        report.SUMS: {"run": partial(fine_tuning.run_cell, questions=questions), "budget": budget},
        report.STARS: {"run": path_star.run_cell, "budget": size.stars},
    }
    for task, how in train.items():
        run_one = partial(run_or_stop, folder=folder / task, **how)
        networks.side_by_side(run_one, [cell for _, cell in models[task]], jobs)
    found = {
        task: [
            {"divergence": name, **networks.without_curves(folder / task / "cells" / cell.file)} for name, cell in own
        ]
        for task, own in models.items()
    }
    write_files(folder, {RESULTS: json_text({"command": command, **found})})


def draw(folder: Path) -> None:
    """The figure and the table, from the results alone."""
    found = json.loads((folder / RESULTS).read_text())
    runs = [report.as_run(task, result) for task in (report.SUMS, report.STARS) for result in found[task]]
    write_files(folder, {TABLE: report.tables(runs)})
    report.draw(runs, folder / FIGURE)
