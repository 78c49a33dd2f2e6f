"""Context managers that prepare a policy's model for scoring, rollouts or training, and restore it afterwards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.nn import Module
from transformers.modeling_layers import GradientCheckpointingLayer

from sequencematch.policy.adapters import merged, without_input_casts
from sequencematch.policy.changes import changed, lock_of, set_training, uncompiled
from sequencematch.policy.fusing import Fusion, fused
from sequencematch.policy.sharding import whole_weights


@contextmanager
def scoring(policy: Module, model: Any) -> Iterator[None]:
    """Evaluation mode, sharded weights gathered, compiled layers uncompiled. Not for backward passes."""
    with lock_of(model), whole_weights(policy), changed([*set_training(policy, False), *uncompiled(policy.modules())]):
        yield


@contextmanager
def rollouts(policy: Module, model: Any) -> Iterator[None]:
    """As for scoring, and LoRA adapters merged into their weights."""
    with scoring(policy, model), merged(policy):
        yield


@contextmanager
def training(policy: Module, model: Any, fusions: Sequence[Fusion], *, autocast: bool) -> Iterator[None]:
    """Train mode with fused kernels; under autocast, without PEFT's input casts."""
    with lock_of(model):
        casts = without_input_casts(policy) if autocast else []
        with changed([*set_training(policy, True), *casts]), fused(fusions):
            yield


def compile_layers(model: Module) -> None:
    """Compile every decoder layer in place, at its first call. All layers share one compilation."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile()
