"""Orders in flight, answers kept in order, and workers that are replaced when they die or hang. Knows no engine."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from safetensors.torch import load
from torch import Tensor

from sequencematch.core.mdp import ActionSpace
from sequencematch.training.replay import Experience, decoded
from sequencematch.training.rollouts.worker import Made, Order, Setup

logger = logging.getLogger(__name__)

#: How often an order may raise an error, and how often workers may die of it one after another, before the run fails.
ERRORS, LOSSES = 3, 10
#: Seconds between two messages that there is no worker, and the longest pause before a worker is started anew.
SAY_EVERY_S, LONGEST_PAUSE_S = 60.0, 30.0
#: Seconds that a worker may take to start: it imports torch and builds its copy of the policy.
START_S = 600.0


class RolloutWorkerError(RuntimeError):
    """Rollouts can't be made: an order fails again and again, or there are no workers."""


@dataclass(frozen=True)
class Ready:
    """A worker has its copy of the policy; `process` is its number in the operating system, where it runs."""

    worker: int
    process: int


@dataclass(frozen=True)
class Done:
    """A worker has made the rollouts of an order."""

    worker: int
    made: Made


@dataclass(frozen=True)
class Failed:
    """A worker has raised an error, with its order or when it started, and has ended."""

    worker: int
    error: str


@dataclass(frozen=True)
class Lost:
    """A worker has died: killed, or gone with its machine."""

    worker: int
    reason: str


Event = Ready | Done | Failed | Lost


@runtime_checkable
class Engine(Protocol):
    """Runs workers somewhere. No call waits for a worker, except `events`, and only as long as it is told."""

    #: Whether a worker may wait for room in a cluster; if not, one that doesn't start in time is replaced.
    has_queue: bool

    def block(self, size: int) -> Tensor:
        """Memory for weights of so many bytes, to be filled and published."""

    def publish(self, block: Tensor) -> Any:
        """Make a block readable for workers; it stays so while the result is referred to. The block is then no longer used."""

    def begin(self, setup: Setup, frozen: Any) -> None:
        """Say what workers begin with; `frozen` is published."""

    def launch(self, worker: int) -> None:
        """Start a worker of this number."""

    def assign(self, worker: int, order: Order, weights: Any) -> None:
        """Give a worker an order and the weights for it, as the engine published them."""

    def events(self, timeout_s: float) -> list[Event]:
        """What has happened since the last call; waits for it at most this long."""

    def kill(self, worker: int) -> None:
        """End a worker, whatever it does."""

    def stop(self) -> None:
        """Free everything. No worker is left."""


@dataclass
class Counts:
    """What a pool has counted since it was made. Rollouts that are dropped were received, too."""

    received: int = 0
    replaced: int = 0
    duplicates: int = 0
    stale: int = 0
    waited_s: float = 0.0


@dataclass
class _Member:
    """A worker: since when it starts, works or is idle; its order; the total that it reports."""

    since: float
    process: int | None = None
    order: int | None = None
    total: int = 0


@dataclass
class _Open:
    """An order without an answer yet, its weights, and what went wrong with it so far."""

    order: Order
    weights: Any
    errors: list[str] = field(default_factory=list)
    losses: int = 0


