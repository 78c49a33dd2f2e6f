"""The command line: it parses and calls. Commands import what they need themselves, so that `--help` is quick."""

import dataclasses
import json
import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from sequencematch import __version__

if TYPE_CHECKING:
    from sequencematch.policy import Policy

app = typer.Typer(
    name="sequencematch",
    help="Language models that can delete what they wrote.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Dtype(StrEnum):
    """What a model can be loaded in; `auto` is what it was saved in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"sequencematch {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the program itself."""


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """A `ValueError` is the caller's: one line on stderr and exit code 2, no traceback."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"Error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a .gguf file, or a model on the hub.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the model's repository.")]


@app.command()
@_one_line_errors()
def generate(
    model: Model = "sequencematch/arithmetic",
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="What to start from. May be repeated.")
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help='One prompt per line, or a .jsonl file with a "prompt" field.')
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The longest text, net of deletions.")] = 64,
    max_actions: Annotated[
        int | None, typer.Option(help="The most actions, deletions counted. Default: 4 max-new-tokens + 1.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest actions.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest with this much probability.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Choose among those at least this likely as the likeliest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same actions.")] = None,
    protect_prompt: Annotated[bool, typer.Option("--protect-prompt", help="Don't delete into the prompt.")] = False,
    ban_deleted: Annotated[
        bool, typer.Option("--ban-deleted", help="Don't write what was just deleted there again.")
    ] = False,
    backspace_bias: Annotated[
        float, typer.Option(help="Added to the logit of <bkspc>: more makes it delete more.")
    ] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time.")] = 64,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps, …  Default: cpu.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="What to load the model in.")] = Dtype.auto,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt and line.")] = False,
) -> None:
    """Write on from prompts, with deletions in sight."""
    prompts = _read_prompts(prompt, prompts_file)
    if batch_size < 1:
        raise ValueError(f"`--batch-size` must be at least 1. Got {batch_size}.")

    from rich.console import Console
    from tqdm import tqdm

    from sequencematch.policy import Sampling
    from sequencematch.policy.display import can_strike, decoder, plain, struck, watch
    from sequencematch.policy.generation import Rollout, completion, prompt_tokens, rollouts, stream

    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        max_actions=max_actions,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        protect_prompt=protect_prompt,
        ban_deleted=ban_deleted,
        backspace_bias=backspace_bias,
    )
    policy = _load(model, device, dtype, trust_remote_code)
    initial = [prompt_tokens(policy, text, sampling) for text in prompts]
    decode = decoder(policy.tokenizer)
    console = Console(highlight=False)
    strikes = can_strike(console)
    if len(prompts) == 1 and strikes and not as_json:
        floor = len(initial[0]) if sampling.protect_prompt else 1
        watch(console, prompts[0], initial[0], stream(policy, prompts[0], sampling), policy.space, decode, floor=floor)
        return

    def show(rollout: Rollout) -> None:
        trajectory, prompt = rollout.trajectory, prompts[rollout.row]
        if as_json:
            record = {
                "prompt": prompt,
                "text": completion(policy, trajectory),
                "actions": plain(trajectory, decode),
                "chosen": trajectory.chosen,
                "executed": trajectory.executed,
                "truncated": trajectory.truncated,
                "log_probs": [round(log_prob, 4) for log_prob in rollout.log_probs.tolist()],
            }
            print(json.dumps(record, ensure_ascii=False), flush=True)
        elif strikes:
            console.print(struck(prompt, trajectory, decode), soft_wrap=True)
        else:
            print(prompt + plain(trajectory, decode), flush=True)

    finished: dict[int, Rollout] = {}
    shown = 0
    try:
        is_hidden = None if len(prompts) > 1 else True  # None: hidden unless stderr is a terminal
        ended = rollouts(policy, initial, sampling, batch_size)
        for rollout in tqdm(ended, total=len(prompts), unit="prompt", leave=False, disable=is_hidden, mininterval=0):
            finished[rollout.row] = rollout
            while shown in finished:
                with tqdm.external_write_mode():
                    show(finished.pop(shown))
                shown += 1
    finally:
        for row in sorted(finished):  # what ended before rows above it, when there was an interruption
            show(finished[row])


@app.command()
@_one_line_errors()
def export(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace FOLDER and everything in it.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a plain Hugging Face checkpoint that deletes by itself, without this library."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`FOLDER` must be a folder. Got {folder}, which is a file.")
    if folder.exists() and any(folder.iterdir()) and not force:
        raise ValueError(
            f"`FOLDER` must be new or empty. Got {folder}, which is not: choose another, or replace it with `--force`."
        )
    _load(model, None, Dtype.auto, trust_remote_code).export(folder, replace=force)
    typer.echo(f"Wrote {folder}. To use it:\n")
    typer.echo("    from transformers import pipeline")
    typer.echo(f'    pipeline("text-generation", "{folder.as_posix()}", trust_remote_code=True)("Once upon a time")')


class _TrainCommand(TyperCommand):
    """A command whose help ends with all settings of a recipe."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Look them up only now: it takes seconds."""
        for heading, entries in _recipes().documentation().items():
            with formatter.section(heading):
                formatter.write_dl(entries)


@app.command(cls=_TrainCommand, context_settings={"ignore_unknown_options": True})
@_one_line_errors()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file; see above, and examples/.")],
    flags: Annotated[list[str] | None, typer.Argument(metavar="--SETTING VALUE", hidden=True)] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the latest checkpoint in output_dir, if there is one.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check recipe and data, print all settings, and load no model.")
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

    Each can be a flag as well, which wins: --learning-rate 1e-4, --packing, --no-packing, --peft.r 16.

    Settings are those below and nearly every field of transformers.TrainingArguments: max_steps, num_train_epochs,
    per_device_train_batch_size, gradient_accumulation_steps, warmup_steps, lr_scheduler_type, save_steps, eval_strategy,
    bf16, gradient_checkpointing, report_to, seed and so on.

    Rows of a dataset have the columns text, prompt and completion, or messages. For noise_source: tokens also noise_tokens,
    a list of what noise may be.
    """
    if not recipe.is_file():
        raise ValueError(f"`RECIPE` must be a YAML file, before any flags. Got {recipe}, which is none.")
    recipes = _recipes()
    read = recipes.read_recipe(recipe, flags or [])
    if dry_run:
        typer.echo(recipes.summary(read))
        return

    from sequencematch.training import NonFiniteError

    _quiet()
    try:
        trainer = recipes.run(read, resume=resume)
    except NonFiniteError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        again = shlex.join(["sequencematch", "train", str(recipe), *(flags or []), "--resume"])
        typer.echo(f"Interrupted. {recipes.describe_saved(read)} To go on: {again}", err=True)
        raise typer.Exit(130) from interrupt
    if trainer.is_world_process_zero():
        folder = read.output_dir / recipes.FINAL
        typer.echo(f"Wrote {folder}. To try it:\n")
        typer.echo(f"    {shlex.join(['sequencematch', 'generate', str(folder), '--prompt', recipes.prompt(trainer)])}")


@app.command()
@_one_line_errors()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="A minute instead of four; less is learnt.")] = False,
    seeds: Annotated[int, typer.Option(help="How often each objective is trained.")] = 1,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the results go.")] = Path("out/demo"),
) -> None:
    """Watch a model delete wrong digits; then fine-tune three ways and compare.

    The bundled model is handed sums with a wrong digit. Then the bundled base model, which knows base 10 only, is fine-tuned on
    other bases with maximum likelihood, behavioural cloning and SequenceMatch, on this machine's CPU.

    FOLDER will hold results.json, comparison.png and the three policies. Ctrl-C leaves what is finished.
    """
    if seeds < 1:
        raise ValueError(f"`--seeds` must be at least 1. Got {seeds}.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"`--out` must be a folder. Got {out}, which is a file.")
    _silence_bitsandbytes()
    from rich.console import Console

    from sequencematch.experiments import demo as experiment

    _quiet()
    console = Console(highlight=False)
    scale = experiment.QUICK if quick else experiment.FULL
    command = shlex.join(["sequencematch", "demo", *(["--quick"] if quick else []), "--seeds", str(seeds)])
    outcomes: list[Any] = []

    def keep(outcome: Any) -> None:
        outcomes.append(outcome)
        is_complete = len(outcomes) == seeds * len(experiment.OBJECTIVES)
        experiment.save(outcomes, scale, out, command, is_complete=is_complete)

    try:
        experiment.check_installed()
        experiment.show(console)
        experiment.run(scale, range(seeds), out, console, keep)
    except KeyboardInterrupt as interrupt:
        if outcomes:
            console.print(experiment.table(outcomes))
        left = f"What is finished is in {out}." if outcomes else "Nothing was finished."
        typer.echo(f"Interrupted. {left}", err=True)
        raise typer.Exit(130) from interrupt
    console.print(experiment.table(outcomes))
    typer.echo(f"Wrote {out / 'comparison.png'}, {out / 'results.json'} and the policies. To try one:\n")
    prompt = "In base 6, what is 35 + 12? Solution: 4"
    typer.echo(f"    {shlex.join(['sequencematch', 'generate', str(out / 'sequencematch'), '--prompt', prompt])}")


class _TypedCommand(TyperCommand):
    """A command that remembers what was typed: its record says how it was made."""

    context_class = typer.Context

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remember, then parse."""
        ctx.meta["typed"] = ["sequencematch", ctx.info_name, *args]
        return list(super().parse_args(ctx, args))


def _recipes() -> Any:
    """The module, imported in silence."""
    _silence_bitsandbytes()

    from sequencematch.training import recipe

    return recipe


class _TaskCommand(_TypedCommand):
    """A command with the options of a task among its flags; its help ends with all of them."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Look them up only now: it takes seconds."""
        for heading, entries in _evaluation().documentation(of_metrics=ctx.info_name == "evaluate").items():
            with formatter.section(heading):
                formatter.write_dl(entries)


Flags = Annotated[list[str] | None, typer.Argument(metavar="--OPTION VALUE", hidden=True)]


@app.command(cls=_TaskCommand, context_settings={"ignore_unknown_options": True})
@_one_line_errors()
def evaluate(
    context: typer.Context,
    model: Model,
    task: Annotated[str, typer.Option(metavar="TASK", help="One of those below, or your own: file.py:Class.")],
    flags: Flags = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="A,B", help="What to measure. Default: the task's own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="The first so many rows of the test only.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the task's own.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest with this much probability.")] = None,
    backspace_bias: Annotated[
        float, typer.Option(help="Added to the logit of <bkspc>; -inf for a model that never learnt to delete.")
    ] = 0.0,
    protect_prompt: Annotated[bool, typer.Option("--protect-prompt", help="Don't delete into the prompt.")] = False,
    ban_deleted: Annotated[
        bool, typer.Option("--ban-deleted", help="Don't write what was just deleted there again.")
    ] = False,
    sampling_seed: Annotated[
        int | None, typer.Option(help="Of what is drawn at random here; --seed is the task's, of its rows. Default: 0.")
    ] = None,
    mistakes: Annotated[int | None, typer.Option(help="Wrong tokens to recover from. Default: 1.")] = None,
    encoder: Annotated[
        str | None, typer.Option(help="MAUVE's: minilm, a folder, or a model on the hub. Default: gpt2-large.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows at a time.")] = 64,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps, …  Default: cpu.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="What to load the model in.")] = Dtype.auto,
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where results go. Default: out/evaluate/TASK/MODEL.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
) -> None:
    """Measure a model on a task.

    Writes results.json, report.md and all generations to a folder. Interrupted, the same command goes on from there; and with
    other --metrics it measures the generations that are there.

    The options of a task are flags as well. Text is taken as it stands, anything else is YAML: --entropy '[3, 6]'. One that
    takes several values is repeated: --files a.txt --files b.txt.

    \b
        sequencematch evaluate out/arithmetic/final --task arithmetic --module mul --test-size 100
        sequencematch evaluate gpt2 --task text --files wiki.txt --separator '= [^=]+ =' --encoder minilm
    """
    if model.startswith("--"):
        raise ValueError(f"`MODEL` must come before the options of a task. Got {model!r} first.")
    evaluation = _evaluation()
    found = evaluation.find_task(task, flags or [])
    names = evaluation.metric_names(found.metrics if metrics is None else map(str.strip, metrics.split(",")))
    folder = out or Path("out", "evaluate", found.name, Path(model).name)
    given = {"temperature": temperature, "top_p": top_p, "backspace_bias": backspace_bias or None}
    given |= {"protect_prompt": protect_prompt or None, "ban_deleted": ban_deleted or None}
    policy = _load(model, device, dtype, trust_remote_code)
    command = shlex.join(context.meta["typed"])
    try:
        record = evaluation.evaluate(
            policy,
            found,
            metrics=names,
            limit=limit,
            seed=sampling_seed,
            mistakes=mistakes,
            encoder=encoder,
            batch_size=batch_size,
            folder=folder,
            **{name: value for name, value in given.items() if value is not None},
        )
    except KeyboardInterrupt as interrupt:
        typer.echo(f"Interrupted. {evaluation.describe_saved(folder)} To go on: {command}", err=True)
        raise typer.Exit(130) from interrupt
    record = dataclasses.replace(record, model=model, command=command)
    evaluation.save(record, folder)
    if as_json:
        typer.echo(record.to_json())
        return

    from rich.console import Console

    Console(highlight=False).print(evaluation.table(record))
    typer.echo(f"Wrote {folder / 'report.md'}, and results.json beside it.")


