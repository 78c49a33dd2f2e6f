"""Write docs/api.md: every public name with its arguments and the first sentence of its documentation.

python -m dev.api > docs/api.md
"""

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from sequencematch.data.markdown import table_lines
from sequencematch.training.config import OWN_FIELDS

#: The packages whose `__all__` is public; CONTRIBUTING.md says what that means.
PACKAGES = ("", "core", "policy", "tasks", "metrics", "training", "evaluation")
_HEAD = """# Public names

Everything that `__all__` of these packages lists, with arguments. [CONTRIBUTING.md](../CONTRIBUTING.md) says how public names
may change. `python -m dev.api > docs/api.md` writes this page, and a test compares it with the code.

Options of `SequenceMatchConfig` that are not listed are those of `transformers.TrainingArguments`. A class is explained where it is
defined, not again in packages that pass it on."""


def page() -> str:
    """The whole page."""
    return "\n\n".join([_HEAD, *map(_section, PACKAGES)]) + "\n"


def _section(package: str) -> str:
    name = f"sequencematch.{package}".rstrip(".")
    module = importlib.import_module(name)
    rows = [row for member in sorted(module.__all__) for row in _rows(f"{name}.", member, getattr(module, member))]
    return "\n".join([f"## `{name}`", "", *table_lines(("name", "what"), rows)])


def _rows(package: str, name: str, member: Any) -> Iterator[tuple[str, str]]:
    """A name and, if it is a class, its methods and properties."""
    yield f"`{name}{arguments(member)}`", summary(member)
    is_explained_here = inspect.isclass(member) and member.__module__.startswith(package)
    if not is_explained_here or package == "sequencematch." or member.__name__ == "SequenceMatchTrainer":
        return
    for base in reversed(member.__mro__):
        if base.__module__.startswith("sequencematch."):
            for inner, value in sorted(vars(base).items()):
                function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                is_own = inspect.getattr_static(member, inner, None) is value
                if inner[0] == "_" or not is_own or not inspect.getdoc(function):
                    continue
                if isinstance(function, property):
                    yield f"`{name}.{inner}`", summary(function)
                elif inspect.isfunction(function) and inner != "forward":
                    yield f"`{name}.{inner}{arguments(function)}`", summary(function)


def arguments(member: Any) -> str:
    """The names of the arguments of a function or a class, in parentheses; nothing for other values."""
    if member.__class__.__name__ == "_TypedDictMeta":
        return f"({', '.join(member.__annotations__)})"
    if not callable(member) or dataclasses.is_dataclass(type(member)):
        return ""
    if getattr(member, "__name__", "") == "SequenceMatchConfig":
        return f"(output_dir, *, {', '.join(OWN_FIELDS)})"
    try:
        parameters = inspect.signature(member).parameters.values()
    except ValueError:  # a class of Python's own
        return ""
    found, marked = [], False
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not marked:
            found.append("*")
        marked = marked or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else stars
        found.append(f"{stars}{parameter.name}")
    return f"({', '.join(found)})"


def summary(member: Any) -> str:
    """The first line of a docstring; the type of a plain value."""
    own = inspect.getdoc(member) if callable(member) or isinstance(member, property) else None
    if own is None or (not inspect.isclass(member) and own == inspect.getdoc(type(member))):
        return f"a value: {type(member).__name__}"
    return own.splitlines()[0].replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
