"""`sequencematch evaluate`."""

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from sequencematch.cli.flag_errors import flags_in_errors
from sequencematch.cli.flags import Flags
from sequencematch.cli.models import Device, Dtype, Model, TrustRemoteCode, load
from sequencematch.cli.sampling import sampling_flags
from sequencematch.data.folders import check_folder


@sampling_flags(
    *("temperature", "top_p", "min_p", "backspace_bias", "protect_prompt", "ban_deleted", "search", "max_actions"),
    temperature="the task's own",
)
def evaluate(
    context: typer.Context,
    model: Model,
    task: Annotated[
        str, typer.Option(metavar="TASK", help="A task listed below, a file of rows, or your own: file.py:Class.")
    ],
    flags: Flags = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="A,B", help="Metrics to compute. Default: the task's own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Number of test rows to use, from the first.")] = None,
    mistakes: Annotated[int | None, typer.Option(help="Wrong tokens to recover from. Default: 1.")] = None,
    scorer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Measure recovery also after plausible mistakes: the likeliest by this model."
        ),
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="MAUVE's: minilm, a folder, or a model on the hub. Default: gpt2-large.")
    ] = None,
    sampling_seed: Annotated[
        int | None, typer.Option(help="Seed of sampling and mistakes; --seed is the task's, for its rows. Default: 0.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows at a time.")] = 64,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where results go. Default: out/evaluate/TASK/MODEL.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
    **sampling: Any,
) -> None:
    """Measure a model on a task.

    Writes results.json, report.md and all generations to a folder. After an interruption the same command resumes. With
    other --metrics it reuses the saved generations.

    The options of a task are flags as well. Text is taken literally, anything else is YAML: --entropy '[3, 6]'. An option
    that takes several values is repeated: --files a.txt --files b.txt.

    \b
        sequencematch evaluate out/arithmetic/final --task arithmetic --module mul --test-size 100
        sequencematch evaluate out/run/final --task test.jsonl --scorer gpt2
        sequencematch evaluate gpt2 --task text --files wiki.txt --separator '= [^=]+ =' --encoder minilm
    """
    if model.startswith("--"):
        raise ValueError(f"`MODEL` must come before the options of a task. Got {model!r} first.")
    from rich.console import Console

    from sequencematch import evaluation
    from sequencematch.policy.threads import limit_threads
    from sequencematch.tasks import Rows

    found = evaluation.find_task(task, flags or [])
    names = evaluation.metric_names(found.metrics if metrics is None else map(str.strip, metrics.split(",")))
    name = Path(task).name.partition(".")[0] if isinstance(found, Rows) else found.name
    folder = out or Path("out", "evaluate", name, _own_name(model))
    check_folder("--out", folder)
    policy = load(model, trust_remote_code, device, dtype)
    command = shlex.join(context.meta["typed"])
    try:
        with limit_threads(policy), flags_in_errors(_flag):
            record = evaluation.evaluate(
                policy,
                found,
                metrics=names,
                limit=limit,
                seed=sampling_seed,
                mistakes=mistakes,
                scorer=scorer,
                encoder=encoder,
                batch_size=batch_size,
                folder=folder,
                **{name: value for name, value in sampling.items() if value is not None},
            )
    except KeyboardInterrupt as interrupt:
        typer.echo(f"Interrupted. {evaluation.describe_saved(folder)} To resume: {command}", err=True)
        raise typer.Exit(130) from interrupt
    record = dataclasses.replace(record, model=model, command=command)
    evaluation.save(record, folder)
    if as_json:
        typer.echo(record.to_json(), nl=False)
        return
    Console(highlight=False).print(evaluation.table(record))
    typer.echo(f"Wrote {folder / 'report.md'}, and results.json beside it.")


def _own_name(model: str) -> Path:
    """The name of a model; where every run has a folder of that name, the run's before it: `run/final`, `run/checkpoint-8`."""
    path = Path(model)
    is_shared = path.is_dir() and (path.name == "final" or path.name.startswith("checkpoint-"))
    return Path(path.resolve().parent.name, path.name) if is_shared else Path(path.name)


#: Arguments of `evaluation.evaluate` whose flags have another name.
_FLAGS = {"folder": "--out", "seed": "--sampling-seed"}


def _flag(argument: str) -> str:
    return _FLAGS.get(argument, argument)
