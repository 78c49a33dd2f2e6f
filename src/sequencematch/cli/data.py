"""`sequencematch data`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from sequencematch.cli.flags import Flags
from sequencematch.cli.models import TrustRemoteCode, load_tokenizer
from sequencematch.data.folders import check_folder


def data(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task listed below, or your own: file.py:Class.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write train.jsonl and test.jsonl.")],
    flags: Flags = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Model whose tokenizer counts tokens, if the task needs one.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write the rows of a task, for training and for the test.

    The options of a task are flags, as for sequencematch evaluate. The same options give the same test rows.

    \b
        sequencematch data arithmetic out/mul --module mul
        sequencematch train RECIPE --dataset out/mul/train.jsonl
    """
    for word in (task, str(folder)):
        if word.startswith("--"):
            raise ValueError(f"`TASK` and `FOLDER` must come before the options of a task. Got {word!r} first.")
    there = [path for path in (folder / "train.jsonl", folder / "test.jsonl") if path.exists()]
    if there and not force:
        raise ValueError(f"`FOLDER` must not hold other rows. Got {there[0]}: choose another, or add `--force`.")
    check_folder("FOLDER", folder)
    from sequencematch.evaluation import find_task
    from sequencematch.tasks import write_rows

    found = find_task(task, flags or [])
    write_rows(found, folder, None if model is None else load_tokenizer(model, trust_remote_code))
    typer.echo(f"Wrote {folder / 'train.jsonl'} and {folder / 'test.jsonl'}. To train on them:\n")
    typer.echo(f"    {shlex.join(['sequencematch', 'train', 'RECIPE', '--dataset', str(folder / 'train.jsonl')])}")
