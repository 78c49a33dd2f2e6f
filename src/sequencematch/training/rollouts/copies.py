"""A policy's copy elsewhere: its structure as bytes; its tensors travel apart, the trained ones again and again."""

import io
import operator
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from sequencematch.policy import Policy
from sequencematch.training.rollouts.weights import Layout, unpack

#: Hooks by which transformers and PEFT let gradients reach checkpointed layers. A copy needs no gradients.
_TRAINING_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
#: Attributes that a copy does without: compiled code, and the state of FSDP2.
_NOT_COPIED = ("_compiled_call_impl", "__composable_api_state_key")
#: What stands for the policy's own device.
_DEVICE = "device"


@dataclass(frozen=True)
class Kind:
    """A tensor of a policy: whether it is a parameter, whether training changes it, and whether it is on the policy's device."""

    is_parameter: bool
    is_trained: bool
    is_there: bool


@dataclass(frozen=True)
class Blueprint:
    """All of a policy but the numbers in its tensors. `kinds` and the two layouts list the tensors in order of their numbers."""

    structure: bytes
    kinds: tuple[Kind, ...]
    trained: Layout
    frozen: Layout


class _Structure(pickle.Pickler):
    """Pickles a policy with a number for each tensor."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file, protocol=5)
        self.device = device
        self.tensors: list[Tensor] = []
        self.numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | str | None:
        if isinstance(obj, torch.device) and obj == self.device:
            return _DEVICE
        if type(obj) not in (Tensor, nn.Parameter) and not hasattr(obj, "full_tensor"):
            return None
        if id(obj) not in self.numbers:
            self.numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self.numbers[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        """A module without what training hangs on it: FSDP2's class and hooks, and wrapped forward passes of the policy."""
        if getattr(obj, "__name__", "") in _TRAINING_HOOKS or _is_of_fsdp(obj):
            return operator.itemgetter(0), ((_no_hook,),)
        if not isinstance(obj, nn.Module):
            return NotImplemented
        state = {name: value for name, value in obj.__getstate__().items() if not name.startswith(_NOT_COPIED)}
        kind = type(obj)
        if _is_sharding(kind):
            kind = next(base for base in kind.__mro__ if issubclass(base, nn.Module) and not _is_sharding(base))
            state |= {name: OrderedDict() for name in ("_forward_pre_hooks", "_forward_hooks")}
        if isinstance(obj, Policy):  # accelerate puts autocast around it
            state = {name: value for name, value in state.items() if name not in ("forward", "_original_forward")}
        return _empty, (kind,), state


def _no_hook(*_: Any) -> None:
    """Takes the place of a hook that a copy does without."""


def _is_of_fsdp(obj: Any) -> bool:
    """Whether a function is one that FSDP2 hangs on modules."""
    return isinstance(obj, FunctionType) and obj.__module__.startswith("torch.distributed.fsdp")


def _is_sharding(kind: type) -> bool:
    """Whether a class is FSDP2's, or the one that it makes of a module's class."""
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


def _empty(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


class _Rebuilding(pickle.Unpickler):
    """Rebuilds a policy around tensors that are there already."""

    def __init__(self, structure: bytes, tensors: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(io.BytesIO(structure))
        self.tensors, self.device = tensors, device

    def persistent_load(self, pid: Any) -> Any:
        return self.device if pid == _DEVICE else self.tensors[pid]


def take_apart(policy: Policy) -> tuple[Blueprint, list[Tensor], list[Tensor]]:
    """A policy's blueprint, its trained tensors and its frozen ones. Trained is what has a gradient: under PEFT a small part."""
    pickled = io.BytesIO()
    structure = _Structure(pickled, policy.device)
    try:
        structure.dump(policy)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"`rollouts` must be 'inline' for a policy that can't be pickled: workers need copies of it. Got: {error}."
        ) from error
    tensors = structure.tensors
    is_trained = [tensor.requires_grad and isinstance(tensor, nn.Parameter) for tensor in tensors]
    kinds = tuple(
        Kind(isinstance(tensor, nn.Parameter), trained, tensor.device == policy.device)
        for tensor, trained in zip(tensors, is_trained, strict=True)
    )
    trained = [tensor for tensor, is_one in zip(tensors, is_trained, strict=True) if is_one]
    frozen = [tensor for tensor, is_one in zip(tensors, is_trained, strict=True) if not is_one]
    return Blueprint(pickled.getvalue(), kinds, Layout.of(trained), Layout.of(frozen)), trained, frozen


def put_together(blueprint: Blueprint, frozen: Tensor, device: torch.device) -> tuple[Policy, list[Tensor]]:
    """A policy on `device` with its frozen tensors, given as a block, and the trained ones, which are empty yet."""
    places = {True: iter(blueprint.trained.places), False: iter(blueprint.frozen.places)}
    tensors: list[Tensor] = []
    for kind in blueprint.kinds:
        dtype, shape, _ = next(places[kind.is_trained])
        made = torch.empty(shape, dtype=dtype, device=device if kind.is_there else "cpu")
        tensors.append(nn.Parameter(made, requires_grad=kind.is_trained) if kind.is_parameter else made)
    unpack(
        frozen, blueprint.frozen, [t for t, kind in zip(tensors, blueprint.kinds, strict=True) if not kind.is_trained]
    )
    policy = _Rebuilding(blueprint.structure, tensors, device).load()
    return policy, [t for t, kind in zip(tensors, blueprint.kinds, strict=True) if kind.is_trained]
