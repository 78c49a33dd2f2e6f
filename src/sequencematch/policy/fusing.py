"""Fused kernels for norms, rotary embeddings and adapters: fewer passes over memory, the same results up to rounding."""

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

from sequencematch.policy.adapters import is_plain_lora
from sequencematch.policy.changes import Change, changed

HALF = (torch.bfloat16, torch.float16)
ROTATION = "apply_rotary_pos_emb"  # the function's name in every model file of transformers
#: Held while functions are replaced: all models of a kind share the rotary embedding of their file in transformers.
REPLACING = threading.RLock()


@dataclass(frozen=True)
class Fusion:
    """A replacement for the function `owner.name`; it receives the original, `own`, as its first argument."""

    owner: Any
    name: str
    own: Callable[..., Any]
    replacement: Callable[..., Any]


def fusions(model: Any) -> list[Fusion]:
    """All fusions that fit a Hugging Face model now. A fusion whose results differ from the model's own is left out."""
    return [*_norms(model), *_rotations(model), *_adapters(model)]


@contextmanager
def fused(found: Sequence[Fusion]) -> Iterator[None]:
    """Call the replacements instead of the model's own functions."""
    with REPLACING, changed([Change(f.owner, f.name, partial(f.replacement, f.own)) for f in found]):
        yield


def _is_as_written(module: Module) -> bool:
    """Whether a module has its class's forward pass and no hooks."""
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


def _agree(fusion: Fusion, *probe: Tensor) -> bool:
    """Whether replacement and original give the same on a probe. An error counts as no: other arguments, or no such kernel here."""
    with torch.no_grad(), suppress(Exception):
        ours, own = fusion.replacement(fusion.own, *probe), fusion.own(*probe)
        pairs = zip(ours, own, strict=True) if isinstance(own, tuple) else [(ours, own)]
        return all(torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in pairs)
    return False


def _norms(model: Module) -> Iterator[Fusion]:
    """RMSNorm as one torch kernel instead of eight: in half precision, and on a GPU in float32, too."""
    for module in model.modules():
        epsilon: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        parameters = dict(module.named_parameters())
        is_norm = type(module).__name__.endswith("RMSNorm") and epsilon is not None and [*parameters] == ["weight"]
        if is_norm and _has_kernel(parameters["weight"]) and _is_as_written(module):
            fusion = Fusion(module, "forward", module.forward, partial(_norm, module, epsilon))
            if _agree(fusion, torch.linspace(-1, 3, parameters["weight"].numel()).to(parameters["weight"])):
                yield fusion


def _has_kernel(weight: Tensor) -> bool:
    return weight.dtype in HALF or (weight.is_cuda and weight.dtype == torch.float32)


def _norm(module: Any, epsilon: float, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.dtype != module.weight.dtype:
        return own(x)
    with torch.autocast(x.device.type, enabled=False):  # autocast would compute and return float32
        return functional.rms_norm(x, module.weight.shape, module.weight, epsilon)


def _rotations(model: Any) -> Iterator[Fusion]:
    """Rotary embeddings as one Triton kernel instead of five torch kernels, of queries and keys in half precision on a GPU.

    Under autocast a model in float32 has such queries and keys, too.
    """
    if model.device.type != "cuda" or not importlib.util.find_spec("triton"):
        return
    dtype = model.dtype if model.dtype in HALF else torch.bfloat16
    probe = torch.linspace(-1, 1, 18 * 16, dtype=dtype, device=model.device).view(2, 3, 3, 16)
    for file in {sys.modules.get(type(module).__module__) for module in model.modules()}:
        if hasattr(file, ROTATION):
            fusion = Fusion(file, ROTATION, getattr(file, ROTATION), _rotated)
            if _agree(fusion, probe, probe, probe[:, 0], probe[:, 1]):
                yield fusion


def _rotated(own: Callable[..., tuple[Tensor, Tensor]], *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Fused where all dimensions of queries and keys are rotated, the model's own function elsewhere.

    By angles in float32 the model's own function gives float32, which attention rounds to queries' dtype under autocast alone.
    """
    from sequencematch.policy.rotation import can_rotate, rotate

    if not options and len(args) == 4 and all(isinstance(arg, Tensor) for arg in args):
        q, k, cos, sin = args
        rounds = cos.dtype == q.dtype or torch.is_autocast_enabled(q.device.type)
        if can_rotate(q, cos, sin) and can_rotate(k, cos, sin) and q.dtype in HALF and rounds:
            return rotate(q, cos, sin), rotate(k, cos, sin)
    return own(*args, **options)


def _adapters(model: Module) -> Iterator[Fusion]:
    """LoRA's second product accumulated into the layer's output: no separate passes to scale and to add it."""
    for layer in model.modules():
        if is_plain_lora(layer) and all(_is_as_written(module) for module in layer.modules()):
            yield Fusion(layer, "forward", layer.forward, partial(_adapted, layer))


def _adapted(layer: Any, own: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
    """y = Wx + b + s·BAx; PEFT's own forward where adapters were switched, merged or disabled since."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if args or options or x.dim() < 2 or len(active) != 1 or not is_plain_lora(layer):
        return own(x, *args, **options)
    (name,) = active
    down, up = layer.lora_A[name], layer.lora_B[name]
    if not (torch.is_autocast_enabled(x.device.type) or x.dtype == down.weight.dtype == layer.weight.dtype):
        return own(x)  # PEFT computes adapters in float32 then
    rows = x.flatten(0, -2)
    y: Tensor = layer.base_layer(rows)
    low = down(layer.lora_dropout[name](rows))
    y.addmm_(low.to(y.dtype), up.weight.to(y.dtype).T, alpha=layer.scaling[name])  # no backward pass needs the old y
    return y.unflatten(0, x.shape[:-1])
