"""Examples → noised trajectories, cut to the context (§4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.core.noise import NoiseSource, add_noise, token_noise
from sequencematch.data.examples import Example, Reader
from sequencematch.data.seeds import hash_seed

#: Sorting a vocabulary takes longer than drawing from it.
_token_noise = lru_cache(maxsize=256)(token_noise)


@dataclass(frozen=True)
class Collator:
    """Data trajectories with noise drawn anew each epoch, a function of (seed, epoch, row) alone   (§4.2).

    So a resumed run draws what it would have drawn, and so do two processes, or a worker process. Noise that makes an
    example too long is left out where `read` says that it must not be cut. With `noise_is_the_models` it is for the trainer
    to put noise in.
    """

    space: ActionSpace
    read: Reader
    seed: int = 0
    noise_rate: float = 0.0
    noise_burst: int = 1
    noise_excludes_right: bool = True
    noise_is_the_models: bool = False

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """What the data loader yields. `length` is what tells Hugging Face how many there are."""
        trajectories = [] if self.noise_is_the_models else [self.trajectory(example) for example in examples]
        return {
            "examples": list(examples),
            "trajectories": trajectories,
            "length": torch.tensor([len(example.completion) + 1 for example in examples]),
        }

    def clean(self, example: Example) -> Trajectory:
        """The example as a demonstration, cut to the context; its last action is kept and `<eos>` executed   (§4.2)."""
        try:
            whole = Trajectory.demonstration(self.space, example.prompt, example.completion)
        except ValueError as error:
            raise ValueError(f"Row {example.index} of the dataset does not fit the model. {error}") from error
        return whole.truncate(self.read.max_length)

    def trajectory(self, example: Example, source: NoiseSource | None = None) -> Trajectory:
        """The example with noise, from its own tokens or the whole vocabulary unless a source is given."""
        trajectory = self.clean(example)
        if self.noise_rate:
            if source is None:
                source = _token_noise(self.space, example.noise_tokens, exclude_right=self.noise_excludes_right)
            generator = torch.Generator().manual_seed(hash_seed("noise", self.seed, example.epoch, example.index))
            noised = add_noise(trajectory, self.noise_rate, source, generator, burst=self.noise_burst)
            if noised.num_nodes <= self.read.max_length or self.read.may_cut(example):
                trajectory = noised.truncate(self.read.max_length)
        return trajectory.score_prompt() if self.read.scores_prompt else trajectory
