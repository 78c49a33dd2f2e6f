"""The run-time checker of every annotation in the package, shapes included. On in tests only."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

with_checks = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as it is for a type checker
_checked: dict[tuple[object, ...], Callable[..., Any]] = {}


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments and the result of a function without a body, which jaxtyping makes from a signature.

    It makes one for every definition, and a function inside another is defined at each call: equal ones share their checks.
    """
    key = (function.__module__, function.__qualname__, function.__code__, repr(function.__annotations__))
    if key not in _checked:
        _checked[key] = with_checks(function)
    return _checked[key]