class Pool:
    """A fixed number of workers and the orders for them.

    An order keeps its number, its rollouts' numbers and its weights until it is answered. If its worker dies or hangs, another one
    gets it. So what comes back depends neither on faults nor on who made it, and nothing is counted twice or lost.
    """

    def __init__(
        self,
        engine: Engine,
        space: ActionSpace,
        workers: int,
        *,
        limit_s: float,
        waits: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start workers. A worker has `limit_s` for an order; `waits` says what to do without workers: wait, or fail after that."""
        self.engine, self.space, self.wanted = engine, space, workers
        self.limit_s, self.waits, self.clock = limit_s, waits, clock
        self.members: dict[int, _Member] = {}
        self.open: dict[int, _Open] = {}
        self.done: dict[int, list[Experience]] = {}
        self.cancelled: set[int] = set()
        self.orders = self.launched = self.failed_starts = self.lost_starts = 0
        self.next_launch = self.alive_at = self.said_at = clock()
        self.counts, self.gone = Counts(), 0
        self._launch()

    @property
    def alive(self) -> list[int]:
        """The processes of the workers that have started."""
        return [member.process for member in list(self.members.values()) if member.process is not None]

    @property
    def reported(self) -> int:
        """The rollouts that workers say they have made and sent, over all workers there ever were."""
        return self.gone + sum(member.total for member in self.members.values())

    @property
    def depth(self) -> int:
        """Rollouts that were submitted and not collected."""
        return sum(len(opened.order.request.prompts) for opened in self.open.values()) + sum(
            map(len, self.done.values())
        )

    def new_number(self) -> int:
        """The number of the next order."""
        self.orders += 1
        return self.orders

    def submit(self, order: Order, weights: Any) -> int:
        """Put an order in the queue, with its weights as the engine published them, and return its number."""
        self.open[order.number] = _Open(order, weights)
        return order.number

    def collect(self, numbers: Sequence[int]) -> list[Experience]:
        """The rollouts of these orders, one after another; waits until all are there."""
        began = self.clock()
        while any(number in self.open for number in numbers):
            self.tend(timeout_s=min(1.0, self.limit_s))
            self._mind_the_workers(began)
        self.counts.waited_s += self.clock() - began
        return [rollout for number in numbers for rollout in self.done.pop(number)]

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget orders: what has been made is dropped as stale, and so is what is being made."""
        for number in numbers:
            if number in self.done:
                self.counts.stale += len(self.done.pop(number))
            elif self.open.pop(number, None) is not None:
                self.cancelled.add(number)

    def tend(self, timeout_s: float = 0.0) -> None:
        """Take in what has happened, replace workers that died or hang, and give orders to idle ones."""
        self._assign()
        for event in self.engine.events(timeout_s):
            self._take(event)
        now = self.clock()
        for worker, member in list(self.members.items()):
            took_s = now - member.since
            if member.process is None and took_s > START_S and not self.engine.has_queue:
                self._lose(worker, f"has not started for {START_S:g} s")
            elif member.order is not None and took_s > self.limit_s:
                self._lose(worker, f"has not answered for {self.limit_s:g} s")
        self._launch()
        self._assign()

    def stop(self) -> None:
        """Kill all workers and forget all orders."""
        for worker in list(self.members):
            self.engine.kill(worker)
        self.members.clear()
        self.open.clear()
        self.done.clear()

    def _take(self, event: Event) -> None:
        member = self.members.get(event.worker)
        if member is None:  # it was replaced
            if isinstance(event, Done):
                self.gone += event.made.count
                self._receive(_Member(self.clock()), event.made)
            return
        match event:
            case Ready(process=process):
                member.process, member.since = process, self.clock()
                self.failed_starts = self.lost_starts = 0
            case Done(made=made):
                self._receive(member, made)
            case Failed(error=error):
                self._fail(event.worker, error)
            case Lost(reason=reason):
                self._lose(event.worker, reason)

    def _receive(self, member: _Member, made: Made) -> None:
        """Keep an answer, unless its order has been answered or forgotten."""
        member.total = made.total
        if member.order == made.number:
            member.order, member.since = None, self.clock()
        self.counts.received += made.count
        if self.open.pop(made.number, None) is not None:
            self.done[made.number] = decoded(load(made.rollouts), self.space)
        elif made.number in self.cancelled:
            self.cancelled.discard(made.number)
            self.counts.stale += made.count
        else:
            self.counts.duplicates += made.count

    def _fail(self, worker: int, error: str) -> None:
        """An error is repeated a few times, because a graphics card may be full for a moment; then the run fails with it."""
        opened = self.open.get(self.members[worker].order or 0)
        self._remove(worker)
        if opened is None:  # as it started
            self.failed_starts += 1
            count = self.failed_starts
        else:
            opened.errors.append(error)
            count = len(opened.errors)
        if count >= ERRORS:
            raise RolloutWorkerError(f"A rollout worker failed {count} times. The last time:\n{error}")
        logger.warning("A rollout worker failed and is replaced: %s", error.strip().splitlines()[-1])

    def _lose(self, worker: int, reason: str) -> None:
        """A dead or hung worker is replaced, and its order is given to another one."""
        member = self.members[worker]
        logger.warning(
            "Rollout worker %d (process %s) %s; it is replaced.", worker, member.process or "not known", reason
        )
        opened = self.open.get(member.order or 0)
        if member.process is None:
            self.next_launch = self.clock() + min(LONGEST_PAUSE_S, 2.0**self.lost_starts - 1)
            self.lost_starts += 1
        self._remove(worker)
        if opened is not None:
            opened.losses += 1
            if opened.losses >= LOSSES:
                first, count = opened.order.request.first, len(opened.order.request.prompts)
                raise RolloutWorkerError(
                    f"Rollouts {first} to {first + count - 1} were given to {LOSSES} workers, and all of them were lost. The last "
                    f"one {reason}. If a worker needs more memory than there is, lower `generation_batch_size`; if it needs more "
                    f"time, raise `rollout_timeout_s`."
                )

    def _remove(self, worker: int) -> None:
        self.engine.kill(worker)
        self.gone += self.members.pop(worker).total
        self.counts.replaced += 1

    def _launch(self) -> None:
        while len(self.members) < self.wanted and self.clock() >= self.next_launch:
            self.launched += 1
            self.members[self.launched] = _Member(self.clock())
            self.engine.launch(self.launched)

    def _assign(self) -> None:
        """The oldest orders first."""
        taken = {member.order for member in self.members.values()}
        waiting = [number for number in sorted(self.open) if number not in taken]
        idle = [w for w, member in self.members.items() if member.process is not None and member.order is None]
        for worker, number in zip(idle, waiting, strict=False):
            opened, member = self.open[number], self.members[worker]
            member.order, member.since = number, self.clock()
            self.engine.assign(worker, opened.order, opened.weights)

    def _mind_the_workers(self, began: float) -> None:
        """Say that there are no workers, and fail if that is what was asked for."""
        now = self.clock()
        if self.alive:
            self.alive_at = now
        without_s = now - max(self.alive_at, began)
        if not self.waits and without_s > self.limit_s:
            raise RolloutWorkerError(
                f"There has been no rollout worker for {without_s:.0f} s, and `rollout_without_workers` is 'fail'. "
                f"{len(self.members)} of {self.wanted} are starting or wait for room in the cluster."
            )
        if without_s > min(SAY_EVERY_S, self.limit_s) and now - self.said_at > SAY_EVERY_S:
            self.said_at = now
            logger.warning(
                "There is no rollout worker: training waits. %d of %d are starting or wait for room in the cluster.",
                len(self.members),
                self.wanted,
            )
