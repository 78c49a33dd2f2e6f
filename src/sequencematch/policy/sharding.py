"""Policies whose weights are spread over processes by FSDP2, `torch.distributed.fsdp.fully_shard`."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from sequencematch.policy.changes import Change, changed


def is_sharded(module: Module) -> bool:
    """Whether some weight is a `DTensor`, of which each process holds a shard."""
    return any(hasattr(parameter, "full_tensor") for parameter in module.parameters())


def gathered(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Shards put together, one tensor after another, in the memory of the first process; values that aren't sharded stay.

    Every process must call this. The others get their shards' places in the mapping, with empty tensors.
    """
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    found = dict(tensors)
    for name, tensor in tensors.items():
        if hasattr(tensor, "full_tensor"):
            whole = tensor.full_tensor()
            found[name] = whole.cpu() if is_first else whole.new_empty(0, device="cpu")
    return found


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a tensor that every process has, laid out as `like`; the tensor itself if that isn't sharded."""
    mesh, placements = (getattr(like, name, None) for name in ("device_mesh", "placements"))
    if mesh is None or placements is None:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), mesh, placements, src_data_rank=None)


@contextmanager
def whole_weights(policy: Module) -> Iterator[None]:
    """Gather a sharded policy's weights in every process, so that each may call layers in an order of its own.

    A sharded layer gathers its weights at every call, and all processes must make the same calls in the same order. They do in
    the policy's forward pass; they don't while each rolls out its own prompts. All processes must enter and leave together. Nothing
    changes for a policy that isn't sharded. Not for backward passes.
    """
    if not is_sharded(policy):
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    shards: list[Any] = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for shard in shards:
        shard.unshard()
    # The hooks would free the weights after each call, and record its place in the order of backward passes.
    hooks = [
        Change(shard, name, OrderedDict()) for shard in shards for name in ("_forward_pre_hooks", "_forward_hooks")
    ]
    try:
        with changed(hooks):
            yield
    finally:
        for shard in shards:
            shard.reshard()
