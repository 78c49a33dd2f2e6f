"""A run of the benchmark: its device, scale and rounds, and the model and generations that suites share."""

import gc
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.peers import autocast
from benchmarks.profile import Profile, profile
from benchmarks.shapes import FIRST, Scale, Shape, build
from benchmarks.timing import Call, Seconds, interleaved_seconds, seconds_of
from sequencematch.policy import Policy


@dataclass(frozen=True)
class Generated:
    """A generated batch of rollouts: its seconds, the lower median of `times`, and its actions."""

    seconds: float
    actions: int
    times: int


class Session:
    """A device, a scale and a number of rounds; caches the last model and the times of its generations.

    With `is_profiled` every variant runs once, under the profiler, and its time is not a measurement.
    """

    def __init__(self, device: str, scale: Scale, rounds: int, *, is_profiled: bool = False) -> None:
        """Store the settings. Models are built when a suite asks for them."""
        self.device, self.scale, self.rounds, self.is_profiled = device, scale, rounds, is_profiled
        self.profiles: dict[str, Profile] = {}
        self._policy: tuple[tuple[Shape, bool], Policy] | None = None
        self._generated: dict[tuple[Any, ...], Generated] = {}

    def policy(self, shape: Shape, *, is_lora: bool = False) -> Policy:
        """A policy of this shape. The policy before it is dropped first: two may not fit in memory."""
        if self._policy is None or self._policy[0] != (shape, is_lora):
            self._policy = None
            self.free()
            self._policy = ((shape, is_lora), Policy.from_pretrained(build(shape, self.device, is_lora=is_lora)))
        return self._policy[1]

    def step_policy(self) -> Policy:
        """The policy whose training step is measured."""
        return self.policy(self.scale.step, is_lora=self.scale.is_lora)

    def free(self) -> None:
        """Free the memory of models that are no longer referenced."""
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def seconds(self, title: str, variants: Mapping[str, Call]) -> Seconds:
        """Each variant's seconds in each round."""
        if self.is_profiled:
            return {name: [self._profiled(f"{title}: {name}", call)] for name, call in variants.items()}
        return interleaved_seconds(variants, self.rounds, device=self.device, title=title)

    def _profiled(self, title: str, call: Call) -> float:
        self.profiles[title] = profile(call, self.device)
        return self.profiles[title].seconds

    def generation(self, prompt: int, new_tokens: int) -> Generated:
        """Generate a batch from the trained policy without deletions, so that all rollouts have the same number of nodes."""
        batch, policy = self.scale.generation_batch, self.step_policy()
        key = (prompt, new_tokens, batch)
        if key not in self._generated:
            rows, made = random_prompts(policy, batch, prompt), [0]
            policy.eval()

            def write() -> None:
                options: dict[str, Any] = {"max_new_tokens": new_tokens, "seed": 0, "backspace_bias": -1e4}
                with autocast(self.device), policy.for_rollouts():  # as in the trainer
                    result = policy.generate(rows, batch_size=batch, **options)
                made[0] = sum(map(len, result.trajectories))

            if self.is_profiled:
                taken = [self._profiled(f"generation: {batch} prompts of {prompt} and {new_tokens} tokens", write)]
            else:
                taken = [seconds_of(write, self.device) for _ in range(self.scale.generations)]
            self._generated[key] = Generated(statistics.median_low(taken), made[0], len(taken))
        return self._generated[key]


def random_prompts(policy: Policy, batch: int, length: int) -> list[list[int]]:
    """Token ids, none of them special."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(FIRST, policy.space.vocab_size, (batch, length), generator=generator).tolist()
