"""Flags defined by a recipe or a task: the command passes them on and lists them at the end of its help."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Flags = Annotated[list[str] | None, typer.Argument(metavar="--OPTION VALUE", hidden=True)]


class FlagsCommand(TyperCommand):
    """A command with such flags; it remembers the command line as typed."""

    context_class = typer.Context

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remember, then parse."""
        ctx.meta["typed"] = ["sequencematch", ctx.info_name, *args]
        return list(super().parse_args(ctx, args))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """List the flags, which takes seconds: only when help is shown."""
        for heading, entries in ctx.obj().items():
            with formatter.section(heading):
                formatter.write_dl(entries)
