"""`sequencematch train`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from sequencematch.cli.models import quiet
from sequencematch.data.packaged import find_packaged


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A YAML file; see above. examples/train_small.yaml comes along.")
    ],
    flags: Annotated[list[str] | None, typer.Argument(metavar="--SETTING VALUE", hidden=True)] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the latest checkpoint in output_dir, if any.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all that can be checked without the model, and print all settings.")
    ] = False,
) -> None:
    """Fine-tune a model as a recipe says.

    A recipe is a YAML file with one setting a line:

    \b
        preset: arithmetic
        model: HuggingFaceTB/SmolLM2-135M
        dataset: examples/arithmetic.jsonl
        output_dir: out/arithmetic
        learning_rate: 1e-4
        peft: {r: 16, target_modules: all-linear}

    A flag overrides the file: --learning-rate 1e-4, --packing, --no-packing, --peft.r 16.

    Settings are those below and nearly every field of transformers.TrainingArguments: max_steps, num_train_epochs,
    per_device_train_batch_size, gradient_accumulation_steps, warmup_steps, lr_scheduler_type, save_steps, eval_strategy,
    bf16, gradient_checkpointing, report_to, seed and so on.

    Rows of a dataset have the columns text, prompt and completion, or messages. With noise_source: tokens they also
    have noise_tokens, a list of the tokens that noise may insert, or such a list for each token of the completion; and
    perhaps noise_ends, in which half of its bursts end. docs/noise.md says which noise to choose.

    SIGTERM, as a preempted job gets it, ends a run after the step, with a checkpoint and exit code 143; so does
    stop_after_minutes, with 124. An interrupted run writes no OUTPUT_DIR/final.
    """
    named, recipe = recipe, find_packaged(recipe)
    if not recipe.is_file():
        raise ValueError(f"`RECIPE` must be a YAML file, before any flags. Got {recipe}, which is not a file.")
    from sequencematch.training import NonFiniteError, StoppedEarlyError
    from sequencematch.training import recipe as recipes
    from sequencematch.training.stopping import EXIT_CODES

    read = recipes.read_recipe(recipe, flags or [])
    if dry_run:
        typer.echo(recipes.summary(read, resume=resume))
        return
    quiet()
    again = shlex.join(["sequencematch", "train", str(named), *(flags or []), "--resume"])
    try:
        trainer = recipes.run(read, resume=resume, stops_at_sigterm=True)
    except NonFiniteError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except StoppedEarlyError as stop:
        if read.config.process_index == 0:
            typer.echo(f"{stop} To resume: {again}", err=True)
        raise typer.Exit(EXIT_CODES[stop.reason]) from stop
    except KeyboardInterrupt as interrupt:
        typer.echo(f"Interrupted. {recipes.describe_saved(read)} To resume: {again}", err=True)
        raise typer.Exit(130) from interrupt
    if trainer.is_world_process_zero():
        folder = read.output_dir / recipes.FINAL
        typer.echo(f"Wrote {folder}. To try it:\n")
        typer.echo(f"    {shlex.join(['sequencematch', 'generate', str(folder), '--prompt', recipes.prompt(trainer)])}")
