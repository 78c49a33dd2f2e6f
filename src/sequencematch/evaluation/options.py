"""A task by its name, with its options from flags."""

import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from sequencematch.data.modules import load_module
from sequencematch.data.rows import ENDINGS, ending
from sequencematch.data.settings import kinds, parse_flags, typed
from sequencematch.data.spelling import did_you_mean
from sequencematch.tasks import TASKS, Rows, Task


def find_task(name: str, flags: Sequence[str] = ()) -> Task:
    """A task of `TASKS`, a file of rows, or one of your own as `path/to/file.py:Class` or `package.module:Class`.

    Flags are its options. Text values are taken literally, all others are YAML: `--separator '# .*' --entropy '[3, 6]'`. An
    option that takes several values may be repeated: `--files a.txt --files b.txt`.
    """
    if name not in TASKS and ending(name) in ENDINGS:
        name, flags = Rows.name, ["--file", name, *flags]
    kind = TASKS[name] if name in TASKS else _own(name)
    options = {field.name: field for field in fields(kind) if field.init}  # type: ignore[arg-type]  # checked by _own
    hints = typing.get_type_hints(kind)
    given: dict[str, list[Any]] = {}
    for option, value in parse_flags(flags, {option: hints[option] for option in options}):
        given.setdefault(option, []).append(value)
    for option, values in given.items():
        if option not in options:
            near = did_you_mean(option, options) or "."
            has = f" It has {', '.join(options)}." if options else " It has none."
            raise ValueError(f"`{_flag(option)}` is not an option of the task {name}{near}{has}")
        if len(values) > 1 and not {tuple, list, Sequence} & set(kinds(hints[option])):
            raise ValueError(f"`{_flag(option)}` must be given once. Got {len(values)} values.")
    for option, field in options.items():
        if field.default is MISSING and field.default_factory is MISSING and option not in given:
            raise ValueError(f"`{_flag(option)}` must be given: the task {name} has no default for it.")
    values_of = {option: values if len(values) > 1 else values[0] for option, values in given.items()}
    return kind(**typed(values_of, hints, {option: f"`{_flag(option)}`" for option in given}))


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
    expected = f"one of {', '.join(TASKS)}, a file of rows, or one of your own as file.py:Class or package.module:Class"
    if not place:
        raise ValueError(f"`task` must be {expected}. Got {name!r}{did_you_mean(name, TASKS) or '.'}")
    module = load_module("task", place)
    kind = getattr(module, member, None)
    if not (isinstance(kind, type) and issubclass(kind, Task) and is_dataclass(kind)):
        near = did_you_mean(member, vars(module)) if kind is None else ""
        got = "has none" if kind is None else "has something else"
        raise ValueError(f"`task` must name a dataclass that is a `Task`, {member!r} here. {place} {got}{near or '.'}")
    return kind
