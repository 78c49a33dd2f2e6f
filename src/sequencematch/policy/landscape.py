"""Transitions as points in the space of hidden vectors, and how steep the reward is between them (§3.2).

An integral metric needs a geometry of (state, action). The coordinates of a state are its last hidden vector.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sequencematch.core.transitions import Transitions, segment_slopes


@dataclass(frozen=True)
class Landscape:
    """Features z of transitions, without a gradient, and ‖∇_z r‖² on the segments between them   (§3.2)."""

    features: Float[Tensor, "point feature"]
    slope_squared: Float[Tensor, "segment"]


def landscape(
    hidden: Float[Tensor, "node hidden"],
    visit: Int[Tensor, "batch state"],
    position_ids: Int[Tensor, "node"],
    transitions: Transitions,
    *,
    action_logits: Callable[[Float[Tensor, "segment hidden"]], Float[Tensor, "segment action"]],
    offset: Callable[[Float[Tensor, "segment hidden"], Int[Tensor, "segment"]], Float[Tensor, "segment"]],
) -> Landscape:
    """z = [h(s); h(s')]/√d for each transition, and slopes of r = ℓ(a|h) − γ V(h') between two z   (§3.2).

    d is the width: a normalised hidden vector has a length of about √d. `visit[b, t]` is the row of `hidden` of state s_t. A
    segment has the action and the positions of its first end. Slopes are those of the output layer (`action_logits`) and the
    offset head (`offset`). Only these get a gradient from slopes; the network below gets its own from rewards at points.
    """
    width = hidden.shape[1]
    last = visit.shape[1] - 1
    state = visit[transitions.trajectory, transitions.step]
    state_next = visit[transitions.trajectory, (transitions.step + 1).clamp(max=last)]
    fixed = hidden.detach().to(torch.promote_types(hidden.dtype, torch.float32)) / math.sqrt(width)
    features = torch.cat([fixed[state], fixed[state_next]], dim=1)

    first = transitions.segment[:, 0]
    action = transitions.action[first, None]
    position, position_next = position_ids[state[first]], position_ids[state_next[first]]

    def reward(z: Float[Tensor, "segment feature"]) -> Float[Tensor, "segment"]:
        here, after = (math.sqrt(width) * part.to(hidden.dtype) for part in z.chunk(2, dim=1))
        logit = action_logits(here).gather(1, action).squeeze(1) + offset(here, position)
        value = action_logits(after).logsumexp(1) + offset(after, position_next)
        return logit - transitions.gamma * value

    return Landscape(features, segment_slopes(reward, features, transitions))
