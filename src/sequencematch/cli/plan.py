"""`sequencematch plan`."""

import json
from typing import Annotated

import typer

from sequencematch.data.spelling import check_choice


def plan(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A folder, a bundled model, or a model on the hub: its config."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Instead of MODEL: SmolLM2-135M, Llama-2-7b, Llama-2-13b, Llama-2-70b, or a Llama's "
            "layers,hidden,intermediate,heads,kv_heads,vocab."
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs in all, eight to a machine.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of a row of data.")] = 1024,
    prompt: Annotated[int, typer.Option(help="Tokens of a rollout's prompt.")] = 64,
    completion: Annotated[
        int | None, typer.Option(help="Tokens of a rollout after it. Default: the context's rest.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of data that a training GPU takes a step.")] = 8,
    generation_batch: Annotated[int, typer.Option(help="Rollouts that a GPU makes at a time.")] = 64,
    reuse: Annotated[float, typer.Option(help="How often each rollout is trained on.")] = 8.0,
    adapter: Annotated[
        int | None, typer.Option(help="Rank of LoRA on all linear layers. Default: full fine-tuning.")
    ] = None,
    checkpointing: Annotated[bool, typer.Option(help="Compute layers again in the backward pass.")] = True,
    hardware: Annotated[str, typer.Option(help="The GPUs: H200.")] = "H200",
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """Estimate a run's step time, memory, and GPUs for training and for rollouts.

    All numbers are modelled, from constants that were measured.
    """
    from sequencematch.training.planning import HARDWARE, Shape, Workload, plan, shape_of

    if (model is None) == (shape is None):
        raise ValueError("Give either `MODEL` or `--shape`: both say what the model's sizes are.")
    check_choice("hardware", hardware, HARDWARE)
    sizes = Shape.parse(shape) if shape is not None else shape_of(str(model))
    work = Workload(
        sizes,
        context=context,
        prompt=prompt,
        completion=context - prompt if completion is None else completion,
        batch_size=batch_size,
        rank=adapter,
        generation_batch=generation_batch,
        reuse=reuse,
        checkpointing=checkpointing,
    )
    found = plan(work, gpus, HARDWARE[hardware])
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
        return
    trained = "all weights" if adapter is None else f"LoRA of rank {adapter}"
    typer.echo(f"{sizes.name}, {sizes.weights / 1e9:.3g} billion weights, {trained}; {gpus} × {hardware}; modelled\n")
    heading = ("", "rollouts in turn", "" if found.apart is None else "rollouts apart")
    for name, inline, apart in (heading, *found.rows()):
        typer.echo(f"{name:26}{inline:>18}{apart:>18}".rstrip())
    typer.echo("")
    for note in found.notes():
        typer.echo(note)
