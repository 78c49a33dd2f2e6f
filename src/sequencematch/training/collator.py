"""Examples → noised trajectories, cut to the context (§4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from sequencematch.core import ActionSpace, NoiseSource, Trajectory, add_noise, burst_end_noise, step_noise, token_noise
from sequencematch.data.examples import Example, Reader
from sequencematch.data.seeds import hash_seed


@lru_cache(maxsize=256)
def _noise_of(
    space: ActionSpace,
    tokens: tuple[int, ...] | None,
    by_step: tuple[tuple[int, ...], ...],
    ends: tuple[int, ...],
    exclude_right: bool,
) -> NoiseSource:
    """The noise of an example. Cached: sorting the vocabulary takes longer than drawing from it."""
    if by_step:
        source = step_noise(space, by_step, exclude_right=exclude_right)
    else:
        source = token_noise(space, tokens, exclude_right=exclude_right)
    return burst_end_noise(space, source, ends, exclude_right=exclude_right) if ends else source


@dataclass(frozen=True)
class Collator:
    """Examples as data trajectories with noise, drawn anew each epoch as a function of (seed, epoch, row) alone   (§4.2).

    Resumed runs, other processes and data-loader workers therefore draw the same noise. If noise makes an example too long and
    `read` forbids cutting it, the example stays clean. With `noise_is_the_models` batches hold no trajectories: the trainer
    makes them, with noise from the model.
    """

    space: ActionSpace
    read: Reader
    seed: int = 0
    noise_rate: float = 0.0
    noise_burst: int = 1
    noise_excludes_right: bool = True
    noise_is_the_models: bool = False

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """A batch of the data loader. Hugging Face reads the batch size off the tensor `length`."""
        trajectories = [] if self.noise_is_the_models else [self.trajectory(example) for example in examples]
        return {
            "examples": list(examples),
            "trajectories": trajectories,
            "length": torch.tensor([len(example.completion) + 1 for example in examples]),
        }

    def clean(self, example: Example) -> Trajectory:
        """The example as a demonstration. If it is cut to the context, `<eos>` is executed in place of its last action   (§4.2)."""
        try:
            whole = Trajectory.demonstration(self.space, example.prompt, example.completion, example.end)
        except ValueError as error:
            raise ValueError(f"Row {example.index} of the dataset does not fit the model. {error}") from error
        return whole.truncate(self.read.max_length)

    def trajectory(self, example: Example, source: NoiseSource | None = None) -> Trajectory:
        """The example with noise from `source`, by default from the example's own tokens or the whole vocabulary."""
        trajectory = self.clean(example)
        if self.noise_rate:
            if source is None:
                own = (example.noise_tokens, example.noise_tokens_by_step, example.noise_ends)
                source = _noise_of(self.space, *own, self.noise_excludes_right)
            generator = torch.Generator().manual_seed(hash_seed("noise", self.seed, example.epoch, example.index))
            noised = add_noise(trajectory, self.noise_rate, source, generator, burst=self.noise_burst)
            if noised.num_nodes <= self.read.max_length or self.read.may_cut(example):
                trajectory = noised.truncate(self.read.max_length)
        return trajectory.score_prompt() if self.read.scores_prompt else trajectory
