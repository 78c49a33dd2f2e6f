"""The loss of one batch under each objective, and the signals to log (Alg. 1, App. E)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch.core import Divergence, Encoding, IntegralMetric, Points
from sequencematch.core.objectives import (
    Scores,
    bc_loss,
    implied_reward,
    mle_loss,
    repeat_candidates,
    sequencematch_loss,
    unlikelihood_loss,
)
from sequencematch.core.transitions import Transitions, transition_distance, transition_reward
from sequencematch.training.signals import Signal


@dataclass(frozen=True)
class Batch:
    """Trajectories for one forward pass, `num_data` of data and then rollouts, with the denominators of the whole step.

    `num_items` is N, the number of data decisions in the optimisation step over all its batches and processes. `model_weight`
    is the step's number of data trajectories divided by its number of rollouts, None without rollouts. `right` says which of
    the rollouts ended in the right answer, None if unknown; it is logged and no part of a loss. `transitions` are the points at
    which an integral metric reads the reward, None for other divergences. `counts` is False where a process has nothing to add
    to a step, and only takes part in its passes.
    """

    encoding: Encoding
    num_data: int
    num_items: int
    model_weight: float | None = None
    right: tuple[bool | None, ...] = ()
    transitions: Transitions | None = None
    counts: bool = True

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        transitions = None if self.transitions is None else self.transitions.to(device)
        return replace(self, encoding=self.encoding.to(device), transitions=transitions)


@dataclass(frozen=True)
class Weights:
    """The numbers in a loss: φ, α and γ of Eq. 4, β_BC at this step, and the weight of unlikelihood beside likelihood.

    `model_value_from_data` says whether D is that of the data, and not that of rollouts. Without rollouts it must be False.
    """

    divergence: Divergence
    alpha: float
    gamma: float
    bc_weight: float = 1.0
    unlikelihood_weight: float = 1.0
    model_value_from_data: bool = False


#: (model, batch, weights) → this batch's share of the step's loss, and its signals.
Loss = Callable[[Any, Batch, Weights], tuple[Float[Tensor, ""], dict[str, Signal]]]


@dataclass(frozen=True)
class Objective:
    """A way to train: whether it uses `<bkspc>` and noise, whether it uses rollouts, and its loss."""

    deletes: bool
    rolls_out: bool
    loss: Loss


def sequencematch(model: Any, batch: Batch, weights: Weights) -> tuple[Float[Tensor, ""], dict[str, Signal]]:
    """L = β_BC L_BC + (1 − β_BC) L_SM with L_SM = −Ĵ   (App. E). Ĵ is left out while β_BC = 1."""
    scores, points = _scores_and_points(model, batch, weights.divergence)
    data = scores[: batch.num_data]
    rollouts = scores[batch.num_data :] if len(scores.length) > batch.num_data else None
    cloning = bc_loss(data, num_items=batch.num_items)
    signals = {
        "loss/bc": Signal.total(cloning),
        "bc_weight": Signal.setting(weights.bc_weight),
        **_describe("data", data, weights),
    }
    if weights.bc_weight == 1:
        return cloning, signals
    result = sequencematch_loss(
        data,
        rollouts,
        divergence=weights.divergence,
        alpha=weights.alpha,
        gamma=weights.gamma,
        num_items=batch.num_items,
        model_weight=batch.model_weight,
        model_value_from_data=weights.model_value_from_data,
        points=points,
    )
    signals |= {
        "loss/sequencematch": Signal.total(result.loss),
        "objective": Signal.total(-result.loss),
        "objective/data_reward": Signal.total(result.data_reward),
        "objective/data_tail": Signal.total(result.data_tail),
        "objective/data_value": Signal.total(result.data_value),
        "objective/model_value": Signal.total(result.model_value),
        "objective/model_penalty": Signal.total(result.model_penalty),
    }
    if points is not None:
        signals["objective/reward_penalty"] = Signal.total(result.reward_penalty)
    if rollouts is not None:
        signals |= _describe("rollouts", rollouts, weights) | _describe_ends(rollouts, batch.right)
    return weights.bc_weight * cloning + (1 - weights.bc_weight) * result.loss, signals


def bc(model: Any, batch: Batch, weights: Weights) -> tuple[Float[Tensor, ""], dict[str, Signal]]:
    """L_BC on noised data   (§6.1)."""
    data: Scores = model(batch.encoding)
    loss = bc_loss(data, num_items=batch.num_items)
    return loss, {"loss/bc": Signal.total(loss), **_describe("data", data, weights)}


def mle(model: Any, batch: Batch, weights: Weights) -> tuple[Float[Tensor, ""], dict[str, Signal]]:  # noqa: ARG001
    """L_MLE on clean data, V over the vocabulary alone   (§4)."""
    loss = mle_loss(model(batch.encoding, backspace=False), num_items=batch.num_items)
    return loss, {"loss/mle": Signal.total(loss)}


def unlikelihood(model: Any, batch: Batch, weights: Weights) -> tuple[Float[Tensor, ""], dict[str, Signal]]:
    """L_MLE + w L_UL: tokens that already occurred are made unlikely   (App. H.1; Welleck et al. 2020)."""
    data, context_log_prob = model(batch.encoding, backspace=False, context=True)
    likely = mle_loss(data, num_items=batch.num_items)
    unlikely = unlikelihood_loss(context_log_prob, repeat_candidates(batch.encoding), num_items=batch.num_items)
    signals = {"loss/mle": Signal.total(likely), "loss/unlikelihood": Signal.total(unlikely)}
    return likely + weights.unlikelihood_weight * unlikely, signals


#: Every objective by name.
OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {
        "sequencematch": Objective(deletes=True, rolls_out=True, loss=sequencematch),
        "bc": Objective(deletes=True, rolls_out=False, loss=bc),
        "mle": Objective(deletes=False, rolls_out=False, loss=mle),
        "unlikelihood": Objective(deletes=False, rolls_out=False, loss=unlikelihood),
    }
)


def _scores_and_points(model: Any, batch: Batch, divergence: Divergence) -> tuple[Scores, Points | None]:
    """The scores of a batch and, for an integral metric, its reward and geometry at the batch's transitions   (§3.2)."""
    if batch.transitions is None or not isinstance(divergence, IntegralMetric):
        return model(batch.encoding), None
    scores, landscape = model(batch.encoding, transitions=batch.transitions)
    distance = transition_distance(landscape.features, batch.transitions.action)
    slope_squared = landscape.slope_squared if divergence.uses_slopes else None
    reward = transition_reward(scores, batch.transitions)
    return scores, Points(reward, divergence.matrix_of(distance), slope_squared)


@torch.no_grad()
def _describe_ends(rollouts: Scores, right: Sequence[bool | None]) -> dict[str, Signal]:
    """V at the final states of right and of wrong rollouts: on policy, Eq. 4 teaches through the gap between the two."""
    judged = {"right": True, "wrong": False}
    return {
        f"values/rollouts/final_{name}": Signal.mean(
            rollouts.final_value[[i for i, r in enumerate(right) if r is wanted]]
        )
        for name, wanted in judged.items()
    }


@torch.no_grad()
def _describe(name: str, scores: Scores, weights: Weights) -> dict[str, Signal]:
    """Mean and spread of the implied reward over decisions (in rollouts the policy's own), and V at first and final states."""
    counts = scores.is_step if name == "data" else scores.policy_chosen
    reward = implied_reward(scores, weights.gamma)[counts]
    return {
        f"rewards/{name}/mean": Signal.mean(reward),
        f"rewards/{name}/std": Signal.std(reward),
        f"values/{name}/first": Signal.mean(scores.value[:, 0]),
        f"values/{name}/final": Signal.mean(scores.final_value),
    }
