"""Where rollouts come from: a small protocol, and the policy itself between two steps (Alg. 1, populate B)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from sequencematch.core.mdp import Trajectory
from sequencematch.data.examples import Example
from sequencematch.data.seeds import hash_seed
from sequencematch.policy import Policy, Sampling
from sequencematch.policy.generation import rollouts
from sequencematch.training.replay import Experience


@dataclass(frozen=True)
class Request:
    """Rollouts wanted: a prompt for each, and the number of the first, which with the seed fixes its random numbers."""

    prompts: Sequence[tuple[int, ...]]
    first: int


@runtime_checkable
class RolloutSource(Protocol):
    """Something that rolls a policy out. It may run elsewhere and lag behind; every rollout says which weights made it."""

    def start(self, policy: Policy, sampling: Sampling) -> None:
        """Get ready, once, before the first request."""

    def sync(self, version: int) -> None:
        """Take over the policy's weights as they are now, at this optimisation step."""

    def collect(self, request: Request) -> list[Experience]:
        """Make the rollouts, in the order of their prompts. Every process asks, perhaps for none."""

    def stop(self) -> None:
        """Let go of everything, once, after the last request."""


class InlineRollouts:
    """The policy being trained, in the same process, between two steps."""

    def start(self, policy: Policy, sampling: Sampling) -> None:
        """Remember whom to ask."""
        self.policy, self.sampling, self.version = policy, sampling, 0

    def sync(self, version: int) -> None:
        """The weights are the policy's own."""
        self.version = version

    def collect(self, request: Request) -> list[Experience]:
        """All in one batch, as long as the context has room behind the longest prompt."""
        with torch.no_grad(), self.policy.for_rollouts():
            if not request.prompts:
                return []
            room = self.policy.max_positions - max(map(len, request.prompts))
            sampling = replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, room))
            numbers = range(request.first, request.first + len(request.prompts))
            ended = rollouts(self.policy, request.prompts, sampling, len(request.prompts), rows=numbers)
            rows = sorted(ended, key=lambda rollout: rollout.row)
        return [Experience(row.trajectory, self.version) for row in rows]

    def stop(self) -> None:
        """Nothing to let go of."""


def prompt_of(example: Example, number: int, seed: int, max_prompt_length: int) -> tuple[int, ...]:
    """What rollout `number` starts from: the example's prompt, or a prefix of plain text of random length   (§6.1, §6.2)."""
    if not example.is_text:
        return example.prompt
    text = example.prompt + example.completion
    generator = torch.Generator().manual_seed(hash_seed("prefix", seed, number))
    length = int(torch.randint(1, min(max_prompt_length, len(text)) + 1, (), generator=generator))
    return text[:length]


def as_stored(trajectory: Trajectory, max_length: int, scores_prompt: bool) -> Trajectory:
    """A rollout as the loss takes it: cut to the context, and its prompt counted as decisions where data's is   (§4.2)."""
    trajectory = trajectory.truncate(max_length)
    return trajectory.score_prompt() if scores_prompt else trajectory