@app.command(cls=_TaskCommand, context_settings={"ignore_unknown_options": True})
@_one_line_errors()
def data(
    task: Annotated[str, typer.Argument(metavar="TASK", help="One of those below, or your own: file.py:Class.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write train.jsonl and test.jsonl.")],
    flags: Flags = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Whose tokenizer counts tokens, where a task does.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write the rows of a task, to train on and to be tested on.

    The options of a task are flags, as for sequencematch evaluate: the same ones give the same test.

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
    found = _evaluation().find_task(task, flags or [])

    from sequencematch.tasks import write_rows

    write_rows(found, folder, None if model is None else _load_tokenizer(model, trust_remote_code))
    typer.echo(f"Wrote {folder / 'train.jsonl'} and {folder / 'test.jsonl'}. To train on them:\n")
    typer.echo(f"    {shlex.join(['sequencematch', 'train', 'RECIPE', '--dataset', str(folder / 'train.jsonl')])}")


def _evaluation() -> Any:
    """The module, imported in silence."""
    _silence_bitsandbytes()

    from sequencematch import evaluation

    return evaluation


def _silence_bitsandbytes() -> None:
    """On a CPU it tells of a kernel it doesn't find."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    """The prompts of the flags or of the file, blank lines left out."""
    if prompts and file:
        raise ValueError("`--prompt` and `--prompts-file` exclude each other. Got both; leave one out.")
    if prompts:
        return prompts
    if file is None:
        raise ValueError("A prompt must be given, with `--prompt` or `--prompts-file`. Got none.")
    expected = "`--prompts-file` must be a text file with one prompt per line, or .jsonl"
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"{expected}. Got {file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{expected}, in UTF-8. Got {file}: {error}.") from error
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{expected}. Got {file}, which is empty.")
    if file.suffix == ".jsonl":
        return [_prompt_field(line, f"{file}, line {number}") for number, line in found]
    return [line for _, line in found]


def _prompt_field(line: str, where: str) -> str:
    expected = (
        '`--prompts-file` must hold one JSON object per line with a "prompt" that is text, like {"prompt": "2 + 2 ="}'
    )
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{expected}. {where} is not JSON: {error.msg} (column {error.colno}).") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ValueError(f"{expected}. {where} holds something else.")
    return str(record["prompt"])


def _load(model: str, device: str | None, dtype: Dtype, trust_remote_code: bool) -> "Policy":
    """The policy, loaded without a word on stdout, and without bars where nobody looks."""
    import torch

    from sequencematch.policy import Policy

    _quiet()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"`--device` must be a device of this machine. Got {device!r}: {reason}") from error
    try:
        with redirect_stdout(sys.stderr):
            return Policy.from_pretrained(model, device=device, dtype=dtype.value, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise _no_model(model, error) from error


def _load_tokenizer(model: str, trust_remote_code: bool) -> Any:
    """A model's tokenizer alone."""
    from sequencematch.policy import storage

    _quiet()
    try:
        return storage.load_tokenizer(model, {"trust_remote_code": trust_remote_code})
    except OSError as error:
        raise _no_model(model, error) from error


def _no_model(model: str, error: OSError) -> ValueError:
    if Path(model).exists():
        return ValueError(str(error))
    return ValueError(
        f"`MODEL` must be a folder, a .gguf file, or a model on the hub. Got {model!r}, which is neither a folder nor "
        f"reachable as a hub id: {str(error).splitlines()[0]}"
    )


def _quiet() -> None:
    """No word from Hugging Face's libraries but errors, and bars only where somebody looks."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


if __name__ == "__main__":
    app()
