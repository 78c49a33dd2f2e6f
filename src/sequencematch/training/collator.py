"""Examples → noised, cut trajectories → one encoding with rollouts beside them (Alg. 1, §4.2)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from sequencematch.core.encoding import Encoding, encode
from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.core.noise import NoiseSource, add_noise, token_noise
from sequencematch.training.examples import Example, hash_seed

#: A clean trajectory → the source of its noise, where that needs more than the example: a model.
MakeSource = Callable[[Trajectory], NoiseSource]


#: Sorting a vocabulary takes longer than drawing from it.
_token_noise = lru_cache(maxsize=256)(token_noise)


@dataclass(frozen=True)
class Collator:
    """Data trajectories with noise drawn anew each epoch, a function of (seed, epoch, row) alone   (§4.2).

    So a resumed run draws what it would have drawn, and so do two processes, or a worker process.
    """

    space: ActionSpace
    max_length: int
    seed: int = 0
    noise_rate: float = 0.0
    noise_burst: int = 1
    noise_excludes_right: bool = True
    scores_prompt: bool = False

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """What the data loader yields. `length` is what tells Hugging Face how many there are."""
        trajectories = [self.trajectory(example) for example in examples]
        return {
            "examples": list(examples),
            "trajectories": trajectories,
            "length": torch.tensor([len(trajectory) for trajectory in trajectories]),
        }

    def clean(self, example: Example) -> Trajectory:
        """The example as a demonstration, cut to the context; its last action is kept and `<eos>` executed   (§4.2)."""
        return Trajectory.demonstration(self.space, example.prompt, example.completion).truncate(self.max_length)

    def trajectory(self, example: Example, source: NoiseSource | None = None) -> Trajectory:
        """The example with noise, from its own tokens or the whole vocabulary unless a source is given."""
        trajectory = self.clean(example)
        if self.noise_rate:
            if source is None:
                source = _token_noise(self.space, example.noise_tokens, exclude_right=self.noise_excludes_right)
            generator = torch.Generator().manual_seed(hash_seed(self.seed, example.epoch, example.index))
            noised = add_noise(trajectory, self.noise_rate, source, generator, burst=self.noise_burst)
            trajectory = noised.truncate(self.max_length)
        return trajectory.score_prompt() if self.scores_prompt else trajectory


def encode_batch(trajectories: Sequence[Trajectory], row_length: int | None) -> Encoding:
    """One encoding of data and rollouts: a row each, or packed into rows of `row_length` nodes with equal prompts shared."""
    return encode(trajectories, row_length=row_length, share_prompts=row_length is not None)
