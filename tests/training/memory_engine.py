"""An engine whose workers are entries of a dictionary: a test says when each of them answers, fails, dies or hangs."""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.training.replay import Experience, encoded
from sequencematch.training.rollouts.asynchronous import AsynchronousRollouts
from sequencematch.training.rollouts.pool import Done, Event, Failed, Lost, Ready
from sequencematch.training.rollouts.source import Request
from sequencematch.training.rollouts.worker import Made, Order, Setup, Worker

SPACE = ActionSpace(vocab_size=12, eos=10, bos=11)


@dataclass
class Clock:
    """Seconds, which pass when somebody waits for an event that doesn't come."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def order(number: int, first: int = 0, count: int = 2, version: int = 0) -> Order:
    """An order for rollouts of the prompts (11, first), (11, first + 1) and so on."""
    return Order(number, Request([(11, n % 10) for n in range(first, first + count)], first), 0, version)


def rollouts(made: Order) -> list[Experience]:
    """The answer to an order: each rollout writes its prompt's token once more."""
    prompts = made.request.prompts
    return [Experience(Trajectory.rollout(SPACE, p, (p[-1], SPACE.eos)), made.version) for p in prompts]


class MemoryEngine:
    """Workers start at once if `room` allows; `answers` lets them answer at once, too."""

    def __init__(self, clock: Clock, *, room: int = 99, answers: bool = False, has_queue: bool = False) -> None:
        self.clock, self.room, self.answers, self.has_queue = clock, room, answers, has_queue
        self.launched: list[int] = []
        self.started: list[int] = []
        self.killed: list[int] = []
        self.working: dict[int, Order] = {}
        self.totals: dict[int, int] = {}
        self.pending: list[Event] = []
        self.stopped = False

    def block(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def publish(self, block: Tensor) -> Any:
        return block

    def begin(self, setup: Setup, frozen: Any) -> None:
        self.setup, self.frozen = setup, frozen

    def launch(self, worker: int) -> None:
        self.launched.append(worker)

    def assign(self, worker: int, order: Order, weights: Any) -> None:  # noqa: ARG002
        assert worker not in self.working, "one order at a time"
        self.working[worker] = order
        if self.answers:
            self.answer(worker)

    def events(self, timeout_s: float) -> list[Event]:
        for worker in self.launched:
            alive = [w for w in self.started if w not in self.killed]
            if worker not in self.started and worker not in self.killed and len(alive) < self.room:
                self.started.append(worker)
                self.pending.append(Ready(worker, 1000 + worker))
        found, self.pending = self.pending, []
        self.clock.now += 0 if found else timeout_s
        return found

    def kill(self, worker: int) -> None:
        self.killed.append(worker)
        self.working.pop(worker, None)

    def stop(self) -> None:
        self.stopped = True

    def answer(self, worker: int) -> Order:
        """A worker answers its order."""
        done = self.working.pop(worker)
        self.say(worker, done)
        return done

    def say(self, worker: int, done: Order) -> None:
        """An answer comes from a worker, whether it has that order or not."""
        made = rollouts(done)
        self.totals[worker] = self.totals.get(worker, 0) + len(made)
        self.pending.append(Done(worker, Made(done.number, save(encoded(made)), len(made), self.totals[worker])))

    def die(self, worker: int) -> None:
        self.pending.append(Lost(worker, "was ended by signal 9"))

    def fail(self, worker: int, error: str = "Traceback …\nRuntimeError: out of memory") -> None:
        self.pending.append(Failed(worker, error))


class OwnEngine(MemoryEngine):
    """Workers that make real rollouts, in this process, at once."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.workers: dict[int, Worker] = {}

    def publish(self, block: Tensor) -> Tensor:
        return block.clone()

    def events(self, timeout_s: float) -> list[Event]:
        found = super().events(timeout_s)
        for worker in self.started:
            if worker not in self.workers:
                self.workers[worker] = Worker(self.setup, self.frozen)
        return found

    def stop(self) -> None:
        """As if it were new."""
        self.__init__()  # type: ignore[misc]

    def assign(self, worker: int, order: Order, weights: Tensor) -> None:
        self.pending.append(Done(worker, self.workers[worker].make(order, weights)))


def own_source(*, workers: int = 1, sync_steps: int = 1) -> AsynchronousRollouts:
    """A source whose workers are in this process."""
    return AsynchronousRollouts(
        OwnEngine(), workers=workers, device=None, threads=1, sync_steps=sync_steps, limit_s=60, waits=True
    )
