"""`sequencematch doctor`."""

import json
from contextlib import suppress
from typing import Annotated

import typer

_MARKS = {"ok": ("✓", "green"), "off": ("–", "yellow"), "broken": ("✗", "red")}


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Also try this model: a folder, a .gguf file, or one on the hub."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, mps, …  Default: a GPU if there is one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All findings as one JSON object.")] = False,
) -> None:
    """Examine the installation: versions, devices, kernels, extras, bundled models, and whether deleting is exact.

    Needs no network. Exit code 0: usable; 1: something essential is broken.
    """
    from sequencematch.cli.models import quiet
    from sequencematch.doctor import BROKEN_IMPORTS, examine

    with suppress(*BROKEN_IMPORTS):  # what can't be imported is a finding
        quiet()
    report = examine(model, device)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
        raise typer.Exit(0 if report.is_usable else 1)
    for heading, findings in report.sections.items():
        typer.secho(heading, bold=True)
        for finding in findings:
            mark, colour = _MARKS[finding.state]
            remedy = f"\n      {finding.remedy}" if finding.remedy else ""
            typer.echo(f"  {typer.style(mark, fg=colour)} {finding.name}: {finding.text}{remedy}")
    typer.echo("Usable." if report.is_usable else "Something essential is broken: see ✗.")
    raise typer.Exit(0 if report.is_usable else 1)
