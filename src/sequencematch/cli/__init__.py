"""The command line. A command imports torch and transformers only when it runs, so that `--help` is fast."""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sequencematch import __version__
from sequencematch.cli.data import data
from sequencematch.cli.demo import demo
from sequencematch.cli.doctor import doctor
from sequencematch.cli.evaluate import evaluate
from sequencematch.cli.export import export
from sequencematch.cli.flags import FlagsCommand
from sequencematch.cli.generate import generate
from sequencematch.cli.lm_eval import lm_eval
from sequencematch.cli.plan import plan
from sequencematch.cli.reproduce import reproduce
from sequencematch.cli.serve import serve
from sequencematch.cli.train import train


class Commands(TyperGroup):
    """The program: its help lists commands with their whole first sentence, which Typer would cut to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Wrap what is longer than a line."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(limit=sys.maxsize)) for name, command in self.commands.items()]
            )


app = typer.Typer(
    cls=Commands,
    name="sequencematch",
    help="Language models that can delete what they wrote.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"sequencematch {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the program itself."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU it warns of a kernel that it doesn't find


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """A `ValueError` is the caller's: one line on stderr and exit code 2, no traceback."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"Error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


#: Command → the documentation of the flags that it passes on to a recipe or a task.
COMMANDS: Mapping[Callable[..., None], Callable[[], Any] | None] = {
    generate: None,
    export: None,
    serve: None,
    train: lambda: importlib.import_module("sequencematch.training.recipe").documentation(),
    demo: None,
    reproduce: None,
    plan: None,
    evaluate: lambda: importlib.import_module("sequencematch.evaluation").documentation(),
    data: lambda: importlib.import_module("sequencematch.evaluation").documentation(of_metrics=False),
    doctor: None,
}
for command, documentation in COMMANDS.items():
    app.command(
        cls=None if documentation is None else FlagsCommand,
        context_settings={"ignore_unknown_options": documentation is not None, "obj": documentation},
    )(_one_line_errors()(command))
app.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--about"]}  # --help is lm-eval's
)(_one_line_errors()(lm_eval))
