"""Settings from YAML files and flags, converted to the types that a dataclass gives them. Errors name the file and the line.

Not `HfArgumentParser`, which keeps `1e-4` as text, nor `TrlParser`, which accepts a name twice and whose errors have neither
file and line nor a suggested spelling.
"""

import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sequencematch.data.spelling import did_you_mean

_NAMES = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    list: "a list",
    tuple: "a list such as [3, 10]",
    Sequence: "a list such as [3, 10]",
}
_TEXT = {str, Path, tuple, Sequence, types.NoneType}  # a flag of these types holds text; it is repeated for several
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class _Loader(yaml.SafeLoader):
    """Words as YAML 1.2 reads them: `1e-4` is a number, `no` (as in `save_strategy: no`) and `2024-05-01` are text.

    Aliases are refused: ten lines of them stand for gigabytes.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node, unless it is an alias."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"an alias (*{event.anchor}) is not read here; write the value out", event.start_mark
            )
        return super().compose_node(parent, index)


_BOOL, _FLOAT, _DATE = (f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "timestamp"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag not in (_BOOL, _FLOAT, _DATE)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"([-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+.0123456789"),
)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings in a file, and for each the place that an error names: setting, file and line."""
    expected = f"{path} must hold settings in YAML, one `name: value` a line"
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{expected} and in UTF-8. Got something else: {error}.") from error
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            got = "nothing" if node is None else "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            raise ValueError(f"{expected}. Got {got}.")
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if lines.setdefault(str(key.value), line) != line:
                raise ValueError(f"{expected}. Got `{key.value}` twice, in lines {lines[key.value]} and {line}.")
        settings = {str(key): value for key, value in loader.construct_document(node).items()}
        return settings, {key: f"`{key}` in {path}, line {lines.get(key, 1)}," for key in settings}
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = "" if mark is None else f"In line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{expected}. {place}{problem or error}.") from error
    finally:
        loader.dispose()


def parse_flags(words: Sequence[str], known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings in `--learning-rate 1e-4 --packing --no-bf16 --peft.r=16`, in order.

    Text is taken literally where a setting can only be text; other values are YAML. A flag without a value is true.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ValueError(
                f"{word!r} must be a flag, or follow one as in `--learning-rate 1e-4`. It does neither. Several values of an "
                f"option are given by repeating its flag: --files a --files b."
            )
        name, has_value, text = word[2:].partition("=")
        key = name.replace("-", "_")
        wanted = set(kinds(known.get(key)))
        if not has_value and rest and not rest[0].startswith("--"):
            has_value, text = "=", rest.pop(0)
        if has_value and text in ("null", "None") and types.NoneType in wanted:  # help texts say None, as Python does
            yield key, None
        elif has_value and wanted & {str, Path} and wanted <= _TEXT:
            yield key, text
        elif has_value:
            try:
                yield key, yaml.load(text, _Loader)
            except yaml.YAMLError as error:
                raise ValueError(f"`--{name}` must have a value that is YAML. Got {text!r}.") from error
        elif key in known and bool not in wanted:
            raise ValueError(f"`--{name}` must have a value. Got none.")
        elif key not in known and bool in kinds(known.get(key.removeprefix("no_"))):
            yield key.removeprefix("no_"), False
        else:
            yield key, True


def override(settings: Mapping[str, Any], places: Mapping[str, str], flags: Mapping[str, Any]) -> Any:
    """Settings and their places, overridden by flags; `peft.r` is the `r` in `peft`."""
    settings, places = dict(settings), dict(places)
    for name, value in flags.items():
        key, _, part = name.partition(".")
        inside = settings.get(key)
        settings[key] = {**(inside if isinstance(inside, dict) else {}), part: value} if part else value
        places[name] = f"`--{name.replace('_', '-')}`"
        places.setdefault(key, places[name])
    return settings, places


def typed(settings: Mapping[str, Any], known: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    """Every setting converted to its type, or a `ValueError` for the first that is unknown or can't be converted."""
    for key in settings:
        if key not in known:
            near = did_you_mean(key, known) or "."
            raise ValueError(f"{places[key]} is not a setting{near} See `sequencematch train --help`.")
    return {key: _convert(value, known[key], places[key]) for key, value in settings.items()}


def kinds(annotation: Any) -> list[Any]:
    """The types a value may have: those of a union, `list` for `list[str]`, `str` for a `Literal` of words."""
    found: list[Any] = []
    for part in _parts(annotation):
        if typing.get_origin(part) is typing.Literal:
            found += [type(choice) for choice in typing.get_args(part)]
        else:
            found.append(typing.get_origin(part) or part)
    return list(dict.fromkeys(found))


def _parts(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _convert(value: Any, annotation: Any, place: str) -> Any:
    """The value as one of the annotation's types: `3` may be 3.0, `1e3` may be 1000, `"1e-4"` a number, `yes` true."""
    wanted = kinds(annotation)
    if type(value) in wanted or Any in wanted:
        return value
    several = next((part for part in _parts(annotation) if typing.get_origin(part) in (tuple, Sequence)), None)
    if isinstance(value, list) and several is not None:
        inner = typing.get_args(several)
        inner = inner[:1] * len(value) if typing.get_origin(several) is Sequence or inner[-1] is ... else inner
        if len(inner) != len(value):
            raise ValueError(f"{place} must be a list of {len(inner)}. Got {value!r}.")
        return tuple(_convert(item, kind, place) for item, kind in zip(value, inner, strict=True))
    if isinstance(value, str) and Path in wanted:
        return Path(value)
    if bool in wanted and isinstance(value, str) and value.lower() in _TRUTH:
        return _TRUTH[value.lower()]
    number = _number(value)
    if number is not None and float in wanted:
        return number
    if number is not None and int in wanted and number.is_integer():
        return int(number)
    if number is not None and str in wanted:
        return str(value)
    expected = " or ".join(_NAMES[kind] for kind in wanted if kind in _NAMES)
    raise ValueError(f"{place} must be {expected or 'left out'}. Got {'nothing' if value is None else repr(value)}.")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
