"""Workloads of a training step: data as long as the context with equal or shorter rollouts, or short rows with shared prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.shapes import BOS, EOS, FIRST, Scale
from sequencematch.core.encoding import Encoding
from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.core.noise import add_noise, token_noise
from sequencematch.training.losses import Batch
from sequencematch.training.step import encode_batch, encode_parts, node_budget, num_passes

BACKSPACES, NOISE = 0.1, 0.2


@dataclass(frozen=True)
class Workload:
    """Data and rollouts of one step, and the same data as tokens for maximum likelihood."""

    name: str
    clean: Tensor  # token ids, [batch, time]
    data: Sequence[Trajectory]
    rollouts: Sequence[Trajectory]

    @property
    def trajectories(self) -> list[Trajectory]:
        """Data, then rollouts."""
        return [*self.data, *self.rollouts]

    def encode(self, hidden_size: int) -> Encoding:
        """All trajectories in one encoding, packed as the trainer packs them for a model of that width."""
        return encode_batch(self.trajectories, hidden_size)

    def parts(self, hidden_size: int, device: str) -> list[Batch]:
        """The same, split into forward passes as the trainer splits a batch."""
        count = num_passes(self.data, self.rollouts, node_budget(self.clean.numel(), device))
        return encode_parts(self.data, self.rollouts, count, sum(map(len, self.data)), hidden_size)


def space_of(vocab: int) -> ActionSpace:
    """The actions of a shape."""
    return ActionSpace(vocab, eos=EOS, bos=BOS)


def rollout(
    space: ActionSpace, prompt: Sequence[int], nodes: int, generator: torch.Generator, backspaces: float = BACKSPACES
) -> Trajectory:
    """A prompt and random actions, of which a share `backspaces` deletes, with `nodes` pushed tokens in all."""
    wanted = nodes - len(prompt) - 1
    tokens = torch.randint(FIRST, space.vocab_size, (wanted,), generator=generator).tolist()
    deletes = torch.rand(4 * wanted + 16, generator=generator).lt(backspaces).tolist()
    actions: list[int] = []
    for is_delete in deletes:
        if not tokens:
            break
        actions.append(space.bkspc if is_delete else tokens.pop())
    return Trajectory.rollout(space, prompt, (*actions, space.eos))


def random_rollouts(space: ActionSpace, batch: int, events: int, backspaces: float, seed: int) -> list[Trajectory]:
    """Random trajectories of `events` events, `<bos>` and `<eos>` included; a share `backspaces` of the others deletes."""
    generator = torch.Generator().manual_seed(seed)
    actions = torch.randint(FIRST, space.vocab_size, (batch, events - 2), generator=generator)
    actions[torch.rand(batch, events - 2, generator=generator) < backspaces] = space.bkspc
    return [Trajectory.rollout(space, (BOS,), (*row, EOS)) for row in actions.tolist()]


def text(
    space: ActionSpace, batch: int, context: int, nodes: int | None, *, noise: float = 0.0, seed: int = 0
) -> Workload:
    """Plain text as long as the context, with noise if asked for, and rollouts of `nodes` nodes from `<bos>`, or none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(FIRST, space.vocab_size, (batch, context - 2), generator=generator)
    data = [Trajectory.demonstration(space, (BOS,), row) for row in tokens.tolist()]
    if noise:
        source = token_noise(space)
        data = [add_noise(t, noise, source, generator).truncate(context) for t in data]
    made = [] if nodes is None else [rollout(space, (BOS,), nodes, generator) for _ in range(batch)]
    clean = torch.nn.functional.pad(torch.nn.functional.pad(tokens, (1, 0), value=BOS), (0, 1), value=EOS)
    name = "data alone" if nodes is None else f"rollouts of {nodes} nodes"
    return Workload(name, clean, data, made)


def prompted(space: ActionSpace, batch: int, prompt: int, completion: int, *, seed: int = 0) -> Workload:
    """Questions with answers; every rollout answers a question of the data, so prompts are shared."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(FIRST, space.vocab_size, (batch, prompt + completion - 1), generator=generator)
    rows = [(row[:prompt], row[prompt:]) for row in tokens.tolist()]
    data = [Trajectory.demonstration(space, question, answer) for question, answer in rows]
    made = [rollout(space, question, prompt + completion, generator) for question, _ in rows]
    clean = torch.nn.functional.pad(tokens, (0, 1), value=EOS)
    return Workload("shared prompts", clean, data, made)


def of_step(scale: Scale) -> dict[str, Workload]:
    """The workloads of the training step, by name."""
    space = space_of(scale.step.vocab)
    return {
        "equal": text(space, scale.batch, scale.context, scale.context),
        "short": text(space, scale.batch, scale.context, scale.rollout),
        "shared": prompted(space, scale.prompt_batch, scale.prompt, scale.completion),
    }
