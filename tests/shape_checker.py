"""The run-time checker of every annotation in the package, shapes included. On in tests only."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeCallHintViolation

with_checks = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as it is for a type checker
_checked: dict[tuple[object, ...], Callable[..., Any]] = {}
_jaxtyped = jaxtyping.jaxtyped


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments and the result of a function without a body, which jaxtyping makes from a signature.

    It makes one for every definition, and a function inside another is defined at each call: equal ones share their checks.
    """
    key = (function.__module__, function.__qualname__, function.__code__, repr(function.__annotations__))
    if key not in _checked:
        _checked[key] = with_checks(function)
    return _checked[key]


def checked(definition: Any = None, **options: Any) -> Any:
    """`jaxtyping.jaxtyped`, less costly for functions of modules and classes: beartype checks each call of the function itself.

    jaxtyping calls two more functions for every call, and remembers the sizes of axes also where nothing has a shape.
    """
    if definition is None:
        return functools.partial(checked, **options)
    if inspect.isclass(definition):
        if "__dataclass_fields__" in vars(definition) and "__init__" in vars(definition):
            definition.__init__ = checked(definition.__init__, **options)  # type: ignore[method-assign]
        return definition
    hints = _hints(definition)
    if hints is None or "<locals>" in definition.__qualname__ or inspect.isgeneratorfunction(definition):
        return _jaxtyped(definition, **options)
    function = with_checks(definition)
    if not any(map(has_shape, hints)):
        return function

    @functools.wraps(definition)
    def with_axes_of_its_own(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with _jaxtyped("context"):
            try:
                return function(*args, **kwargs)
            except BeartypeCallHintViolation:
                jaxtyping.print_bindings()
                raise

    return with_axes_of_its_own


def has_shape(hint: Any) -> bool:
    """Whether a hint is or holds a jaxtyping array."""
    is_array = inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
    return is_array or any(map(has_shape, get_args(hint)))


def _hints(function: Callable[..., Any]) -> list[Any] | None:
    """What a function is annotated with; None if a name is known to type checkers only."""
    being_defined = dict.fromkeys(function.__qualname__.split("."), object)
    try:
        return list(inspect.get_annotations(function, locals=being_defined, eval_str=True).values())
    except NameError:
        return None
