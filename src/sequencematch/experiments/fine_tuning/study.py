"""The experiments `arithmetic`, `mul`, `primes`: accuracy of MLE, BC and SequenceMatch against noise   (§6.1, App. G.3, G.4).

`translation.py` has a study of the same kind on sentences.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from sequencematch.data.files import write_files
from sequencematch.experiments import networks
from sequencematch.experiments.fine_tuning import report
from sequencematch.experiments.fine_tuning.cells import BUDGETS, KEPT, METHODS, NOISES, Budget, Cell, chosen
from sequencematch.experiments.fine_tuning.questions import Questions, arithmetic
from sequencematch.experiments.fine_tuning.training import run_cells

#: A kind and a rate of noise: none. BC without noise is MLE, but for a row that is never right.
NO_NOISE = ("none", 0.0)


@dataclass(frozen=True)
class Study:
    """Questions, the kinds and rates of noise that are compared on them, and the paper's numbers.

    `ask` makes the questions of `module` from a preset's name, its budget and a file of data, which some need. `score` is the
    measure that the table and the figure show for every way to decode; `columns` are further ones of the table. `also` has
    more pairs of a kind and a rate of noise, in the table alone. `few` has presets with fewer pairs, and with these alone.
    """

    module: str
    noises: tuple[str, ...]
    rates: tuple[float, ...]
    also: tuple[tuple[str, float], ...] = ()
    few: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    paper: Mapping[tuple[str, float], str] = field(default_factory=dict)
    ask: Callable[[str, str, Budget, Path | None], Questions] = arithmetic
    budgets: Mapping[str, Budget] = field(default_factory=lambda: BUDGETS)
    score: report.Column = report.ACCURACY
    columns: tuple[report.Column, ...] = report.DELETIONS

    RESULTS: ClassVar[str] = "results.json"
    FIGURE: ClassVar[str] = "accuracy.png"
    TABLE: ClassVar[str] = "table.md"

    def cells(self, preset: str, budget: Budget) -> list[Cell]:
        """Every model, seed by seed: MLE, SequenceMatch without noise, BC and SequenceMatch with each noise."""
        every = (NO_NOISE, *((noise, rate) for noise in self.noises for rate in self.rates), *self.also)
        kinds = [("mle", *NO_NOISE)]
        for noise in self.few.get(preset, every):
            kinds += [(method, *noise) for method in ("bc", "sequencematch") if (method, noise) != ("bc", NO_NOISE)]
        return [Cell(self.module, *kind, seed) for seed in range(budget.seeds) for kind in kinds]

    def run(self, folder: Path, command: str, *, preset: str = "cpu", jobs: int = 1, model: str | None = None) -> None:
        """Fine-tune and measure the models of a preset, `jobs` at a time, and collect what they found.

        `model` replaces the preset's base model.
        """
        budget = chosen(self.budgets, preset, model)
        self.fine_tune(self.ask(self.module, preset, budget, None), preset, budget, folder, command, jobs)

    def fine_tune(
        self, questions: Questions, preset: str, budget: Budget, folder: Path, command: str, jobs: int
    ) -> None:
        """Train and measure every model that has no result yet, and collect the results."""
        run_cells(self.cells(preset, budget), questions, budget, folder, jobs)
        write_files(folder, {self.RESULTS: networks.collected(folder, command, order)})

    def draw(self, folder: Path) -> None:
        """The figure and the table, from the results alone."""
        found = report.results(json.loads((folder / self.RESULTS).read_text())["cells"])
        write_files(folder, {self.TABLE: report.table(found, self.paper, self.score, self.columns)})
        report.draw_against_noise(found, self.noises, folder / self.FIGURE, self.score)


def order(result: Mapping[str, Any]) -> list[Any]:
    """Sorts results: MLE first, then by noise, rate, method and seed."""
    cell = result["cell"]
    places = [list(NOISES).index(cell["noise"]), cell["rate"], list(METHODS).index(cell["method"]), cell["seed"]]
    return [cell["method"] != "mle", *places]


def against_noise(**rows: tuple[str, str]) -> Mapping[tuple[str, float], str]:
    """The paper's numbers at noise 0.02 and 0.2; those of MLE, which has no noise, are equal."""
    found = {(method, rate): text for method, row in rows.items() for rate, text in zip((0.02, 0.2), row, strict=True)}
    return MappingProxyType(found | {("mle", 0.0): rows["mle"][0]})


SUMS = Study(
    "add_or_sub_in_base",
    ("digits", "uniform"),
    (0.02, 0.05, 0.1, 0.2, 0.3),
    also=(("own", 0.1),),
    few=MappingProxyType(
        {
            "cpu": (NO_NOISE, *((noise, rate) for noise in ("digits", "uniform") for rate in (0.1, 0.3)), ("own", 0.1)),
            "small": (NO_NOISE, KEPT, ("uniform", 0.1), ("own", 0.1)),
            "large": (KEPT,),
        }
    ),
)
#: Without SequenceMatch without noise, which the paper's tables of products and prime factors don't have.
_AS_IN_THE_PAPER = MappingProxyType({"small": (("digits", 0.02), ("digits", 0.2))})
MUL = Study(
    "mul",
    ("digits",),
    (0.02, 0.2),
    few=_AS_IN_THE_PAPER,
    paper=against_noise(mle=("49 ± 4", "49 ± 4"), bc=("51 ± 2", "50 ± 3"), sequencematch=("53 ± 3", "56 ± 4")),
)
PRIMES = Study(
    "list_prime_factors",
    ("digits",),
    (0.02, 0.2),
    few=_AS_IN_THE_PAPER,
    paper=against_noise(mle=("4 ± 3", "4 ± 3"), bc=("7 ± 2", "6 ± 3"), sequencematch=("6 ± 4", "8 ± 4")),
)
