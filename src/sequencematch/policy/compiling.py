"""Compiled decoder layers: one compilation that all of them share, since they differ in their weights alone."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import Module
from transformers.modeling_layers import GradientCheckpointingLayer


def compile_layers(model: Module) -> None:
    """Compile every decoder layer where it stands. Nothing is compiled before a layer is first called."""
    for layer in _layers(model):
        layer.compile()


@contextmanager
def uncompiled(model: Module) -> Iterator[None]:
    """Call the layers as they were: decoding has other shapes, and is captured as a whole."""
    compiled = [(layer, layer._compiled_call_impl) for layer in _layers(model)]
    for layer, _ in compiled:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, call in compiled:
            layer._compiled_call_impl = call


def _layers(model: Module) -> list[Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
