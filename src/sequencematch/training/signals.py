"""Numbers to log, combined over processes and over the steps between two log lines."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch.core.mdp import Trajectory


@dataclass(frozen=True)
class Signal:
    """One batch's contribution to a logged number: Σx, Σx² and the number of entries; `kind` says how contributions combine.

    A "total" is summed over the batches of a step and averaged over the steps that have it. A "mean" or "std" is taken over all
    entries. A "count" is summed over all steps.
    """

    kind: str
    moments: Float[Tensor, "3"]

    @classmethod
    def total(cls, value: Float[Tensor, ""]) -> "Signal":
        """This batch's share of a sum over the batches and processes of a step."""
        value = value.detach().float()
        return cls("total", torch.stack([value, torch.zeros_like(value), torch.zeros_like(value)]))

    @classmethod
    def mean(cls, values: Float[Tensor, "entry"]) -> "Signal":
        """The mean over entries."""
        return cls("mean", _moments(values))

    @classmethod
    def std(cls, values: Float[Tensor, "entry"]) -> "Signal":
        """The standard deviation over entries."""
        return cls("std", _moments(values))

    @classmethod
    def share(cls, part: int, whole: int) -> "Signal":
        """The share of entries that have a property, of which `part` in `whole` have it."""
        return cls("mean", torch.tensor([part, part, whole], dtype=torch.float))

    @classmethod
    def rate(cls, amount: float, per: float) -> "Signal":
        """An amount over another, such as seconds: the sum of the ones over the sum of the others."""
        return cls("mean", torch.tensor([amount, 0.0, per], dtype=torch.float))

    @classmethod
    def count(cls, number: int) -> "Signal":
        """A number of events."""
        return cls("count", torch.tensor([number, 0.0, 0.0], dtype=torch.float))

    @classmethod
    def setting(cls, value: float) -> "Signal":
        """A number that is the same for all batches of a step."""
        return cls.mean(torch.tensor([float(value)]))

    def empty(self) -> "Signal":
        """The same number without entries: it is logged in all processes, and this one has nothing to add."""
        return Signal(self.kind, 0 * self.moments)


class Signals:
    """All signals since the last log line. They are saved with a checkpoint, so that a resumed run logs the same numbers."""

    def __init__(self) -> None:
        """No signals yet. The caller increments `steps`."""
        self.steps = 0
        self._kind: dict[str, str] = {}
        self._steps: dict[str, set[int]] = {}  # the steps in which each name was added
        self._moments: dict[str, Tensor] = {}

    def add(self, signals: Mapping[str, Signal]) -> None:
        """Add a batch's contributions. They stay on their device, so nothing waits for a GPU."""
        for name, signal in signals.items():
            seen = self._moments.get(name)
            self._kind[name] = signal.kind
            self._steps.setdefault(name, set()).add(self.steps)
            self._moments[name] = signal.moments if seen is None else seen + signal.moments.to(seen.device)

    def flush(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the combined numbers by name and start anew. `reduce` sums a tensor over processes.

        A mean over no entries is left out.
        """
        names, moments = self._reduced(reduce)
        numbers = {
            name: _combine(self._kind[name], *row, steps=len(self._steps[name]))
            for name, row in zip(names, moments, strict=True)
            if self._kind[name] in ("total", "count") or row[2]
        }
        self.steps, self._kind, self._moments, self._steps = 0, {}, {}, {}
        return numbers

    def _reduced(self, reduce: Callable[[Tensor], Tensor]) -> tuple[list[str], list[list[float]]]:
        """Names, in the same order in every process, and their moments summed over processes."""
        names = sorted(self._moments)
        if not names:
            return [], []
        device = max((self._moments[name].device for name in names), key=lambda device: device.type != "cpu")
        return names, reduce(torch.stack([self._moments[name].to(device) for name in names])).tolist()

    def state_dict(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, object]:
        """The state, summed over processes by `reduce`, as values for JSON, which keeps float32 numbers exactly."""
        names, moments = self._reduced(reduce)
        return {
            "steps": self.steps,
            "moments": {
                name: (self._kind[name], row, sorted(self._steps[name]))
                for name, row in zip(names, moments, strict=True)
            },
        }

    def load_state_dict(self, state: Mapping[str, object], device: torch.device | str, share: float) -> None:
        """Load a state of `state_dict`: with `share=1` in one process, and with `share=0` in the others, which add nothing."""
        moments: Mapping[str, tuple[str, list[float], list[int]]] = state["moments"]  # type: ignore[assignment]
        self.steps = int(state["steps"])  # type: ignore[call-overload]
        self._kind = {name: kind for name, (kind, _, _) in moments.items()}
        self._steps = {name: set(steps) for name, (_, _, steps) in moments.items()}
        self._moments = {
            name: share * torch.tensor(numbers, device=device) for name, (_, numbers, _) in moments.items()
        }


def describe(name: str, trajectories: Sequence[Trajectory]) -> dict[str, Signal]:
    """Tokens kept after the prompt, the share of decisions that delete, and the share of trajectories that were cut.

    In rollouts only the policy's own decisions count, not those of a scored prompt.
    """
    bkspc = trajectories[0].space.bkspc
    chosen = [t.policy_chosen if any(t.policy_chosen) else (True,) * len(t) for t in trajectories]
    prompts = [len(t.initial) + own.count(False) for t, own in zip(trajectories, chosen, strict=True)]
    kept = [t.final_size - 1 - prompt for t, prompt in zip(trajectories, prompts, strict=True)]
    deletes = [
        float(action == bkspc)
        for t, own in zip(trajectories, chosen, strict=True)
        for action, counts in zip(t.executed, own, strict=True)
        if counts
    ]
    return {
        f"{name}/mean_length": Signal.mean(torch.tensor(kept, dtype=torch.float)),
        f"{name}/backspace_rate": Signal.mean(torch.tensor(deletes)),
        f"{name}/clipped_ratio": Signal.mean(torch.tensor([float(t.truncated) for t in trajectories])),
    }


def _moments(values: Tensor) -> Float[Tensor, "3"]:
    values = values.detach().float()
    return torch.stack([values.sum(), (values**2).sum(), values.new_tensor(len(values))])


def _combine(kind: str, total: float, squares: float, weight: float, *, steps: int) -> float:
    if kind == "count":
        return total
    if kind == "total":
        return total / steps
    mean = total / weight
    return mean if kind == "mean" else math.sqrt(max(squares / weight - mean**2, 0.0))
