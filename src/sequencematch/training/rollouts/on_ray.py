"""Workers as actors of a Ray cluster, an existing one or one on this machine. Weights travel through Ray's object store."""

import os
import time
import warnings
from typing import Any

import numpy
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from torch import Tensor

from sequencematch.training.rollouts.pool import Done, Event, Failed, Lost, Ready
from sequencematch.training.rollouts.worker import Made, Order, Setup, Worker

#: Seconds between two calls of an idle actor.
CALL_EVERY_S = 5.0


class Actor:
    """A worker as an actor."""

    def start(self, setup: Setup, frozen: NDArray[numpy.uint8]) -> int:
        """Build the worker. An error in `__init__` would look as if the actor had been killed."""
        self.worker = Worker(setup, _block(frozen))
        return self.process()

    def process(self) -> int:
        """The number of the actor's process."""
        return os.getpid()

    def make(self, order: Order, weights: NDArray[numpy.uint8]) -> Made:
        """Make the rollouts of an order."""
        return self.worker.make(order, _block(weights))


class RayEngine:
    """Starts an actor per worker. Ray puts it where there is room, and an actor without room waits."""

    has_queue = True

    def __init__(self, address: str | None, *, workers: int, cpus: int, gpus: float) -> None:
        """Use a cluster that the program is connected to; else connect to `address`, or start one on this machine."""
        self.address, self.workers, self.cpus, self.gpus = address, workers, cpus, gpus
        self.is_ours = False
        self.actors: dict[int, Any] = {}
        self.answers: dict[Any, int] = {}
        self.heard_of: dict[int, float] = {}  # workers that have started, and when they were last called
        self.staged: Tensor | None = None

    def block(self, size: int) -> Tensor:
        """Memory that is copied when it is published, so one block serves all publications of its size."""
        self._connect()
        if self.staged is None or len(self.staged) != size:
            self.staged = torch.empty(size, dtype=torch.uint8)
        return self.staged

    def publish(self, block: Tensor) -> Any:
        """Copy the block to the object store. It stays there while the reference, or a task's copy of it, lives."""
        return ray.put(block.numpy())

    def begin(self, setup: Setup, frozen: Any) -> None:
        """Put what workers begin with where each finds it."""
        self.setup, self.frozen = ray.put(setup), frozen

    def launch(self, worker: int) -> None:
        """Ask for an actor."""
        kind: Any = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_restarts=0)(Actor)
        self.actors[worker] = kind.remote()
        self.answers[self.actors[worker].start.remote(self.setup, self.frozen)] = worker

    def assign(self, worker: int, order: Order, weights: Any) -> None:
        """Call the actor."""
        self.answers[self.actors[worker].make.remote(order, weights)] = worker
        self.heard_of[worker] = time.monotonic()

    def events(self, timeout_s: float) -> list[Event]:
        """The calls that were answered, or failed. Idle actors are called now and then, so that a dead one is noticed."""
        called = set(self.answers.values())
        for worker, since in self.heard_of.items():
            if worker not in called and time.monotonic() - since > CALL_EVERY_S:
                self.answers[self.actors[worker].process.remote()] = worker
                self.heard_of[worker] = time.monotonic()
        pending = list(self.answers)
        if not pending:
            return []
        ready, _ = ray.wait(pending, num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        return [event for answer in ready for event in self._heard(answer)]

    def _heard(self, answer: Any) -> list[Event]:
        worker = self.answers.pop(answer)
        try:
            result = ray.get(answer, timeout=0.1)
        except GetTimeoutError:  # its machine has it, and is slow or gone
            self.answers[answer] = worker
            return []
        except RayTaskError as error:
            return [Failed(worker, str(error))]
        except RayError as error:
            return [Lost(worker, f"is gone ({str(error).strip().splitlines()[0]})")]
        if isinstance(result, Made):
            return [Done(worker, result)]
        is_new = worker not in self.heard_of
        self.heard_of[worker] = time.monotonic()
        return [Ready(worker, result)] if is_new else []

    def kill(self, worker: int) -> None:
        """Kill an actor, also one that hangs."""
        ray.kill(self.actors.pop(worker))
        self.heard_of.pop(worker, None)
        self.answers = {answer: of for answer, of in self.answers.items() if of != worker}

    def stop(self) -> None:
        """Kill all actors, and stop the cluster if it is ours."""
        for worker in list(self.actors):
            self.kill(worker)
        self.setup = self.frozen = self.staged = None
        if self.is_ours:
            ray.shutdown()
            self.is_ours = False

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.address is None:
            gpus = {"num_gpus": torch.cuda.device_count()} if self.gpus else {}
            options |= {"num_cpus": self.workers * self.cpus, "include_dashboard": False, **gpus}
        ray.init(address="local" if self.address is None else self.address, **options)
        self.is_ours = True


def _block(array: NDArray[numpy.uint8]) -> Tensor:
    """Memory of the object store as a tensor, which nobody writes to: it is read-only."""
    with warnings.catch_warnings(action="ignore"):
        return torch.from_numpy(array)
