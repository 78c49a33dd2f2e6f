"""The experiments `arithmetic`, `mul`, `primes`: accuracy of MLE, BC and SequenceMatch against noise   (§6.1, App. G.3, G.4)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from sequencematch.data.files import write_files
from sequencematch.data.spelling import check_choice
from sequencematch.experiments import networks
from sequencematch.experiments.fine_tuning import report
from sequencematch.experiments.fine_tuning.cells import BUDGETS, METHODS, NOISES, Budget, Cell
from sequencematch.experiments.fine_tuning.training import run_cells
from sequencematch.extras import require


@dataclass(frozen=True)
class Study:
    """A module of questions, the kinds and rates of noise that are compared on it, and the paper's numbers.

    `also` has more pairs of a kind and a rate, in the table alone.
    """

    module: str
    noises: tuple[str, ...]
    rates: tuple[float, ...]
    also: tuple[tuple[str, float], ...] = ()
    paper: Mapping[tuple[str, float], str] = field(default_factory=dict)

    RESULTS: ClassVar[str] = "results.json"
    FIGURE: ClassVar[str] = "accuracy.png"
    TABLE: ClassVar[str] = "table.md"

    def cells(self, budget: Budget) -> list[Cell]:
        """Every model, seed by seed: MLE, SequenceMatch without noise, BC and SequenceMatch with each noise."""
        noises = [*((noise, rate) for noise in self.noises for rate in self.rates), *self.also]
        kinds = [("mle", "none", 0.0), ("sequencematch", "none", 0.0)]
        kinds += [(method, *noise) for noise in noises for method in ("bc", "sequencematch")]
        return [Cell(self.module, *kind, seed) for seed in range(budget.seeds) for kind in kinds]

    def run(self, folder: Path, command: str, *, preset: str = "cpu", jobs: int = 1) -> None:
        """Fine-tune and measure the models of a preset, `jobs` at a time, and collect what they found."""
        check_choice("--preset", preset, BUDGETS)
        require("mathematics_dataset", "arithmetic", "Drawing the questions")
        budget = BUDGETS[preset]
        run_cells(self.cells(budget), preset, budget, folder, jobs)
        write_files(folder, {self.RESULTS: networks.collected(folder, command, order)})

    def draw(self, folder: Path) -> None:
        """The figure and the table, from the results alone."""
        found = report.results(json.loads((folder / self.RESULTS).read_text())["cells"])
        write_files(folder, {self.TABLE: report.table(found, self.paper)})
        report.draw_against_noise(found, self.noises, folder / self.FIGURE)


def order(result: Mapping[str, Any]) -> list[Any]:
    """Sorts results: MLE first, then by noise, rate, method and seed."""
    cell = result["cell"]
    places = [list(NOISES).index(cell["noise"]), cell["rate"], list(METHODS).index(cell["method"]), cell["seed"]]
    return [cell["method"] != "mle", *places]


def _paper(**rows: tuple[str, str]) -> Mapping[tuple[str, float], str]:
    """The paper's numbers at noise 0.02 and 0.2; those of MLE, which has no noise, are equal."""
    found = {(method, rate): text for method, row in rows.items() for rate, text in zip((0.02, 0.2), row, strict=True)}
    return MappingProxyType(found | {("mle", 0.0): rows["mle"][0]})


SUMS = Study("add_or_sub_in_base", ("digits", "uniform"), (0.02, 0.05, 0.1, 0.2, 0.3), also=(("own", 0.1),))
MUL = Study(
    "mul",
    ("digits",),
    (0.02, 0.2),
    paper=_paper(mle=("49 ± 4", "49 ± 4"), bc=("51 ± 2", "50 ± 3"), sequencematch=("53 ± 3", "56 ± 4")),
)
PRIMES = Study(
    "list_prime_factors",
    ("digits",),
    (0.02, 0.2),
    paper=_paper(mle=("4 ± 3", "4 ± 3"), bc=("7 ± 2", "6 ± 3"), sequencematch=("6 ± 4", "8 ± 4")),
)
