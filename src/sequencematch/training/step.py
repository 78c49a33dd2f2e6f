"""A training step: data and rollouts in forward passes that fit a node budget, each followed by its backward pass (Alg. 1)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sequencematch.core.encoding import Encoding, encode, fitting_row_length
from sequencematch.core.integral_metrics import IntegralMetric
from sequencematch.core.mdp import Trajectory
from sequencematch.core.transitions import Transitions, draw_transitions
from sequencematch.policy import Policy
from sequencematch.policy.fusing import Fusion
from sequencematch.training.losses import Batch

#: Smallest forward pass that saturates a GPU, in nodes.
GPU_NODES = 8192
#: Most transitions of a forward pass at which an integral metric reads the reward: it compares each with each.
POINTS = 128
#: Segments between them on which slopes of the reward are taken: each needs two rows of dense logits.
SEGMENTS = 32

#: (encoding, number of data trajectories in it) → the points of an integral metric.
Draw = Callable[[Encoding, int], Transitions]


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


def point_draw(metric: IntegralMetric, gamma: float, seed: int) -> Draw:
    """Draws the points of one optimisation step, pass by pass, from one seed."""
    generator = torch.Generator().manual_seed(seed)
    segments = SEGMENTS if metric.uses_slopes else 0

    def draw(encoding: Encoding, num_data: int) -> Transitions:
        return draw_transitions(encoding, num_data, points=POINTS, segments=segments, gamma=gamma, generator=generator)

    return draw


def encode_parts(
    data: Sequence[Trajectory],
    rollouts: Sequence[Trajectory],
    count: int,
    num_items: int,
    hidden_size: int | None,
    right: Sequence[bool | None] = (),
    draw: Draw | None = None,
) -> list[Batch]:
    """A batch in `count` parts, one per forward pass, with data and rollouts in each; `num_items` is the whole step's N.

    `right` says which rollouts ended in the right answer; None if unknown. `draw` chooses the points of an integral metric.
    Each pass has points of its own. The penalty of a step is the mean of those of its passes, weighted by their numbers of data
    trajectories: unlike Eq. 4, it depends on how the step is split.
    """
    shares = [(data[part::count], rollouts[part::count], tuple(right[part::count])) for part in range(count)]
    batches = []
    for d, r, judged in shares:
        encoding = encode_batch([*d, *r], hidden_size)
        transitions = None if draw is None else draw(encoding, len(d))
        batches.append(Batch(encoding, len(d), num_items, 1.0 if r else None, judged, transitions))
    return batches


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
