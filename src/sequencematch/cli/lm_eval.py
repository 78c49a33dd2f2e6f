"""`sequencematch lm-eval`."""

import importlib.util
import inspect
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from sequencematch.extras import require

#: The command's own name of our model, and the size of its batches where none is given: lm-eval's default is 1.
MODEL, BATCH_SIZE = "sequencematch", 64
_COMMANDS = ("run", "ls", "validate")


def lm_eval(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT]...")] = None,
) -> None:
    """Run lm-eval, EleutherAI's evaluation harness, on a policy. All flags are lm-eval's.

    \b
        sequencematch lm-eval --model_args pretrained=out/run/final,search=True --tasks gsm8k
        sequencematch lm-eval ls tasks

    Needs pip install 'sequencematch[lm-eval]'.
    """
    if {"--help", "-h"} & {*(arguments or ("--help",))} and importlib.util.find_spec("lm_eval") is None:
        typer.echo((inspect.getdoc(lm_eval) or "").replace("\b\n", ""))
        return
    require("lm_eval", "lm-eval", "`sequencematch lm-eval`")
    importlib.import_module(
        "sequencematch.evaluation.harness"
    )  # registers the model: lm-eval finds no plugins by itself
    sys.argv = ["sequencematch lm-eval", *completed(arguments or ())]
    importlib.import_module("lm_eval.__main__").cli_evaluate()


def completed(arguments: Sequence[str]) -> list[str]:
    """lm-eval's arguments, with our model and a batch size where neither is named."""
    command, *rest = arguments or ("--help",)
    if command not in _COMMANDS:
        command, rest = ("run", [command, *rest]) if command not in ("--help", "-h") else (command, rest)
    names = {argument.partition("=")[0] for argument in rest}
    if command != "run" or names & {"--help", "-h", "--config", "-C"}:
        return [command, *rest]
    model = [] if names & {"--model", "-M"} else ["--model", MODEL]
    batch_size = [] if names & {"--batch_size", "-b"} else ["--batch_size", str(BATCH_SIZE)]
    return [command, *model, *batch_size, *rest]
