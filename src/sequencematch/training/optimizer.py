"""A learning rate and a gradient norm of its own for the offset head, through which Eq. 4 moves V."""

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from sequencematch.training.signals import Signal


def split_off(optimizer: torch.optim.Optimizer, parameters: Collection[nn.Parameter], multiplier: float) -> None:
    """Move `parameters` into groups of their own at the end, with the learning rate times `multiplier`.

    A group is split in two, so weight decay and all other options stay as they were. For a new optimizer without a scheduler: a
    scheduler started afterwards multiplies both learning rates.
    """
    for group in list(optimizer.param_groups):
        own, rest = partition(group["params"], parameters)
        if own:
            group["params"] = rest
            optimizer.param_groups.append({**group, "params": own, "lr": multiplier * group["lr"]})


def partition(
    parameters: Iterable[nn.Parameter], wanted: Collection[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Those that are among `wanted`, and the others; tensors are told apart by identity."""
    ids, found = {id(parameter) for parameter in wanted}, list(parameters)
    return [p for p in found if id(p) in ids], [p for p in found if id(p) not in ids]


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their common norm is at most `max_norm`, and return the norm before that."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class SeparateOffsetHead(Trainer):
    """A trainer whose `offset_lr_multiplier`, if it is not 1, gives the offset head a learning rate and a clipping of its own."""

    args: Any
    model: Any
    signals: Any

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As in transformers, with the offset head in a group of its own if its learning rate is another."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self.args.offset_lr_multiplier != 1:
            split_off(optimizer, self.model.backspace.offset_parameters(), self.args.offset_lr_multiplier)
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        if self.args.offset_lr_multiplier == 1:
            return super()._clip_grad_norm(model)
        return self._clip_apart(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and self.args.offset_lr_multiplier != 1:  # `max_grad_norm` is 0
            grad_norm = self._clip_apart(math.inf)
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _clip_apart(self, max_norm: float) -> Any:
        """Clip the offset head's gradient and that of the rest, each by its own norm; log the first, return the second.

        If the first is not finite it is returned, so that the run stops.
        """
        head, rest = partition(self.model.parameters(), self.model.backspace.offset_parameters())
        norm = self.accelerator.clip_grad_norm_(rest, max_norm)  # in float16 this unscales the head's gradient, too
        own = clip(head, max_norm)
        self.signals.add({"grad_norm/offset": Signal.mean(own[None])})
        return norm if bool(own.isfinite()) else own
