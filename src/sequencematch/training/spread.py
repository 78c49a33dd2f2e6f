"""How accelerate spreads a run over processes: DDP, FSDP2, or DeepSpeed's ZeRO up to stage 2; what else there is, is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator, DistributedType

from sequencematch.training.config import SequenceMatchConfig


def check_spread(accelerator: Accelerator, args: SequenceMatchConfig) -> None:
    """Refuse ways to spread weights that rollouts can't gather them from, and settings that DeepSpeed's engine would ignore."""
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("`fsdp_version` must be 2: rollouts gather the weights, which FSDP 1 flattens. Got 1.")
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return
    stage = accelerator.state.deepspeed_plugin.zero_stage
    if stage > 2:
        raise ValueError(
            f"`deepspeed` must use ZeRO stage 0, 1 or 2: rollouts and the `<bkspc>` row need whole weights. Got stage {stage}. To "
            f"shard weights use FSDP2."
        )
    if args.offset_lr_multiplier != 1:
        raise ValueError(
            f"`offset_lr_multiplier` must be 1 with `deepspeed`, which clips all gradients together. Got "
            f"{args.offset_lr_multiplier}."
        )


@contextmanager
def unsynced(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Gradients of the backward pass inside are kept for one that follows; DeepSpeed would update the weights after each."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        with accelerator.no_sync(model):
            yield
        return
    state = accelerator.gradient_state
    ends_step = state.sync_gradients
    state._set_sync_gradients(False)
    try:
        yield
    finally:
        state._set_sync_gradients(ends_step)
