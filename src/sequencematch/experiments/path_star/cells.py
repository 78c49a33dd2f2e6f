"""The networks of the study: their size, how they are trained, on which graphs."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sequencematch.tasks.path_star import PathStar


@dataclass(frozen=True)
class Budget:
    """The size of a network, how long it is trained, and on how many graphs it is tested. The same for all cells."""

    layers: int = 4
    width: int = 256
    steps: int = 2000
    batch_size: int = 256
    learning_rate: float = 1e-3
    test_graphs: int = 2000


GPU = Budget()
CPU = Budget(layers=2, width=64, steps=60, batch_size=32, test_graphs=60)
BUDGETS: Mapping[str, Budget] = MappingProxyType({"gpu": GPU, "cpu": CPU})


@dataclass(frozen=True)
class Method:
    """A way to train: settings of the trainer, and on which rows. With `noise_ends` half of all bursts of noise end in the goal."""

    settings: Mapping[str, Any]
    rows: str = "paths"
    noise_ends: bool = False

    @property
    def deletes(self) -> bool:
        """Whether the network has `<bkspc>`."""
        return bool(self.settings["objective"] != "mle")


_MLE = MappingProxyType({"objective": "mle"})
_UNIFORM = MappingProxyType({"noise_rate": 0.15})
#: Bursts of up to four nodes of the graph.
_BURSTS = MappingProxyType({"noise_rate": 0.15, "noise_source": "tokens", "noise_burst": 4})


def _sequencematch(alpha: float, gamma: float, noise: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"objective": "sequencematch", "alpha": alpha, "gamma": gamma, **noise, **more}


#: Ways to train, by name.
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "mle": Method(_MLE),
        "mle, reversed": Method(_MLE, rows="reversed"),
        "mle, traces": Method(_MLE, rows="traces"),
        "mle, teacherless": Method(_MLE, rows="teacherless"),
        "bc": Method({"objective": "bc", **_UNIFORM}),
        "bc, bursts": Method({"objective": "bc", **_BURSTS}),
        "bc, bursts to the goal": Method({"objective": "bc", **_BURSTS}, noise_ends=True),
        "bc, corrected": Method({"objective": "bc", **_UNIFORM, "correction_rate": 0.5}),
        "bc, bursts, corrected": Method({"objective": "bc", **_BURSTS, "correction_rate": 0.5}),
        **{
            f"sequencematch α {alpha:g} γ {gamma:g}": Method(_sequencematch(alpha, gamma, _UNIFORM))
            for alpha in (0.1, 0.3, 0.5)
            for gamma in (0.9, 0.99, 0.998)
        },
        "sequencematch α 0.5 γ 0.99, bursts to the goal": Method(_sequencematch(0.5, 0.99, _BURSTS), noise_ends=True),
    }
)
#: The word for going back in written-out walks, and the input of teacherless training.
BACK = "."


@dataclass(frozen=True)
class Cell:
    """One network: how it is trained, on which graphs, with which seed."""

    method: str
    seed: int
    arms: int = 3
    length: int = 4

    @property
    def file(self) -> str:
        """The name of its result."""
        words = self.method.replace("α ", "a").replace("γ ", "g").replace(",", "").replace(" ", "_")
        return f"d{self.arms}_l{self.length}_{words}_{self.seed}.json"

    @property
    def task(self) -> PathStar:
        """Its graphs: 30 node names, or as many as the graph needs."""
        return PathStar(arms=self.arms, length=self.length, names=max(30, self.arms * self.length + 1))
