"""Write the reference pages from the code: docs/settings.md, docs/metrics.md and docs/commands.md.

python dev/reference.py

tests/test_site.py fails where a page differs from what this writes.
"""

import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import typer
from transformers import TrainingArguments
from typer.testing import CliRunner

from sequencematch.cli import app
from sequencematch.data.markdown import table_lines
from sequencematch.evaluation.registry import METRICS
from sequencematch.policy.sampling import Sampling
from sequencematch.tasks import TASKS
from sequencematch.training.config import OWN_FIELDS, SequenceMatchConfig
from sequencematch.training.presets import PRESETS
from sequencematch.training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
MADE = "<!-- Written by dev/reference.py from the code. Change the help texts there, then run it again. -->"
#: Headings of docs/settings.md → the fields of `SequenceMatchConfig` that begin each group; a group goes on until the next begins.
GROUPS: Mapping[str, str] = types.MappingProxyType(
    {
        "objective": "Objective",
        "noise_rate": "Noise",
        "bc_steps": "Schedule",
        "offset_lr_multiplier": "Offset head",
        "correction_rate": "Rollouts",
        "max_length": "Rows and lengths",
        "compile_layers": "Computation",
        "resume_anyway": "Stopping and resuming",
        "log_completions": "Output",
        "rollouts": "Rollouts by workers",
    }
)
WIDTH = 100
_TYPES: Mapping[Any, str] = types.MappingProxyType(
    {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "mapping", Sequence: "list"}
)


def as_type(hint: Any) -> str:
    """A type as people write it."""
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(as_type(part) for part in typing.get_args(hint))
    if hint is type(None):
        return "null"
    return _TYPES.get(typing.get_origin(hint) or hint, "any")


def cell(text: str) -> str:
    """Text in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def default_of(field: "Field[Any]", kind: str = "") -> str:
    """The default as YAML has it, or – and the type."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value is MISSING or value is None or value == ():
        said = "required" if value is MISSING else "–"
        return f"{said}, {kind}" if kind else said
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def rows_of(owner: type, names: Iterable[str], presets: bool = False) -> list[tuple[str, ...]]:
    """A line for each field: name, default, values in the paper's presets, and what it is."""
    of, hints, found = {field.name: field for field in fields(owner)}, typing.get_type_hints(owner), []
    for name in names:
        given = [str(preset.get(name, "")) for preset in PRESETS.values()] if presets else []
        kind = as_type(hints[name]).removesuffix(" or null")
        found.append((f"`{name}`", default_of(of[name], kind), *given, cell(of[name].metadata["help"])))
    return found


def table(owner: type, names: Iterable[str], presets: bool = False) -> str:
    """A table of fields."""
    headings = ("setting", "default", *(PRESETS if presets else ()), "what it does")
    return "\n".join(table_lines(headings, rows_of(owner, names, presets)))


def settings() -> str:
    """docs/settings.md."""
    parts = [
        MADE,
        "# Settings of training",
        "`SequenceMatchConfig` has these fields, and nearly all of `transformers.TrainingArguments`. In a recipe each is a "
        "line of YAML, on the command line a flag: `noise_rate: 0.2`, `--noise-rate 0.2`. The columns text and arithmetic "
        "show what "
        '`SequenceMatchConfig.from_preset("text")` and `from_preset("arithmetic")`, the paper\'s settings, change. A default of – '
        "is chosen for the run, as the last column says, or means off; its type stands beside it.",
    ]
    group: list[str] = []
    for name in OWN_FIELDS:
        if name in GROUPS:
            if group:
                parts.append(table(SequenceMatchConfig, group, presets=True))
            parts.append(f"## {GROUPS[name]}")
            group = []
        group.append(name)
    parts.append(table(SequenceMatchConfig, group, presets=True))
    ours = {field.name for field in fields(SequenceMatchConfig)} - set(OWN_FIELDS)
    theirs = {field.name: field for field in fields(TrainingArguments)}
    mine = {field.name: field for field in fields(SequenceMatchConfig)}
    other = [name for name in theirs if name in ours and default_of(mine[name]) != default_of(theirs[name])]
    lines = [(f"`{name}`", default_of(theirs[name]), default_of(mine[name])) for name in other]
    beyond = sorted({name for preset in PRESETS.values() for name in preset} - set(OWN_FIELDS))
    preset_lines = [(f"`{name}`", *(str(preset.get(name, "")) for preset in PRESETS.values())) for name in beyond]
    parts += [
        "## Fields of TrainingArguments with another default here",
        "\n".join(table_lines(("setting", "transformers", "here"), lines)),
        "## Other fields that the presets set",
        "\n".join(table_lines(("setting", *PRESETS), preset_lines)),
        "## What only a recipe has",
        "A YAML file for `sequencematch train` holds these lines beside the settings above. In Python they are arguments of "
        "`SequenceMatchTrainer` and of `Policy.from_pretrained`.",
        table(Recipe, [field.name for field in fields(Recipe) if field.name != "config"]),
        "## Settings of generation",
        "The fields of `Sampling`: arguments of `Policy.generate` and `Policy.stream`, flags of `sequencematch generate` and, "
        "most of them, of `sequencematch evaluate`, fields of requests to a server. "
        "[Generate, stream, export](generation.md) explains them.",
        table(Sampling, [field.name for field in fields(Sampling)]),
    ]
    return "\n\n".join(parts) + "\n"


def metrics() -> str:
    """docs/metrics.md."""
    logging = (ROOT / "docs" / "logging.md").read_text()
    logged = re.findall(r"^\| (`.*?) \| ((?:[^|]|\\\|)*?) \|", logging, flags=re.MULTILINE)
    lines = [(names, meaning) for names, meaning in logged if names != "name"]
    measured = [
        (
            f"`{name}`",
            cell(metric.help),
            ", ".join(f"`{task}`" for task, kind in TASKS.items() if name in kind.metrics) or "by `--metrics`",
        )
        for name, metric in METRICS.items()
    ]
    parts = [
        MADE,
        "# Metrics",
        "## Measured by sequencematch evaluate",
        "Each gives one or more numbers with a 95 % interval and a signature; [Evaluation](evaluation.md#metrics) defines them. "
        "`--metrics a,b` chooses others than the task's own.",
        "\n".join(table_lines(("metric", "what it is", "measured by default for"), measured)),
        "## Logged while training",
        "[What a run logs](logging.md) has their equations, and says how values of steps, batches and processes are combined.",
        "\n".join(table_lines(("number", "meaning"), lines)),
    ]
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """docs/commands.md."""
    group: Any = typer.main.get_command(app)
    parts = [
        MADE,
        "# Commands",
        "What `--help` of each command says. Bad input ends a command with exit code 2 and one line.",
    ]
    for name in group.commands:
        said = (
            CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": str(WIDTH), "TERMINAL_WIDTH": str(WIDTH)}).output
        )
        lines = "\n".join(line.rstrip() for line in said.strip().splitlines())
        parts.append(f"## {name}\n\n```text\n{lines}\n```")
    return "\n\n".join(parts) + "\n"


#: Page in docs/ → what it holds.
PAGES = types.MappingProxyType({"settings.md": settings, "metrics.md": metrics, "commands.md": commands})

if __name__ == "__main__":
    for page, write in PAGES.items():
        (ROOT / "docs" / page).write_text(write())
