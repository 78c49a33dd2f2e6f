"""Policies whose weights are spread over processes by FSDP2, `torch.distributed.fsdp.fully_shard`."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module


def is_sharded(module: Module) -> bool:
    """Whether some weight is a `DTensor`, of which each process holds a part."""
    return any(hasattr(parameter, "full_tensor") for parameter in module.parameters())


@contextmanager
def whole_weights(policy: Module) -> Iterator[None]:
    """Gather a sharded policy's weights in every process, so that each can call its parts as often as it likes.

    A sharded layer asks all processes for its weights whenever it is called, and they must ask for the same ones in the same
    order: in the forward pass of the policy they do, while each rolls out its own prompts they don't. All processes must
    enter and leave together. Nothing happens to a policy that isn't sharded. Not for backward passes.
    """
    if not is_sharded(policy):
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    shards: list[Any] = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    hooks = [(shard._forward_pre_hooks, shard._forward_hooks) for shard in shards]
    for shard in shards:
        shard.unshard()
        # They would let the weights go again after each call, and note its place in an order that backward passes go by.
        shard._forward_pre_hooks, shard._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for shard, (before, after) in zip(shards, hooks, strict=True):
            shard._forward_pre_hooks, shard._forward_hooks = before, after
            shard.reshard()
