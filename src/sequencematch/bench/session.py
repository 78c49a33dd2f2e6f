"""One run of the benchmark: where, how much, how often; and what its suites share."""

import gc
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sequencematch.bench.measure import Call, Seconds, interleaved_seconds, seconds_of
from sequencematch.bench.peers import autocast
from sequencematch.bench.profile import Profile, profile
from sequencematch.bench.shapes import FIRST, Scale, Shape, build
from sequencematch.policy import Policy
from sequencematch.policy.merging import merged


@dataclass(frozen=True)
class Generated:
    """How long a batch of rollouts takes, the lower median of `times`, and how many actions it makes."""

    seconds: float
    actions: int
    times: int


class Session:
    """A device, a scale and a number of rounds; the model that was used last, and how long its generations took.

    With `is_profiled` every variant is called once under the profiler instead, and its time is no measurement.
    """

    def __init__(self, device: str, scale: Scale, rounds: int, *, is_profiled: bool = False) -> None:
        """Nothing is built yet."""
        self.device, self.scale, self.rounds, self.is_profiled = device, scale, rounds, is_profiled
        self.profiles: dict[str, Profile] = {}
        self._policy: tuple[tuple[Shape, bool], Policy] | None = None
        self._generated: dict[tuple[Any, ...], Generated] = {}

    def policy(self, shape: Shape, *, is_lora: bool = False) -> Policy:
        """A policy of this shape; the one before it is dropped, since two may not fit."""
        if self._policy is None or self._policy[0] != (shape, is_lora):
            self._policy = None
            self.free()
            self._policy = ((shape, is_lora), Policy.from_pretrained(build(shape, self.device, is_lora=is_lora)))
        return self._policy[1]

    def step_policy(self) -> Policy:
        """The policy whose training step is measured."""
        return self.policy(self.scale.step, is_lora=self.scale.is_lora)

    def free(self) -> None:
        """Give back what nothing refers to any more."""
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
        """A whole batch of rollouts of the policy that is trained, none of which deletes: all write as many nodes."""
        batch, policy = self.scale.generation_batch, self.step_policy()
        key = (prompt, new_tokens, batch)
        if key not in self._generated:
            rows, made = random_prompts(policy, batch, prompt), [0]
            policy.eval()

            def write() -> None:
                options: dict[str, Any] = {"max_new_tokens": new_tokens, "seed": 0, "backspace_bias": -1e4}
                with autocast(self.device), merged(policy):  # as the trainer does
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
