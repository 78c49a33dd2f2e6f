"""The experiment `sequencematch reproduce sudoku`: who fills in 6 × 6 cells, at what cost?

docs/results/search.md is its page.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.data.spelling import check_choice
from sequencematch.experiments import networks
from sequencematch.experiments.sudoku import report
from sequencematch.experiments.sudoku.cells import BUDGETS, METHODS, Cell
from sequencematch.experiments.sudoku.measures import judging
from sequencematch.experiments.sudoku.training import finished, load, run_cells

RESULTS, FIGURE, TABLE = "results.json", "sudoku.png", "table.md"
#: Whose p(`<bkspc>`) judges samples of next-token prediction.
JUDGE = "bc, corrected"
SEEDS = 3


def study(preset: str, seeds: int = SEEDS) -> list[Cell]:
    """The networks of a preset: every method, seed by seed, the slowest first. On a CPU one seed, and six empty cells."""
    check_choice("--preset", preset, BUDGETS)
    shapes = [(seed, 20) for seed in range(seeds)] if preset == "gpu" else [(0, 6)]
    methods = [method for method in reversed(list(METHODS)) if method != networks.START]
    return [Cell(method, seed, holes) for seed, holes in shapes for method in methods]


def run(folder: Path, command: str, *, preset: str = "cpu", jobs: int = 1) -> None:
    """Train and measure the networks of a preset, `jobs` at a time, and collect what they found."""
    cells, budget = study(preset), BUDGETS[preset]
    run_cells(cells, budget, folder, jobs)
    for cell in cells:
        if cell.method == "mle":
            judge(cell, replace(cell, method=JUDGE), budget, folder)
    collect(folder, command)


def collect(folder: Path, command: str) -> None:
    """Write `results.json` from the finished cells."""
    write_files(folder, {RESULTS: networks.collected(folder, command, _order)})


def judge(cell: Cell, by: Cell, budget: networks.Budget, folder: Path) -> None:
    """Samples of a network without `<bkspc>`, judged by another; both are finished. Written beside theirs, and not run again."""
    path = folder / "cells" / f"judged_{cell.file}"
    if path.exists():
        return
    found = judging(finished(cell, folder), finished(by, folder), load(cell, budget, folder)[1].test)
    record = {"cell": asdict(cell), "judge": asdict(by), "budget": asdict(budget), "ways": found}
    write_files(path.parent, {path.name: json_text(record)})


def _order(result: Mapping[str, Any]) -> list[int]:
    cell = result["cell"]
    return [cell["holes"], list(METHODS).index(cell["method"]), "judge" in result, cell["seed"]]


def draw(folder: Path) -> None:
    """The figure and the table, from `results.json` alone."""
    cells = json.loads((folder / RESULTS).read_text())["cells"]
    write_files(folder, {TABLE: report.table(report.ways(cells))})
    report.draw(report.ways(cells), folder / FIGURE)
