"""LoRA adapters: add one, read the rows it trains, merge it for decoding, switch off PEFT's input casts for training."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import Tensor
from torch.nn import Module

from sequencematch.policy.changes import Change


def with_adapter(model: Any, config: Any, ends: Iterable[int]) -> Any:
    """The model with a new adapter. If LoRA leaves the output layer frozen, its rows of the tokens `ends` are trained all the same.

    With a frozen row for `<eos>` a policy may learn to write and delete without end (docs/deviations.md, 16). A config that says
    what to train of the output layer is used as it is: `trainable_token_indices={}` leaves all of it frozen.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import check_target_module_exists

    layer = model.get_output_embeddings()
    place = next(name for name, module in model.named_modules() if module is layer)
    name = place.rpartition(".")[-1]
    if isinstance(config, LoraConfig) and config.trainable_token_indices is None:
        is_adapted = config.target_modules not in (None, "all-linear") and check_target_module_exists(config, place)
        if not is_adapted and name not in (config.modules_to_save or ()):
            config = replace(config, trainable_token_indices={name: sorted(ends)})
    return get_peft_model(model, config)


def without_trained_rows(layer: Any) -> Any:
    """An output layer as it was before an adapter that trains some of its rows."""
    return layer.token_adapter.base_layer if hasattr(layer, "token_adapter") else layer


def output_weight(layer: Any) -> Tensor:
    """An output layer's weight, with the rows that an adapter trains.

    PEFT's own `weight` copies the rows' numbers from the host at every read, which can't be captured as a CUDA graph.
    """
    plain = without_trained_rows(layer)
    if plain is layer:
        return cast(Tensor, layer.weight)
    weight, adapter = plain.weight.clone(), layer.token_adapter
    for name in adapter.active_adapters:
        for token, row in zip(adapter.token_indices[name], adapter.trainable_tokens_delta[name], strict=True):
            weight[token] = row.to(weight.dtype)
    return cast(Tensor, weight)


@contextmanager
def merged(model: Module) -> Iterator[None]:
    """Merge plain LoRA layers into W + s·BA: one matrix product per layer instead of three.

    Afterwards the weights are restored bit for bit from a copy, which takes memory; subtracting s·BA would round. Quantised
    layers and other kinds of adapters are not merged.
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


def without_input_casts(model: Module) -> list[Change]:
    """Changes that switch off PEFT's cast of an adapter's input to float32, which autocast would only undo."""
    layers = [layer for layer in model.modules() if getattr(layer, "cast_input_dtype_enabled", False)]
    return [Change(layer, "cast_input_dtype_enabled", False) for layer in layers]


def is_plain_lora(layer: Any) -> bool:
    """Whether a layer is W + s·BA and nothing else, unmerged and not quantised."""
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
