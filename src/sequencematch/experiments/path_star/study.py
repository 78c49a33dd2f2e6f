"""The experiment `sequencematch reproduce path_star`: who finds the way, by which training and which decoding?

docs/results/search.md is its page.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sequencematch.data.files import write_files
from sequencematch.data.spelling import check_choice
from sequencematch.experiments import networks
from sequencematch.experiments.path_star import report
from sequencematch.experiments.path_star.cells import BUDGETS, METHODS, Cell
from sequencematch.experiments.path_star.measures import judge
from sequencematch.experiments.path_star.training import run_cells

RESULTS, FIGURE = "results.json", "path_star.png"
#: Whose p(`<bkspc>`) judges samples of next-token prediction.
JUDGE = "bc, corrected"
#: Seed 4 is left out: its start had not learnt to follow edges after 2,000 steps (loss 1.25), so no method could go on from it.
SEEDS = (0, 1, 2, 3, 5)
#: Peers that are trained on other rows, fewer seeds of which say enough.
_PEERS = ("mle, reversed", "mle, traces", "mle, teacherless")
_BEST = "bc, bursts to the goal, corrected"
_CLONING = ("bc", "bc, bursts", "bc, bursts to the goal", "bc, corrected", _BEST)
#: Settings of Eq. 4 in the study; the exact table has the same.
_EQUATION_4 = tuple(
    f"sequencematch α {alpha} γ {gamma}" for alpha, gamma in ((0.5, 0.99), (0.5, 0.998), (0.5, 0.9), (0.1, 0.99))
)
_BURSTS, _MORE = (f"{_EQUATION_4[0]}, {words}" for words in ("bursts to the goal", "more on policy"))


def study(preset: str) -> list[Cell]:
    """The networks of a preset: five seeds of every method, fewer of peers and of some on other stars, the slowest first."""
    check_choice("--preset", preset, BUDGETS)
    if preset == "cpu":
        return [Cell(method, 0, arms=2, length=2) for method in ("mle", "bc", "bc, corrected")]
    few, two = SEEDS[:3], SEEDS[:2]
    others = ("mle", "bc, corrected", _EQUATION_4[0])
    return [
        *(Cell(_BEST, seed, 5, 5) for seed in SEEDS),
        *(Cell(method, seed) for seed in SEEDS for method in (*_EQUATION_4, _BURSTS, *_CLONING, "mle")),
        *(Cell(_MORE, seed) for seed in few),
        *(Cell(method, seed) for seed in two for method in _PEERS),
        *(Cell(method, seed, 5, 5) for seed in few for method in others),
        # The star of the exact table.
        *(Cell(method, seed, 3, 2) for seed in few for method in ("bc", _EQUATION_4[0], _MORE)),
        *(Cell(method, seed, 2, 6) for seed in two for method in (_BEST, *others)),
    ]


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
    """Write `results.json` from the finished cells."""
    methods = list(METHODS)

    def order(result: Mapping[str, Any]) -> list[int]:
        cell = result["cell"]
        return [cell["arms"], cell["length"], methods.index(cell["method"]), cell["seed"]]

    write_files(folder, {RESULTS: networks.collected(folder, command, order)})


def draw(folder: Path) -> None:
    """The figure, from `results.json` alone: of the shape of graphs with the most networks."""
    cells = json.loads((folder / RESULTS).read_text())["cells"]
    shape = Counter((cell["cell"]["arms"], cell["cell"]["length"]) for cell in cells).most_common(1)[0][0]
    report.draw(report.ways(cells), *shape, folder / FIGURE)
