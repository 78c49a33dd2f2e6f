"""The networks of the study: their size, how they are trained, on which puzzles."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sequencematch.experiments.networks import START, Budget, Method
from sequencematch.tasks.sudoku import Sudoku

GPU = Budget(layers=6, width=256, steps=5000, tuning_steps=1500, batch_size=128, test_rows=1000)
CPU = Budget(layers=2, width=64, steps=60, tuning_steps=30, batch_size=32, test_rows=40)
BUDGETS: Mapping[str, Budget] = MappingProxyType({"gpu": GPU, "cpu": CPU})

_MLE = MappingProxyType({"objective": "mle"})
#: Digits that look legal.
_LEGAL = MappingProxyType({"noise_rate": 0.15, "noise_source": "tokens"})
_BURSTS: Mapping[str, Any] = MappingProxyType({**_LEGAL, "noise_burst": 4})

#: Ways to train, by name.
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        START: Method(_MLE, from_scratch=True),
        "mle": Method(_MLE),
        "mle, traces": Method(_MLE, rows="traces", from_scratch=True),
        "bc": Method({"objective": "bc", **_LEGAL}),
        "bc, bursts": Method({"objective": "bc", **_BURSTS}),
        "bc, corrected": Method({"objective": "bc", **_BURSTS, "correction_rate": 0.5}),
        "sequencematch α 0.5 γ 0.99": Method({"objective": "sequencematch", "alpha": 0.5, "gamma": 0.99, **_BURSTS}),
    }
)
#: The longest search that is written out to train on, in tokens; and the longest sequence in which a network may write one.
LONGEST_TRACE, TRACE_CONTEXT = 256, 320
#: A puzzle is drawn for so many training rows, which are made from it by symmetries.
ROWS_PER_PUZZLE = 250
#: Puzzles on which a threshold is tuned. They are neither in the test nor in training.
TUNED = 100


@dataclass(frozen=True)
class Cell:
    """One network: how it is trained, with which seed, on puzzles with how many empty cells."""

    method: str
    seed: int
    holes: int = 20

    @property
    def file(self) -> str:
        """The name of its result."""
        words = self.method.replace("α ", "a").replace("γ ", "g").replace(",", "").replace(" ", "_")
        return f"h{self.holes}_{words}_{self.seed}.json"

    @property
    def start(self) -> "Cell | None":
        """The network that this one starts from; None for random weights."""
        return None if METHODS[self.method].from_scratch else replace(self, method=START)

    def task(self, rows: int, test_rows: int) -> Sudoku:
        """Its puzzles: of the test, to tune on, and to make `rows` training rows from."""
        puzzles = max(50, rows // ROWS_PER_PUZZLE)
        return Sudoku(holes=self.holes, puzzles=puzzles, train_size=puzzles, test_size=test_rows + TUNED)
