"""`sequencematch reproduce`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from sequencematch.experiments.registry import EXPERIMENTS, find


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment listed below.")],
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where the results go. Default: out/NAME.")] = None,
    redraw: Annotated[bool, typer.Option("--redraw", help="Only draw the figure, from the results in FOLDER.")] = False,
) -> None:
    """Run an experiment of docs/results/ again: results.json, and a figure made from it."""
    experiment = find(name)
    folder = out or Path("out", name)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`--out` must be a folder. Got {folder}, which is a file.")
    if redraw and not (folder / experiment.RESULTS).is_file():
        raise ValueError(
            f"`--redraw` needs {experiment.RESULTS} in the folder. Got {folder}, which has none. Leave out --redraw to run it."
        )
    if not redraw:
        command = ["sequencematch", "reproduce", name, *(["--out", str(out)] if out else [])]
        experiment.run(folder, shlex.join(command))
    experiment.draw(folder)
    typer.echo(f"Wrote {folder / experiment.FIGURE}, from {experiment.RESULTS} beside it.")


assert reproduce.__doc__
reproduce.__doc__ += "\n\n    \b\n" + "\n".join(f"        {name}  {what}" for name, what in EXPERIMENTS.items())
