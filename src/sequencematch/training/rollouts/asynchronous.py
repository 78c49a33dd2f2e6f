"""Rollouts by workers, while training goes on: weights are published, orders split among workers, answers put together."""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sequencematch.policy import Policy, Sampling
from sequencematch.training.replay import Experience
from sequencematch.training.rollouts.copies import take_apart
from sequencematch.training.rollouts.pool import Counts, Engine, Pool
from sequencematch.training.rollouts.source import Request
from sequencematch.training.rollouts.weights import pack
from sequencematch.training.rollouts.worker import Order, Setup
from sequencematch.training.signals import Signal


class AsynchronousRollouts:
    """A source whose workers belong to the first process; the others take part where weights are gathered.

    A request is split into one order per worker, whoever answers it. So with the same number of workers the same rollouts come
    back, however long they took.
    """

    def __init__(
        self,
        engine: Engine | None,
        *,
        workers: int,
        device: str | None,
        threads: int,
        sync_steps: int,
        limit_s: float,
        waits: bool,
    ) -> None:
        """`engine` is None in all processes but the first. `device` is the workers'; by default the policy's."""
        self.engine, self.workers, self.device, self.threads = engine, workers, device, threads
        self.sync_steps, self.limit_s, self.waits = sync_steps, limit_s, waits
        self.pool: Pool | None = None

    def start(self, policy: Policy, sampling: Sampling) -> None:
        """Take the policy apart, and start workers, which build copies of it meanwhile."""
        self.policy = policy
        self.blueprint, trained, frozen = take_apart(policy)
        names = {id(parameter): name for name, parameter in policy.named_parameters()}
        self.names = [names[id(tensor)] for tensor in trained]  # FSDP2 puts others in their places
        self.version, self.publications = 0, 0
        self.published: int | None = None  # the version of the weights that workers have
        self.weights: Any = None
        self.orders: dict[int, list[int]] = {}
        self.finished: dict[int, list[Experience]] = {}
        self.seen, self.seen_at, self.sync_s, self.syncs = Counts(), time.perf_counter(), 0.0, 0
        self.staleness: list[int] = []
        block = None if self.engine is None else self.engine.block(self.blueprint.frozen.size)
        pack(frozen, self.blueprint.frozen, block)
        if self.engine is None or block is None:
            return
        device = str(policy.device) if self.device is None else self.device
        precision = torch.get_float32_matmul_precision()
        setup = Setup(self.blueprint, sampling, device, self.threads, precision)
        self.engine.begin(setup, self.engine.publish(block))
        self.pool = Pool(self.engine, policy.space, self.workers, limit_s=self.limit_s, waits=self.waits)

    def sync(self, version: int) -> None:
        """Note the version. The weights are taken when rollouts are submitted that need them."""
        if version < self.version:  # training starts over
            self.published = None
        self.version = version

    def submit(self, request: Request, oldest: int) -> int:
        """Give the request's parts to workers, with weights published now, or up to `sync_steps` - 1 steps ago."""
        self.drop(request.first)
        if self.published is None or self.version - self.published >= self.sync_steps or self.published < oldest:
            self._publish()
        assert self.published is not None
        if self.pool is None:
            return self.published
        kind = self.policy.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        orders = [
            Order(self.pool.new_number(), part, self.publications, self.published, autocast)
            for part in split(request, self.workers)
        ]
        self.orders[request.first] = [self.pool.submit(order, self.weights) for order in orders]
        self.pool.tend()
        return self.published

    def collect(self, request: Request) -> list[Experience]:
        """Wait until the request's rollouts are there, and return them in order."""
        if self.pool is None:
            return []
        made = self.wait_for(request.first)
        del self.finished[request.first]
        self.staleness += [self.version - rollout.version for rollout in made]
        return made

    def wait_for(self, first: int) -> list[Experience]:
        """Wait until the rollouts of a submitted request are there; they are still to be collected."""
        if self.pool is None:
            return []
        if first not in self.finished:
            self.finished[first] = self.pool.collect(self.orders.pop(first))
        return self.finished[first]

    def restore(self, first: int, made: Sequence[Experience]) -> None:
        """Take rollouts from a checkpoint."""
        if self.pool is not None:
            self.finished[first] = list(made)

    def drop(self, first: int) -> None:
        """Drop a request, if it was submitted."""
        if self.pool is not None:
            self.pool.drop(self.orders.pop(first, ()))
            self.pool.counts.stale += len(self.finished.pop(first, ()))

    def tend(self) -> None:
        """Let the pool look after its workers."""
        if self.pool is not None:
            self.pool.tend()

    def stop(self) -> None:
        """End all workers."""
        if self.pool is not None and self.engine is not None:
            self.pool.stop()
            self.engine.stop()
        self.pool = None

    def signals(self) -> Mapping[str, Signal]:
        """The names in docs/logging.md. Processes without workers add nothing to the numbers of the first."""
        now, pool = time.perf_counter(), self.pool
        counts = Counts() if pool is None else replace(pool.counts)
        seconds = 0.0 if pool is None else now - self.seen_at
        ages = torch.tensor(self.staleness, dtype=torch.float)
        ready = torch.tensor([] if pool is None else [float(len(pool.alive))])
        found = {
            "rollouts/per_second": Signal.rate(counts.received - self.seen.received, seconds),
            "rollouts/queue": Signal.mean(torch.tensor([] if pool is None else [float(pool.depth)])),
            "rollouts/staleness": Signal.mean(ages),
            "rollouts/staleness_max": Signal.mean(ages.max()[None] if len(ages) else ages),
            "rollouts/sync_seconds": Signal.rate(self.sync_s, self.syncs),
            "rollouts/wait_share": Signal.rate(counts.waited_s - self.seen.waited_s, seconds),
            "rollouts/workers": Signal.mean(ready),
            "rollouts/replaced": Signal.count(counts.replaced - self.seen.replaced),
            "rollouts/dropped_stale": Signal.count(counts.stale - self.seen.stale),
            "rollouts/duplicates": Signal.count(counts.duplicates - self.seen.duplicates),
        }
        self.seen, self.seen_at, self.sync_s, self.syncs, self.staleness = counts, now, 0.0, 0, []
        return found

    def _publish(self) -> None:
        """Copy the trained weights, as they are now, to where workers read them."""
        began = time.perf_counter()
        named: dict[str, Tensor] = dict(self.policy.named_parameters())
        layout = self.blueprint.trained
        self.weights = None  # its memory may be used again
        block = None if self.engine is None else self.engine.block(layout.size)
        pack([named[name] for name in self.names], layout, block)
        if self.engine is not None and block is not None:
            self.weights = self.engine.publish(block)
        self.published, self.publications = self.version, self.publications + 1
        self.sync_s, self.syncs = self.sync_s + time.perf_counter() - began, self.syncs + 1


def split(request: Request, parts: int) -> list[Request]:
    """A request in parts of almost equal numbers of rollouts, none of them empty."""
    count = len(request.prompts)
    ends = [count * part // parts for part in range(parts + 1)]
    spans = [(begin, end) for begin, end in itertools.pairwise(ends) if end > begin]
    return [Request(request.prompts[begin:end], request.first + begin) for begin, end in spans]
