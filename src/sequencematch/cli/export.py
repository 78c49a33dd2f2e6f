"""`sequencematch export`."""

from pathlib import Path
from typing import Annotated

import typer

from sequencematch.cli.models import Model, TrustRemoteCode, load
from sequencematch.data.folders import check_folder


def export(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace FOLDER and everything in it.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a plain Hugging Face checkpoint that deletes by itself, without this library."""
    check_folder("FOLDER", folder)
    check_folder("FOLDER", folder.absolute().parent)  # the new folder is written beside the old one
    if folder.exists() and any(folder.iterdir()) and not force:
        raise ValueError(
            f"`FOLDER` must be new or empty. Got {folder}, which is not: choose another, or replace it with `--force`."
        )
    load(model, trust_remote_code).export(folder, replace=force)
    typer.echo(f"Wrote {folder}. To use it:\n")
    typer.echo("    from transformers import pipeline")
    typer.echo(f'    pipeline("text-generation", "{folder.as_posix()}", trust_remote_code=True)("Once upon a time")')
