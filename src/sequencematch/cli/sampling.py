"""Sampling flags, from the fields of `Sampling`."""

from collections.abc import Callable
from dataclasses import Field, fields
from inspect import Parameter, Signature, signature
from typing import Any

import typer

from sequencematch.policy.sampling import Sampling

#: The fields that a flag can hold: neither token ids nor a function.
FLAGS = [field.name for field in fields(Sampling) if field.name not in ("stop_tokens", "logits_processor")]


def sampling_flags(*names: str, **defaults: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command with `**sampling` a flag for each of these fields of `Sampling`, before its `--batch-size`.

    `defaults` says in words what a default is where it is not the field's: without the flag, the command gets None.
    """

    def decorate(command: Any) -> Any:
        parameters = [p for p in signature(command).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        place = [p.name for p in parameters].index("batch_size")
        flags = [_flag(field, defaults.get(field.name)) for field in fields(Sampling) if field.name in names]
        command.__signature__ = Signature(parameters[:place] + flags + parameters[place:])
        return command

    return decorate


def _flag(field: "Field[Any]", default: str | None) -> Parameter:
    value, text = field.default, field.metadata["help"]
    if default is not None:
        value, text = None, f"{text.partition(' Default:')[0]} Default: {default}."
    option = typer.Option(value, f"--{field.name.replace('_', '-')}", help=text)
    return Parameter(field.name, Parameter.POSITIONAL_OR_KEYWORD, default=option, annotation=field.type)
