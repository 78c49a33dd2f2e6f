"""Sources of rollouts: two protocols, and the policy being trained as a source (Alg. 1, populate B)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from sequencematch.core.mdp import Trajectory
from sequencematch.policy import Policy, Sampling
from sequencematch.policy.generation import rollouts
from sequencematch.training.replay import Experience
from sequencematch.training.signals import Signal


@dataclass(frozen=True)
class Request:
    """A request for rollouts: their prompts, and the number of the first. Number and seed fix a rollout's random numbers."""

    prompts: Sequence[tuple[int, ...]]
    first: int


@runtime_checkable
class RolloutSource(Protocol):
    """A sampler of rollouts. It may run elsewhere, with older weights: every rollout carries the version of its weights."""

    def start(self, policy: Policy, sampling: Sampling) -> None:
        """Prepare, once, before the first request."""

    def sync(self, version: int) -> None:
        """Take the policy's current weights; `version` is the optimisation step."""

    def collect(self, request: Request) -> list[Experience]:
        """Make a rollout for each prompt, in order. Every process calls this, some perhaps without prompts."""

    def stop(self) -> None:
        """Free all resources, once, after the last request."""


@runtime_checkable
class AsynchronousSource(RolloutSource, Protocol):
    """A source that makes rollouts while training goes on: they are submitted ahead of need, and collected when due.

    All processes share its workers. Every process makes the same calls in the same order; the first alone has rollouts.
    """

    def submit(self, request: Request, oldest: int) -> int:
        """Begin to make rollouts, with the latest weights, at least of version `oldest`; returns the version.

        A request replaces an earlier one of the same number, whose rollouts are dropped.
        """

    def drop(self, first: int) -> None:
        """Drop the rollouts of the request that begins with this number."""

    def tend(self) -> None:
        """Look after the workers: called at every step. It does not wait."""

    def wait_for(self, first: int) -> Sequence[Experience]:
        """Wait until the rollouts of a submitted request are there; they are still to be collected."""

    def restore(self, first: int, made: Sequence[Experience]) -> None:
        """Take back the rollouts of a request from a checkpoint: it is then submitted, and done."""

    def signals(self) -> Mapping[str, Signal]:
        """Numbers to log about the time since the last call; the same names in every process."""


class InlineRollouts:
    """The policy being trained, in the same process, between two steps."""

    def start(self, policy: Policy, sampling: Sampling) -> None:
        """Store the policy and its sampling options."""
        self.policy, self.sampling, self.version = policy, sampling, 0

    def sync(self, version: int) -> None:
        """Store the version. The weights are the policy's own."""
        self.version = version

    def collect(self, request: Request) -> list[Experience]:
        """Make all rollouts in one batch."""
        made = make_rollouts(self.policy, request, self.sampling)
        return [Experience(trajectory, self.version) for trajectory in made]

    def stop(self) -> None:
        """Do nothing: there is nothing to free."""


def make_rollouts(policy: Policy, request: Request, sampling: Sampling) -> list[Trajectory]:
    """A rollout of each prompt, in one batch, no longer than the context's room after the longest prompt."""
    with torch.no_grad(), policy.for_rollouts():
        if not request.prompts:
            return []
        room = policy.max_positions - max(map(len, request.prompts))
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        numbers = range(request.first, request.first + len(request.prompts))
        ended = rollouts(policy, request.prompts, sampling, len(request.prompts), rows=numbers)
        return [rollout.trajectory for rollout in sorted(ended, key=lambda rollout: rollout.row)]
