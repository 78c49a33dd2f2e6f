"""Policies whose weights are spread over processes by FSDP2, `torch.distributed.fsdp.fully_shard`."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

from sequencematch.policy.changes import Change, changed


def is_sharded(module: Module) -> bool:
    """Whether some weight is a `DTensor`, of which each process holds a shard."""
    return any(hasattr(parameter, "full_tensor") for parameter in module.parameters())


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
