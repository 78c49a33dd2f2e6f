"""Temporary changes to a model: attributes are set and restored, under the model's lock.

Needs torch alone: `Policy.export` writes this file beside a checkpoint.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

_ABSENT = object()
_LOCKS: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
_NEW_LOCK = threading.Lock()


class Change(NamedTuple):
    """An attribute to set: `setattr(owner, name, value)`."""

    owner: Any
    name: str
    value: Any


def lock_of(model: Any) -> Any:
    """The model's re-entrant lock. Every forward pass holds it, and so does whoever changes the model.

    A generator must release it before it yields results: a paused stream would block every other thread.
    """
    with _NEW_LOCK:
        return _LOCKS.setdefault(model, threading.RLock())


@contextmanager
def changed(changes: Iterable[Change]) -> Iterator[None]:
    """Set attributes; on exit restore their old values, in reverse order. The caller holds the model's lock."""
    done: list[Change] = []
    try:
        for owner, name, value in changes:
            is_property = isinstance(getattr(type(owner), name, None), property)
            held = getattr(owner, name) if is_property else vars(owner).get(name, _ABSENT)
            done.append(Change(owner, name, held))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, held in reversed(done):
            if held is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, held)


def set_training(model: Any, training: bool) -> list[Change]:
    """Train or evaluation mode for a model and all modules inside."""
    return [Change(module, "training", training) for module in model.modules() if module.training is not training]


def uncompiled(layers: Iterable[Any]) -> list[Change]:
    """Run compiled layers without their compiled code: decoding has other shapes."""
    return [Change(layer, "_compiled_call_impl", None) for layer in layers if layer._compiled_call_impl is not None]


@contextmanager
def decoding(model: Any, attention: str | None = None, compiled: Sequence[Any] = ()) -> Iterator[None]:
    """The state for one forward pass of a decoder: evaluation mode, `compiled` layers uncompiled, attention for one new token.

    `attention` names an implementation. By default it is the model's own, or SDPA in place of FlexAttention, whose block masks
    don't pay for one token.
    """
    with lock_of(model):
        config = model.config
        wanted = attention or ("sdpa" if config._attn_implementation == "flex_attention" else None)
        changes = uncompiled(compiled)
        if wanted is not None:
            changes.append(Change(config, "_attn_implementation", wanted))
        if model.training:
            changes += set_training(model, False)
        with changed(changes):
            yield
