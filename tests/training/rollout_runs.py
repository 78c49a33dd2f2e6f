"""Short runs to compare, whose rollouts are made inline or by workers, and faults to put into them.

python -m tests.training.rollout_runs FOLDER trains with a worker process and with checkpoints, and writes the worker's number
to a file.
"""

import os
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from sequencematch.policy import Policy
from sequencematch.training import SequenceMatchTrainer
from sequencematch.training.replay import Experience
from sequencematch.training.rollouts.asynchronous import AsynchronousRollouts
from sequencematch.training.rollouts.pool import Pool
from tests.training import tiny_run

#: Twelve steps, of which the first three clone. A batch of 8 rollouts lasts four steps.
SETTINGS: dict[str, Any] = {
    "max_steps": 12,
    "replay_reuse": 2,
    "bc_steps": 2,
    "bc_anneal_steps": 3,
    "noise_rate": 0.3,
}
#: LoRA on all layers, in bfloat16 under autocast: adapters are merged for rollouts, and the trained row of <eos> takes part.
LORA: dict[str, Any] = {"bf16": True}


@dataclass(frozen=True)
class Outcome:
    """All that a run leaves behind, to the last bit."""

    losses: list[float]
    weights: dict[str, Tensor]
    rollouts: list[Experience]

    def equals(self, other: "Outcome") -> bool:
        """Whether another run left the same."""
        return (
            self.losses == other.losses
            and self.rollouts == other.rollouts
            and self.weights.keys() == other.weights.keys()
            and all(torch.equal(self.weights[name], other.weights[name]) for name in self.weights)
        )


class At(TrainerCallback):
    """Calls a function after the given steps, with the pool of workers."""

    def __init__(self, trainer: SequenceMatchTrainer, faults: dict[int, Callable[[Pool], None]]) -> None:
        self.trainer, self.faults = trainer, faults

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        fault = self.faults.get(state.global_step)
        if fault is not None:
            fault(pool_of(self.trainer))


def pool_of(trainer: SequenceMatchTrainer) -> Pool:
    """The pool of a run whose rollouts workers make."""
    source = trainer.on_policy.source
    assert isinstance(source, AsynchronousRollouts)
    assert source.pool is not None
    return source.pool


def make(folder: Path, *, lora: bool = False, policy: Policy | None = None, **changes: Any) -> SequenceMatchTrainer:
    """A trainer that begins with the same weights every time, unless it is given a policy."""
    from peft import LoraConfig

    torch.manual_seed(0)
    return SequenceMatchTrainer(
        model=policy or tiny_run.policy(),
        args=tiny_run.config(folder, **(SETTINGS | (LORA if lora else {}) | changes)),
        train_dataset=tiny_run.rows(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )


def outcome(trainer: SequenceMatchTrainer) -> Outcome:
    """What a trained trainer leaves behind."""
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    weights = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
    return Outcome(losses, weights, trainer.on_policy.buffer.rollouts)


def run(
    folder: Path, faults: dict[int, Callable[[Pool], None]] | None = None, *, lora: bool = False, **changes: Any
) -> tuple[Outcome, SequenceMatchTrainer]:
    """Train on one thread, perhaps with faults after some steps."""
    torch.set_num_threads(1)
    trainer = make(folder, lora=lora, **changes)
    trainer.add_callback(At(trainer, faults or {}))
    trainer.train()
    return outcome(trainer), trainer


def process_of(pool: Pool, spared: Collection[int] = ()) -> int:
    """The process of a worker that is not to be spared; waits until one has started."""
    while not set(pool.alive) - set(spared):
        pool.tend(0.1)
    return next(process for process in pool.alive if process not in spared)


def signal_one(number: int, hit: set[int]) -> Callable[[Pool], None]:
    """A fault: a worker gets this signal, one that was not hit before."""

    def send(pool: Pool) -> None:
        process = process_of(pool, hit)
        hit.add(process)
        os.kill(process, number)

    return send


def total(trainer: SequenceMatchTrainer, name: str) -> float:
    """The sum of a logged count."""
    return sum(line.get(name, 0.0) for line in trainer.state.log_history)


def is_running(process: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(is_so: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it becomes so within a minute, which is long even on a busy machine."""
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.05)
    return is_so()


if __name__ == "__main__":

    def write(pool: Pool) -> None:
        (Path(sys.argv[1]) / "worker").write_text(str(process_of(pool)))

    run(Path(sys.argv[1]), {1: write}, rollouts="process", save_strategy="steps", save_steps=1, max_steps=10_000)
