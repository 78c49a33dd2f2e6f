"""The experiments that `sequencematch reproduce` runs. Each is a module, or a value in one, imported when it runs."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast, runtime_checkable

#: Name → what it shows, in one line.
EXPERIMENTS: Mapping[str, str] = MappingProxyType(
    {
        "chain": "The paper's motivating chain: divergences as errors compound, and what they say about deleting. A second.",
        "exact_search": "Path-star graphs as a table, solved exactly: who leaves a dead end? A minute.",
        "path_star": "Networks on path-star graphs beside their peers. --preset gpu: half an hour on a GPU; cpu: a trial.",
        "sudoku": "Networks on Sudoku 6 x 6 beside their peers. --preset gpu: an hour on a GPU; cpu: only a trial.",
        "arithmetic": "Sums in other bases: accuracy of MLE, BC and SequenceMatch against noise (§6.1).",
        "selection": "The settings of each method, chosen on questions that are in no test: six runs or more.",
        "ablations": "SequenceMatch on sums with one part changed at a time. Not in the paper.",
        "mul": "The same as arithmetic, for products (App. G.3).",
        "primes": "The same for prime factors (App. G.4).",
        "translation": "BLEU of the same methods on English and French pairs: --data pairs.jsonl (App. G.2).",
        "divergences": "Eq. 4 with every divergence, on sums and on path-star graphs: accuracy and stability (App. G.1).",
        "mistakes": "Wrong digits are given: who deletes them and answers right? (§6.1)",
        "thinking": "Accuracy against test-time computation: deleting more or less, search, best of n. Not in the paper.",
        "overhead": "Time of a step and of sampling beside MLE (App. F). --preset cpu, gpu, gpu_7b or paper.",
        "text": "Text that models continue: MAUVE, entropy, diversity and perplexity of five methods (§6.2).",
    }
)
#: Where an experiment is in `sequencematch.experiments`, if not in the module of its name: a module, or a value in one.
MODULES: Mapping[str, str] = MappingProxyType(
    {
        "path_star": "path_star.study",
        "sudoku": "sudoku.study",
        "arithmetic": "fine_tuning.study:SUMS",
        "selection": "fine_tuning.selection",
        "ablations": "fine_tuning.ablations",
        "mul": "fine_tuning.study:MUL",
        "primes": "fine_tuning.study:PRIMES",
        "translation": "fine_tuning.translation:STUDY",
        "mistakes": "fine_tuning.mistakes",
        "thinking": "fine_tuning.thinking",
        "text": "text.study",
    }
)


@runtime_checkable
class Experiment(Protocol):
    """What an experiment defines."""

    #: The files that `run` and `draw` write.
    RESULTS: str
    FIGURE: str

    def run(self, folder: Path, command: str, **options: Any) -> None:
        """Compute, and write RESULTS into a folder; `command` is recorded in it. Some take `preset`, `jobs`, `data`, `model`."""

    def draw(self, folder: Path) -> None:
        """Write FIGURE from RESULTS, computing nothing."""


def find(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        raise ValueError(f"`NAME` must be one of: {', '.join(EXPERIMENTS)}. Got {name!r}.")
    module, _, value = MODULES.get(name, name).partition(":")
    found = importlib.import_module(f"sequencematch.experiments.{module}")
    return cast(Experiment, getattr(found, value) if value else found)
