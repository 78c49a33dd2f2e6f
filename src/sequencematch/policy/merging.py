"""LoRA adapters added to the weights they adapt, for as long as nothing is trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module


@contextmanager
def merged(model: Module) -> Iterator[None]:
    """One matrix product per layer instead of three. Afterwards the weights are put back, not subtracted from: bit by bit.

    Takes a copy of the adapted weights meanwhile. Layers that are quantised or adapted otherwise stay as they are.
    """
    layers: list[Any] = [layer for layer in model.modules() if is_plain_lora(layer)]
    saved = [layer.get_base_layer().weight.detach().clone() for layer in layers]
    try:
        for layer in layers:
            layer.merge()
        yield
    finally:
        for layer, weight in zip(layers, saved, strict=True):
            layer.get_base_layer().weight.data.copy_(weight)
            layer.merged_adapters.clear()


@contextmanager
def without_input_casts(model: Module) -> Iterator[None]:
    """Under autocast, keep PEFT from casting what goes into an adapter to the adapter's float32: autocast would cast it back."""
    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "cast_input_dtype_enabled", False)]
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.cast_input_dtype_enabled = True


def is_plain_lora(layer: Any) -> bool:
    """Whether a layer is W + s·BA and nothing else, apart from its weight and not quantised."""
    if not hasattr(layer, "lora_A"):
        return False
    from peft.tuners.lora import Linear

    return (
        type(layer) is Linear
        and not layer.merged
        and not layer.disable_adapters
        and not layer.lora_variant
        and not any(layer.lora_bias.values())
        and layer.get_base_layer().weight.is_floating_point()
    )
