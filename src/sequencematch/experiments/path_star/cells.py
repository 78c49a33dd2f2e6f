"""The networks of the study: their size, how they are trained, on which graphs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sequencematch.core.divergences import DIVERGENCES
from sequencematch.core.integral_metrics import INTEGRAL_METRICS
from sequencematch.experiments.networks import START, Budget, Method
from sequencematch.tasks.path_star import PathStar

GPU = Budget()
CPU = Budget(layers=2, width=64, steps=60, tuning_steps=30, batch_size=32, test_rows=60)
BUDGETS: Mapping[str, Budget] = MappingProxyType({"gpu": GPU, "cpu": CPU})


_MLE = MappingProxyType({"objective": "mle"})
_UNIFORM = MappingProxyType({"noise_rate": 0.15, "noise_source": "uniform"})
#: Bursts of up to four nodes of the graph.
_BURSTS = MappingProxyType({"noise_rate": 0.15, "noise_source": "tokens", "noise_burst": 4})


def _sequencematch(alpha: float, gamma: float, noise: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"objective": "sequencematch", "alpha": alpha, "gamma": gamma, **noise, **more}


#: The on-policy term E with a weight of 0.4 α instead of 0.25 α, and V moved by an offset head with a learning rate of its own.
_MORE_ON_POLICY = MappingProxyType({"mixture_weight": 0.2, "offset_lr_multiplier": 10.0})


def of_divergence(name: str) -> str:
    """The method that trains with this divergence: Eq. 4 with the same α, γ and noise for all   (App. D)."""
    usual = "sequencematch α 0.5 γ 0.99"
    return usual if name == "chi2_mixture" else f"{usual}, {name}"


#: Rows in which half of all bursts of noise end in the goal.
TO_THE_GOAL = "answers, noise to the goal"
#: Ways to train, by name.
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        START: Method(_MLE, from_scratch=True),
        "mle": Method(_MLE),
        "mle, reversed": Method(_MLE, rows="reversed", from_scratch=True),
        "mle, traces": Method(_MLE, rows="traces", from_scratch=True),
        "mle, teacherless": Method(_MLE, rows="teacherless", from_scratch=True),
        "bc": Method({"objective": "bc", **_UNIFORM}),
        "bc, bursts": Method({"objective": "bc", **_BURSTS}),
        "bc, bursts to the goal": Method({"objective": "bc", **_BURSTS}, rows=TO_THE_GOAL),
        "bc, corrected": Method({"objective": "bc", **_UNIFORM, "correction_rate": 0.5}),
        "bc, bursts to the goal, corrected": Method(
            {"objective": "bc", **_BURSTS, "correction_rate": 0.5}, rows=TO_THE_GOAL
        ),
        "bc, bursts, corrected": Method({"objective": "bc", **_BURSTS, "correction_rate": 0.5}),
        **{
            f"sequencematch α {alpha:g} γ {gamma:g}": Method(_sequencematch(alpha, gamma, _UNIFORM))
            for alpha in (0.1, 0.3, 0.5)
            for gamma in (0.9, 0.99, 0.998)
        },
        "sequencematch α 0.5 γ 0.99, more on policy": Method(_sequencematch(0.5, 0.99, _UNIFORM, **_MORE_ON_POLICY)),
        "sequencematch α 0.5 γ 0.99, bursts to the goal": Method(_sequencematch(0.5, 0.99, _BURSTS), rows=TO_THE_GOAL),
        **{
            of_divergence(name): Method(_sequencematch(0.5, 0.99, _UNIFORM, divergence=name))
            for name in (*DIVERGENCES, *INTEGRAL_METRICS)
            if name != "chi2_mixture"
        },
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
    def start(self) -> "Cell | None":
        """The network that this one starts from; None for random weights. Larger stars start from stars of the usual size."""
        if not METHODS[self.method].from_scratch:
            return replace(self, method=START)
        is_larger = self.arms > Cell.arms or self.length > Cell.length
        return Cell(START, self.seed) if self.method == START and is_larger else None

    @property
    def task(self) -> PathStar:
        """Its graphs: 30 node names, or as many as the graph needs."""
        return PathStar(arms=self.arms, length=self.length, names=max(30, self.arms * self.length + 1))
