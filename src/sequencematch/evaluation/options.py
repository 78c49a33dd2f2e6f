"""A task by its name, with its options from flags."""

import importlib
import importlib.util
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any

from sequencematch.data.settings import kinds, parse_flags, typed
from sequencematch.data.spelling import did_you_mean
from sequencematch.tasks import TASKS, Task

_SEVERAL = (tuple, list, Sequence)


def find_task(name: str, flags: Sequence[str] = ()) -> Task:
    """A task of `TASKS`, or one of your own as `path/to/file.py:Class` or `package.module:Class`, with options from flags.

    Text values are taken literally, all others are YAML: `--separator '# .*' --entropy '[3, 6]'`. An option that takes several
    values may be repeated: `--files a.txt --files b.txt`.
    """
    kind = TASKS[name] if name in TASKS else _own(name)
    options = {field.name: field for field in fields(kind) if field.init}  # type: ignore[arg-type]  # checked by _own
    hints = typing.get_type_hints(kind)
    given = _given(flags, {option: hints[option] for option in options})
    for option in given:
        if option not in options:
            near = did_you_mean(option, options) or "."
            has = f" It has {', '.join(options)}." if options else " It has none."
            raise ValueError(f"`{_flag(option)}` is not an option of the task {name}{near}{has}")
    for option, field in options.items():
        if field.default is MISSING and field.default_factory is MISSING and option not in given:
            raise ValueError(f"`{_flag(option)}` must be given: the task {name} has no default for it.")
    return kind(**{option: _convert(values, hints[option], _flag(option)) for option, values in given.items()})


def explained(kind: type[Task]) -> list[tuple[str, str]]:
    """A task's options as flags, with their help texts."""
    return [_explained(field) for field in fields(kind)]  # type: ignore[arg-type]  # a task is a dataclass


def _explained(field: "Field[Any]") -> tuple[str, str]:
    default = f" [default: {field.default}]" if field.default not in (None, (), "", MISSING) else ""
    return _flag(field.name), field.metadata.get("help", "") + default


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _own(name: str) -> type[Task]:
    place, _, member = name.rpartition(":")
    expected = f"one of {', '.join(TASKS)}, or one of your own as file.py:Class or package.module:Class"
    if not place:
        raise ValueError(f"`task` must be {expected}. Got {name!r}{did_you_mean(name, TASKS) or '.'}")
    module = _module(place)
    kind = getattr(module, member, None)
    if not (isinstance(kind, type) and issubclass(kind, Task) and is_dataclass(kind)):
        near = did_you_mean(member, vars(module)) if kind is None else ""
        got = "has none" if kind is None else "has something else"
        raise ValueError(f"`task` must name a dataclass that is a `Task`, {member!r} here. {place} {got}{near or '.'}")
    return kind


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module exists, but one of its imports does not
            raise ValueError(f"`task` must be in a file or a module. Got {place}: {error}.") from error
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"`task` must be in a file that is there. Got {place}.")
    spec = importlib.util.spec_from_file_location(f"task in {place}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve annotations there
    spec.loader.exec_module(module)
    return module


def _given(flags: Sequence[str], known: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Each option's values, as often as it was given."""
    groups: list[list[str]] = []
    for word in flags:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    given: dict[str, list[Any]] = {}
    for group in groups:
        name, has_value, text = group[0].removeprefix("--").partition("=")
        option, values = name.replace("-", "_"), [text] if has_value else group[1:2]
        astray = group[1 if has_value else 2 :] if group[0].startswith("--") else group
        if astray:
            raise ValueError(
                f"{astray[0]!r} must be a flag, or follow one. An option that takes several values is repeated: "
                f"--files a --files b."
            )
        is_text = bool({str, Path} & set(kinds(known.get(option)))) and len(values) == 1
        # Help texts say None, as in Python; YAML writes null.
        words = [f"--{name}={'null' if value == 'None' else value}" for value in values] or group
        for key, value in ({option: values[0]} if is_text else parse_flags(words, known)).items():
            given.setdefault(key, []).append(value)
    return given


def _convert(values: list[Any], annotation: Any, place: str) -> Any:
    """One value, or several as a tuple or list, converted to the option's types."""
    is_union = typing.get_origin(annotation) in (typing.Union, UnionType)
    parts = typing.get_args(annotation) if is_union else (annotation,)
    several = next((part for part in parts if (typing.get_origin(part) or part) in _SEVERAL), None)
    if len(values) > 1 and several is None:
        raise ValueError(f"`{place}` must be given once. Got {len(values)} values.")
    value = values if len(values) > 1 else values[0]
    if several is None or type(value) in set(kinds(annotation)) - {list}:
        return _one(value, annotation, place)
    inner = typing.get_args(several) or (Any, ...)
    is_fixed = typing.get_origin(several) is tuple and inner[-1] is not ...
    if not isinstance(value, list) or (is_fixed and len(value) != len(inner)):
        expected = f"a list of {len(inner)}" if is_fixed else "a list"
        raise ValueError(f"`{place}` must be {expected}, as in {place} '[3, 10]'. Got {value!r}.")
    kinds_of_items = inner if is_fixed else inner[:1] * len(value)
    items = [_one(item, kind, place) for item, kind in zip(value, kinds_of_items, strict=True)]
    return items if typing.get_origin(several) is list else tuple(items)


def _one(value: Any, annotation: Any, place: str) -> Any:
    if isinstance(value, str) and Path in kinds(annotation) and str not in kinds(annotation):
        return Path(value)
    return typed({"": value}, {"": annotation}, {"": f"`{place}`"})[""]
