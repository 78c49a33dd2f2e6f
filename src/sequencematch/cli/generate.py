"""`sequencematch generate`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sequencematch.cli.models import Device, Dtype, Model, TrustRemoteCode, load
from sequencematch.cli.sampling import FLAGS, sampling_flags
from sequencematch.data.rows import read_prompts
from sequencematch.policy.sampling import Sampling


@sampling_flags(*FLAGS)
def generate(
    model: Model = "sequencematch/arithmetic",
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Text to continue. May be repeated.")] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='One prompt per line, or a .jsonl file with a "prompt" field. - reads stdin.'
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time.")] = 64,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt and line.")] = False,
    **sampling: Any,
) -> None:
    """Continue prompts, and show the deletions."""
    prompts = _read_prompts(prompt, prompts_file)
    if batch_size < 1:
        raise ValueError(f"`--batch-size` must be at least 1. Got {batch_size}.")
    from sequencematch.policy.threads import limit_threads

    checked = Sampling(**sampling)
    policy = load(model, trust_remote_code, device, dtype)
    with limit_threads(policy):
        _show(policy, prompts, checked, batch_size, as_json=as_json)


def _read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    """The prompts of the flags or of the file, blank lines left out."""
    if prompts and file:
        raise ValueError("`--prompt` and `--prompts-file` exclude each other. Got both; leave one out.")
    if prompts:
        return prompts
    if file is None:
        raise ValueError("A prompt must be given, with `--prompt` or `--prompts-file`. Got none.")
    return read_prompts("--prompts-file", file)


def _show(policy: Any, prompts: list[str], sampling: Sampling, batch_size: int, *, as_json: bool) -> None:
    """Print every prompt with its completion, in order; on a terminal a single one is streamed."""
    from rich.console import Console
    from tqdm import tqdm

    from sequencematch.policy.display import can_strike, decoder, plain, struck, watch
    from sequencematch.policy.generation import Rollout, completion, prompt_tokens, rollouts, stream

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
        for row in sorted(finished):  # rows that ended before an earlier one, after an interruption
            show(finished[row])
