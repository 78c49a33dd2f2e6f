"""A training step: data and rollouts in forward passes that fit a node budget, each followed by its backward pass (Alg. 1)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sequencematch.core.encoding import Encoding, encode, fitting_row_length
from sequencematch.core.mdp import Trajectory
from sequencematch.policy import Policy
from sequencematch.policy.fusing import Fusion
from sequencematch.training.losses import Batch

#: Smallest forward pass that saturates a GPU, in nodes.
GPU_NODES = 8192


def node_budget(data_nodes: int, device: torch.device | str) -> int:
    """The most nodes in a forward pass: as many as the data has, but on a GPU at least `GPU_NODES`."""
    return max(data_nodes, GPU_NODES if torch.device(device).type == "cuda" else 1)


def num_passes(data: Sequence[Trajectory], rollouts: Sequence[Trajectory], budget: int) -> int:
    """The number of passes that fit the node budget, or fewer, so that each pass has data and, if there are any, rollouts."""
    nodes = sum(trajectory.num_nodes for trajectory in (*data, *rollouts))
    return min(-(-nodes // budget), len(data), len(rollouts) or len(data))


def encode_batch(trajectories: Sequence[Trajectory], hidden_size: int | None) -> Encoding:
    """Data and rollouts in one encoding: packed with shared prompts for a model of width `hidden_size`; if None, a row each."""
    if hidden_size is None:
        return encode(trajectories)
    return encode(trajectories, row_length=fitting_row_length(trajectories, hidden_size), share_prompts=True)


def encode_parts(
    data: Sequence[Trajectory],
    rollouts: Sequence[Trajectory],
    count: int,
    num_items: int,
    hidden_size: int | None,
    right: Sequence[bool | None] = (),
) -> list[Batch]:
    """A batch in `count` parts, one per forward pass, with data and rollouts in each; `num_items` is the whole step's N.

    `right` says which rollouts ended in the right answer; None if unknown.
    """
    shares = [(data[part::count], rollouts[part::count], tuple(right[part::count])) for part in range(count)]
    return [
        Batch(encode_batch([*d, *r], hidden_size), len(d), num_items, 1.0 if r else None, judged)
        for d, r, judged in shares
    ]


def accumulate_gradients(
    policy: Policy,
    parts: Sequence[Batch],
    forward_backward: Callable[[Batch], Tensor],
    fusions: Sequence[Fusion],
    *,
    is_autocast: bool,
) -> Tensor:
    """Run every part forward and backward with fused kernels; gradients accumulate. Returns the sum of the losses.

    `forward_backward` computes the loss of a part, runs its backward pass and returns the detached loss.
    """
    with policy.for_training(fusions, autocast=is_autocast):
        return torch.stack([forward_backward(part) for part in parts]).sum()
