"""Public names of a package, imported on first use: torch and transformers take seconds."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`; `places` says where each name is: `"module"` or `"module:name there"`."""

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = places[name].partition(":")
        return getattr(importlib.import_module(module), attribute or name)

    return get, lambda: list(sys.modules[package].__all__)
