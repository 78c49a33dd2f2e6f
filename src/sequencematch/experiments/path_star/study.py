"""The experiment `sequencematch reproduce path_star`: who finds the way, by which training and which decoding?

docs/results/search.md is its page.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

from sequencematch.data.files import write_files
from sequencematch.data.spelling import check_choice
from sequencematch.experiments.path_star import report
from sequencematch.experiments.path_star.cells import BUDGETS, METHODS, Cell
from sequencematch.experiments.path_star.measures import judge
from sequencematch.experiments.path_star.training import run_cells

RESULTS, FIGURE = "results.json", "path_star.png"
#: Whose p(`<bkspc>`) judges samples of next-token prediction.
JUDGE = "bc, corrected"
#: Peers that are trained on other rows, fewer seeds of which say enough.
_PEERS = ("mle, reversed", "mle, traces", "mle, teacherless")


def study(preset: str) -> list[Cell]:
    """The networks of a preset: five seeds of every method, three of the peers, and larger stars for the best recipes."""
    check_choice("--preset", preset, BUDGETS)
    if preset == "cpu":
        return [Cell(method, 0, arms=2, length=2) for method in ("mle", "bc", "bc, corrected")]
    cells = [Cell(method, seed) for seed in range(5) for method in METHODS if seed < 3 or method not in _PEERS]
    larger = [(2, 6), (5, 4), (5, 5)]
    methods = ("mle", "bc, corrected", "bc, bursts, corrected", "sequencematch α 0.5 γ 0.99")
    return cells + [Cell(method, seed, *shape) for shape in larger for seed in range(5) for method in methods]


def run(folder: Path, command: str, *, preset: str = "cpu", jobs: int = 1) -> None:
    """Train and measure the networks of a preset, `jobs` at a time, and collect what they found."""
    cells, budget = study(preset), BUDGETS[preset]
    run_cells(cells, budget, folder, jobs)
    for cell in cells:
        by = replace(cell, method=JUDGE)
        if cell.method == "mle" and by in cells:
            judge(cell, by, budget, folder)
    collect(folder, command)


def collect(folder: Path, command: str) -> None:
    """Write `results.json` from the finished cells, without their learning curves."""
    found = [json.loads(path.read_text()) for path in (folder / "cells").glob("*.json")]
    order = list(METHODS)
    found.sort(
        key=lambda r: [
            *(r["cell"][name] for name in ("arms", "length")),
            order.index(r["cell"]["method"]),
            r["cell"]["seed"],
        ]
    )
    short = [{name: value for name, value in cell.items() if name != "log"} for cell in found]
    for cell, whole in zip(short, found, strict=True):
        losses = [entry["loss"] for entry in whole["log"] if "loss" in entry]
        cell["final_loss"] = losses[-1] if losses else None
    text = json.dumps({"command": command, "cells": short}, indent=1, ensure_ascii=False) + "\n"
    write_files(folder, {RESULTS: text})


def draw(folder: Path) -> None:
    """The figure, from `results.json` alone: of the shape of graphs with the most networks."""
    cells = json.loads((folder / RESULTS).read_text())["cells"]
    shape = Counter((cell["cell"]["arms"], cell["cell"]["length"]) for cell in cells).most_common(1)[0][0]
    report.draw(report.ways(cells), *shape, folder / FIGURE)
