"""The buffer B of the policy's own trajectories: first in, first out, each drawn a given number of times (Alg. 1, App. E)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.data.seeds import hash_seed


@dataclass(frozen=True)
class Experience:
    """A trajectory the policy chose, and the optimisation step of the weights that chose it.

    `right` says whether its text ended as the example that its prompt came from; None if that example is not an answer.
    `right_action` is the action that was right at its end, if it ended wrongly.
    """

    trajectory: Trajectory
    version: int
    right: bool | None = None
    right_action: int | None = None


class ReplayBuffer:
    """The latest `size` rollouts, and how many rollouts were made and drawn so far   (App. E).

    Each rollout is drawn `reuse` times on average. If a step draws n rollouts and G are made at a time, new ones are due every
    G · reuse / n steps. `is_due` compares the two counts, so the average tends to `reuse` for any n and G.
    """

    def __init__(self, size: int, reuse: float) -> None:
        """An empty buffer."""
        self.size, self.reuse = size, reuse
        self.rollouts: list[Experience] = []
        self.made = self.drawn = 0

    def __len__(self) -> int:
        """The number of rollouts in the buffer."""
        return len(self.rollouts)

    def is_due(self, count: int) -> bool:
        """Whether rollouts must be made before `count` more are drawn."""
        return not self.rollouts or self.drawn + count > self.reuse * self.made

    def add(self, rollouts: Sequence[Experience]) -> None:
        """Add new rollouts, and drop the oldest beyond `size`."""
        self.rollouts = [*self.rollouts, *rollouts][-self.size :]
        self.made += len(rollouts)

    def draw(self, count: int, seed: int) -> list[Experience]:
        """Draw at random, without repeats if there are enough rollouts; a function of the seed and the number drawn so far."""
        generator = torch.Generator().manual_seed(hash_seed("draw", seed, self.drawn))
        whole, rest = divmod(count, len(self.rollouts))
        picked = list(range(len(self.rollouts))) * whole
        picked += torch.randperm(len(self.rollouts), generator=generator)[:rest].tolist()
        self.drawn += count
        return [self.rollouts[index] for index in picked]

    def age(self, step: int) -> float:
        """The mean age of a rollout: optimisation steps since the weights that made it."""
        return step - sum(rollout.version for rollout in self.rollouts) / len(self.rollouts)

    def save(self, path: Path) -> None:
        """Write rollouts and counts as flat integer tensors."""
        save_file({"counts": torch.tensor([self.made, self.drawn]), **encoded(self.rollouts)}, path)

    def load(self, path: Path, space: ActionSpace) -> None:
        """Load what `save` wrote. Files of older versions have neither `right` nor `right_action`; both are then None."""
        tensors = load_file(path)
        self.made, self.drawn = tensors["counts"].tolist()
        self.rollouts = decoded(tensors, space)


def encoded(rollouts: Sequence[Experience]) -> dict[str, Tensor]:
    """Rollouts as flat integer tensors."""
    trajectories = [rollout.trajectory for rollout in rollouts]

    def flat(sequences: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([number for sequence in sequences for number in sequence], dtype=torch.long)

    return {
        "version": flat([[rollout.version for rollout in rollouts]]),
        "right": flat([[-1 if rollout.right is None else int(rollout.right) for rollout in rollouts]]),
        "right_action": flat([[-1 if r.right_action is None else r.right_action for r in rollouts]]),
        "floor": flat([[t.floor for t in trajectories]]),
        "prompt_length": flat([[len(t.initial) for t in trajectories]]),
        "length": flat([[len(t) for t in trajectories]]),
        "initial": flat([t.initial for t in trajectories]),
        "chosen": flat([t.chosen for t in trajectories]),
        "executed": flat([t.executed for t in trajectories]),
        "policy_chosen": flat([t.policy_chosen for t in trajectories]),
    }


def decoded(tensors: Mapping[str, Tensor], space: ActionSpace) -> list[Experience]:
    """The rollouts that `encoded` made flat."""
    state = {name: tensor.tolist() for name, tensor in tensors.items()}
    rollouts, start, step = [], 0, 0
    unknown = [-1] * len(state["version"])
    rights, actions = (state.get(name, unknown) for name in ("right", "right_action"))
    for version, right, action, floor, prompt, length in zip(
        state["version"], rights, actions, state["floor"], state["prompt_length"], state["length"], strict=True
    ):
        decisions = slice(step, step + length)
        trajectory = Trajectory(
            space,
            tuple(state["initial"][start : start + prompt]),
            tuple(state["chosen"][decisions]),
            tuple(state["executed"][decisions]),
            tuple(map(bool, state["policy_chosen"][decisions])),
            floor,
        )
        known = None if right < 0 else bool(right)
        rollouts.append(Experience(trajectory, version, known, None if action < 0 else action))
        start, step = start + prompt, step + length
    return rollouts
