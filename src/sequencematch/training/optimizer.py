"""A learning rate and a gradient norm of its own for the offset head, through which Eq. 4 moves V."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn


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
