"""Transitions (s, a, s') of encoded trajectories as the points at which an integral metric reads the reward (§3.2).

Where chosen actions are executed, s' follows from (s, a), and a point is the paper's pair. Under noise it does not follow: the
same pair then has the reward of the token that was executed, so s' is part of the point.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sequencematch.core.encoding import Encoding
from sequencematch.core.objectives import Scores, implied_reward

#: The action of an absorbing state, which no other state has.
STAY = -1


@dataclass(frozen=True)
class Transitions:
    """Some transitions of an encoded batch, and segments between pairs of them   (§3.2).

    Point i is (s_t, a_t, s_{t+1}) of trajectory b = `trajectory[i]` at t = `step[i]`, or (s_T, `STAY`, s_T) if t is its length T.
    A segment joins two decisions; `share` is how far along it a slope of the reward is taken. `gamma` is the γ of that reward.
    """

    trajectory: Int[Tensor, "point"]
    step: Int[Tensor, "point"]
    action: Int[Tensor, "point"]
    segment: Int[Tensor, "segment 2"]
    share: Float[Tensor, "segment"]
    gamma: float

    def to(self, device: torch.device | str) -> "Transitions":
        """The same transitions on another device."""
        return Transitions(
            self.trajectory.to(device),
            self.step.to(device),
            self.action.to(device),
            self.segment.to(device),
            self.share.to(device),
            self.gamma,
        )


def draw_transitions(
    encoding: Encoding, num_data: int, *, points: int, segments: int, gamma: float, generator: torch.Generator
) -> Transitions:
    """At most `points` transitions, drawn without repeats: data decisions, the policy's own in rollouts, and all ends   (§3.2).

    The first `num_data` trajectories are data. Ω is a set of functions, not an expectation: γᵗ has no part in the draw.
    """
    if points < 2:
        raise ValueError(f"`points` must be at least 2: rewards are compared between points. Got {points}.")
    steps = encoding.chosen.shape[1]
    time = torch.arange(steps + 1)
    is_data = torch.arange(len(encoding.length)) < num_data
    is_decision = time[:-1] < encoding.length[:, None]
    counts = is_decision & (is_data[:, None] | encoding.policy_chosen)
    counts = torch.cat([counts, torch.zeros_like(counts[:, :1])], dim=1) | (time == encoding.length[:, None])
    candidates = counts.nonzero()
    trajectory, step = candidates[torch.randperm(len(candidates), generator=generator)[:points]].unbind(1)
    is_end = step == encoding.length[trajectory]
    action = torch.where(is_end, STAY, encoding.chosen[trajectory, step.clamp(max=steps - 1)])
    decisions = (~is_end).nonzero().squeeze(1)
    count = segments if len(decisions) else 0
    ends = torch.randint(max(len(decisions), 1), (count, 2), generator=generator)
    share = torch.rand(count, generator=generator)
    return Transitions(trajectory, step, action, decisions[ends], share, gamma)


def transition_reward(scores: Scores, transitions: Transitions) -> Float[Tensor, "point"]:
    """r(s, a, s') = ℓ(a|s) − γ V(s'), and (1 − γ) V(s_T) in the absorbing state   (§3.2.1)."""
    gamma, at = transitions.gamma, (transitions.trajectory, transitions.step)
    reward = implied_reward(scores, gamma)
    of_decision = reward[at[0], at[1].clamp(max=reward.shape[1] - 1)]
    return torch.where(transitions.action == STAY, (1 - gamma) * scores.value[at], of_decision)


def transition_distance(
    features: Float[Tensor, "point feature"], action: Int[Tensor, "point"]
) -> Float[Tensor, "point point"]:
    """d = ‖z_i − z_j‖ + 1[a_i ≠ a_j], a metric on (state, action)   (§3.2).

    `features` z stand for s and s'. No gradient passes: Ω is fixed while the reward moves in it, and a network could otherwise
    satisfy every Ω by moving states apart. Differences are taken in float64, one by one, so that equal states have distance 0.
    """
    apart = features.detach().to(torch.float64)
    between = torch.cdist(apart, apart, compute_mode="donot_use_mm_for_euclid_dist")
    return between + (action[:, None] != action)


def segment_slopes(
    reward: Callable[[Float[Tensor, "segment feature"]], Float[Tensor, "segment"]],
    features: Float[Tensor, "point feature"],
    transitions: Transitions,
) -> Float[Tensor, "segment"]:
    """‖∇_z r‖² at z = (1 − u) z_i + u z_j on the segments from i to j, u being `share`   (§3.2).

    Differentiable in the weights of `reward`. z itself is held fixed, as in `transition_distance`.
    """
    start, end = features.detach()[transitions.segment].unbind(1)
    between = torch.lerp(start, end, transitions.share[:, None].to(start.dtype)).requires_grad_()
    (slope,) = torch.autograd.grad(reward(between).sum(), between, create_graph=True)
    return (slope**2).sum(1)
