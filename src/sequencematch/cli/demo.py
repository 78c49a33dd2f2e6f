"""`sequencematch demo`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from sequencematch.cli.models import load
from sequencematch.data.folders import check_folder


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="A minute instead of five, with less training.")] = False,
    seeds: Annotated[int, typer.Option(help="How often each objective is trained.")] = 1,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the results go.")] = Path("out/demo"),
) -> None:
    """Watch a model search a graph, and another delete wrong digits; then fine-tune three ways and compare.

    The first bundled model walks through a graph, runs into dead ends, deletes its way back and arrives; on 200 graphs it is
    compared with the same network without deletions. The second is given sums with a wrong digit. Then the bundled base model,
    which knows base 10 only, is fine-tuned on other bases with maximum likelihood, behavioural cloning and SequenceMatch, on
    this machine's CPU.

    FOLDER will hold results.json, comparison.png and the three policies. Ctrl-C keeps the finished results. The comparison
    needs pip install 'sequencematch[arithmetic,plot]'; what comes before it needs no extra package.
    """
    if seeds < 1:
        raise ValueError(f"`--seeds` must be at least 1. Got {seeds}.")
    check_folder("--out", out)
    from rich.console import Console

    from sequencematch.experiments import demo as experiment
    from sequencematch.policy.threads import limit_threads

    console = Console(highlight=False)
    scale = experiment.QUICK if quick else experiment.FULL
    command = shlex.join(["sequencematch", "demo", *(["--quick"] if quick else []), "--seeds", str(seeds)])
    outcomes: list[experiment.Outcome] = []
    try:
        with limit_threads(load(experiment.BASE)):
            experiment.search(console)
            experiment.show(console)
            try:
                experiment.check_installed()
            except ValueError as error:  # the models were shown, and those need nothing
                typer.echo(f"{error} To train without it: sequencematch train examples/train_small.yaml")
                return
            outcomes.extend(experiment.run(scale, range(seeds), out, console, command))  # also of an interrupted run
    except KeyboardInterrupt as interrupt:
        if outcomes:
            console.print(experiment.table(outcomes))
        left = f"Finished results are in {out}." if outcomes else "Nothing was finished."
        typer.echo(f"Interrupted. {left}", err=True)
        raise typer.Exit(130) from interrupt
    console.print(experiment.table(outcomes))
    figure = f"{out / 'comparison.png'}, " if experiment.can_draw() else ""
    typer.echo(f"Wrote {figure}{out / 'results.json'} and the policies.")
    if not figure:
        typer.echo("A figure of it needs the package matplotlib: pip install 'sequencematch[plot]'.")
    typer.echo("To try one:\n")
    prompt = "In base 6, what is 35 + 12? Solution: 4"
    typer.echo(f"    {shlex.join(['sequencematch', 'generate', str(out / 'sequencematch'), '--prompt', prompt])}")
