"""Norms, rotary embeddings and adapters in fewer kernels than the model's own code takes, and the same results but for rounding."""

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional

from sequencematch.policy.merging import is_plain_lora

HALF = (torch.bfloat16, torch.float16)
ROTATION = "apply_rotary_pos_emb"  # in every file of transformers that has one
#: Rotations are functions of a model's file, which every model of its kind shares: one thread at a time replaces them.
REPLACING = threading.RLock()


@dataclass(frozen=True)
class Fusion:
    """A function by its owner and name, and what is called instead, which gets it first: to fall back to."""

    owner: Any
    name: str
    own: Callable[..., Any]
    instead: Callable[..., Any]


def fusions(model: Any) -> list[Fusion]:
    """All that can be fused in a Hugging Face model as it is now. What gives something else than the model's own is left out."""
    return [*_norms(model), *_rotations(model), *_adapters(model)]


@contextmanager
def fused(found: Sequence[Fusion]) -> Iterator[None]:
    """Call what was found in place of the model's own."""
    with REPLACING:
        before = [vars(fusion.owner).get(fusion.name) for fusion in found]
        try:
            for fusion in found:
                setattr(fusion.owner, fusion.name, partial(fusion.instead, fusion.own))
            yield
        finally:
            for fusion, held in zip(found, before, strict=True):
                if held is not None:
                    setattr(fusion.owner, fusion.name, held)
                elif fusion.name in vars(fusion.owner):
                    delattr(fusion.owner, fusion.name)


def _is_as_written(module: Module) -> bool:
    """Nobody has replaced its forward pass, or looks at what goes in or comes out."""
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


def _agree(fusion: Fusion, *probe: Tensor) -> bool:
    """Whether both give the same. They don't where one takes other arguments, or can't be run here."""
    with torch.no_grad(), suppress(Exception):
        ours, own = fusion.instead(fusion.own, *probe), fusion.own(*probe)
        pairs = zip(ours, own, strict=True) if isinstance(own, tuple) else [(ours, own)]
        return all(torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in pairs)
    return False


def _norms(model: Module) -> Iterator[Fusion]:
    """RMSNorm as one kernel of torch's instead of eight, in half precision."""
    for module in model.modules():
        epsilon: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        parameters = dict(module.named_parameters())
        is_norm = type(module).__name__.endswith("RMSNorm") and epsilon is not None and [*parameters] == ["weight"]
        if is_norm and parameters["weight"].dtype in HALF and _is_as_written(module):
            fusion = Fusion(module, "forward", module.forward, partial(_norm, module, epsilon))
            if _agree(fusion, torch.linspace(-1, 3, parameters["weight"].numel()).to(parameters["weight"])):
                yield fusion


def _norm(module: Any, epsilon: float, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.dtype != module.weight.dtype:
        return own(x)
    with torch.autocast(x.device.type, enabled=False):  # it would compute and return float32
        return functional.rms_norm(x, module.weight.shape, module.weight, epsilon)


def _rotations(model: Any) -> Iterator[Fusion]:
    """Rotary embeddings as one kernel of ours instead of five, in half precision on a GPU."""
    if model.dtype not in HALF or model.device.type != "cuda" or not importlib.util.find_spec("triton"):
        return
    probe = torch.linspace(-1, 1, 18 * 16, dtype=model.dtype, device=model.device).view(2, 3, 3, 16)
    for file in {sys.modules.get(type(module).__module__) for module in model.modules()}:
        if hasattr(file, ROTATION):
            fusion = Fusion(file, ROTATION, getattr(file, ROTATION), _rotated)
            if _agree(fusion, probe, probe, probe[:, 0], probe[:, 1]):
                yield fusion


def _rotated(own: Callable[..., tuple[Tensor, Tensor]], *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """A model's own function, replaced where tokens are turned in all their dimensions."""
    from sequencematch.policy.rotation import can_rotate, rotate

    if not options and len(args) == 4 and all(isinstance(arg, Tensor) for arg in args):
        q, k, cos, sin = args
        if can_rotate(q, cos, sin) and can_rotate(k, cos, sin) and q.dtype in HALF:
            return rotate(q, cos, sin), rotate(k, cos, sin)
    return own(*args, **options)


def _adapters(model: Module) -> Iterator[Fusion]:
    """LoRA's second product added to what the layer gives as it is computed: no pass to scale it, and none to add it."""
    for layer in model.modules():
        if is_plain_lora(layer) and all(_is_as_written(module) for module in layer.modules()):
            yield Fusion(layer, "forward", layer.forward, partial(_adapted, layer))


def _adapted(layer: Any, own: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
    """y = Wx + b + s·BAx. Adapters may have been switched since, merged or disabled."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if args or options or x.dim() < 2 or len(active) != 1 or not is_plain_lora(layer):
        return own(x, *args, **options)
    (name,) = active
    down, up = layer.lora_A[name], layer.lora_B[name]
    if not (torch.is_autocast_enabled(x.device.type) or x.dtype == down.weight.dtype == layer.weight.dtype):
        return own(x)  # PEFT takes adapters in float32 then
    rows = x.flatten(0, -2)
    y: Tensor = layer.base_layer(rows)
    low = down(layer.lora_dropout[name](rows))
    y.addmm_(low.to(y.dtype), up.weight.to(y.dtype).T, alpha=layer.scaling[name])  # nothing needs y as it was
    return y.unflatten(0, x.shape[:-1])
