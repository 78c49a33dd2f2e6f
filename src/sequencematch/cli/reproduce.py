"""`sequencematch reproduce`."""

import inspect
import shlex
from pathlib import Path
from typing import Annotated

import typer

from sequencematch.data.folders import check_folder
from sequencematch.experiments.registry import EXPERIMENTS, find
from sequencematch.extras import require


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment listed below.")],
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where the results go. Default: out/NAME.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="How large, where there is a choice: cpu, gpu, paper; small for questions and text, large for questions."
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Networks trained side by side, where there are several.")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The rows, where an experiment reads a file.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Another base model than the preset's: a folder or a name.")] = None,
    redraw: Annotated[bool, typer.Option("--redraw", help="Only draw the figure, from the results in FOLDER.")] = False,
) -> None:
    """Run an experiment of docs/results/ again: results.json, and a figure made from it."""
    experiment = find(name)
    folder = out or Path("out", name)
    check_folder("--out", folder)
    require("matplotlib", "plot", "The figure")  # drawn last
    if redraw and not (folder / experiment.RESULTS).is_file():
        raise ValueError(
            f"`--redraw` needs {experiment.RESULTS} in the folder. Got {folder}, which has none. Leave out --redraw to run it."
        )
    choices = {"preset": preset, "jobs": jobs, "data": data, "model": model}
    options = {option: value for option, value in choices.items() if value is not None}
    for option in options:
        if redraw or option not in inspect.signature(experiment.run).parameters:
            raise ValueError(f"`--{option}` would be ignored by {name}{' --redraw' if redraw else ''}. Leave it out.")
    if jobs is not None and jobs < 1:
        raise ValueError(f"`--jobs` must be at least 1. Got {jobs}.")
    if not redraw:
        given = {"out": out, **options}
        flags = [word for option, value in given.items() if value is not None for word in (f"--{option}", str(value))]
        experiment.run(folder, shlex.join(["sequencematch", "reproduce", name, *flags]), **options)
    experiment.draw(folder)
    typer.echo(f"Wrote {folder / experiment.FIGURE}, from {experiment.RESULTS} beside it.")


assert reproduce.__doc__
reproduce.__doc__ += "\n\n    \b\n" + "\n".join(f"        {name}  {what}" for name, what in EXPERIMENTS.items())
