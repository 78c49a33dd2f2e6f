"""Flags that only a recipe or a task knows: a command passes them on, and its help ends with all of them."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Flags = Annotated[list[str] | None, typer.Argument(metavar="--OPTION VALUE", hidden=True)]


class FlagsCommand(TyperCommand):
    """A command with such flags; it remembers what was typed."""

    context_class = typer.Context

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remember, then parse."""
        ctx.meta["typed"] = ["sequencematch", ctx.info_name, *args]
        return list(super().parse_args(ctx, args))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Look the flags up only now, with the context's object: it takes seconds."""
        for heading, entries in ctx.obj().items():
            with formatter.section(heading):
                formatter.write_dl(entries)
