"""policy × task × metrics → one record with its signature."""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, Unpack, cast

import torch
import transformers

from sequencematch import __version__
from sequencematch.core.mdp import Trajectory
from sequencematch.evaluation.cases import read_cases
from sequencematch.evaluation.generations import count_kept, digest, digest_of_weights, generations
from sequencematch.evaluation.mistakes import load_scorer, plausible, source_of_mistakes, with_mistakes
from sequencematch.evaluation.options import explained
from sequencematch.evaluation.record import Record
from sequencematch.evaluation.registry import METRICS, Evidence, load_encoder, metric_names
from sequencematch.evaluation.samples import samples
from sequencematch.metrics import Encoder
from sequencematch.policy import Policy, Sampling, SamplingOptions
from sequencematch.policy.generation import prompt_tokens
from sequencematch.tasks import TASKS, Task

#: Where generations go in a folder, and those from prompts with a mistake, drawn at random or plausible.
GENERATIONS, RECOVERIES, PLAUSIBLE = "generations.jsonl", "recoveries.jsonl", "recoveries_plausible.jsonl"


def evaluate(
    policy: Policy,
    task: Task,
    *,
    metrics: Sequence[str] | None = None,
    limit: int | None = None,
    mistakes: int | None = None,
    scorer: str | Policy | None = None,
    encoder: str | Encoder | None = None,
    batch_size: int = 64,
    folder: str | Path | None = None,
    progress: bool = True,
    **sampling: Unpack[SamplingOptions],
) -> Record:
    """Generate from the task's test prompts, or the first `limit` of them, and compute `metrics`, by default the task's.

    `sampling` holds fields of `Sampling`; `max_new_tokens` is the task's, and so is the default temperature. `seed`, 0 by
    default, also draws the `mistakes`: wrong tokens per row, 1 by default. With a `scorer`, a policy, a folder or a model on the
    hub, recovery is also measured after the wrong tokens that it finds likeliest: name the same one for all policies that you
    compare. `encoder` is MAUVE's: `minilm`, a folder or a model on the hub. Settings are checked before anything is generated.
    With `folder`, generations are saved there as they end, and another call with the same settings resumes. Progress bars are
    shown only if stderr is a terminal.
    """
    start = time.perf_counter()
    task = task if policy.tokenizer is None else task.fitted(policy.tokenizer)
    names = metric_names(task.metrics if metrics is None else metrics)
    chosen = [METRICS[name] for name in names]
    needs_mistakes, encodes = (any(getattr(m, need) for m in chosen) for need in ("needs_mistakes", "encodes"))
    seed = sampling.pop("seed", None)
    used = _sampling(task, seed, sampling)
    _check_used("seed", seed, not used.greedy or needs_mistakes, "nothing is drawn at random")
    _check_used("mistakes", mistakes, needs_mistakes, "recovery is not measured")
    _check_used("scorer", scorer, needs_mistakes, "recovery is not measured")
    _check_used("encoder", encoder, encodes, "MAUVE is not measured")
    seed, mistakes = seed or 0, (1 if mistakes is None else mistakes) if needs_mistakes else None

    rows = _rows(policy, task, limit, batch_size)
    cases = read_cases(policy, task, rows)
    evidence = Evidence(policy, task, cases, batch_size)
    for name, metric in zip(names, chosen, strict=True):
        if metric.check is not None:
            metric.check(name, evidence)
    mistaken = {} if mistakes is None else {RECOVERIES: with_mistakes(policy, cases, seed, mistakes)}
    if mistakes is not None:
        evidence = replace(evidence, wrong_tokens=source_of_mistakes(cases))
    if mistakes is not None and scorer is not None:
        judge = load_scorer(scorer, policy)
        mistaken[PLAUSIBLE] = plausible(judge, cases, mistaken[RECOVERIES], mistakes, batch_size)
        name = f"{_name(judge)} ({digest_of_weights(judge)})".replace(
            "|", "¦"
        )  # a path may hold a signature's separator
        evidence = replace(evidence, scorer=name)
    for prompt in itertools.chain((case.prompt for case in cases), *mistaken.values()):
        prompt_tokens(policy, prompt, used)
    evidence = replace(evidence, encoder=load_encoder(encoder, policy.device) if encodes else None)

    record = Record(
        model=_name(policy),
        weights=digest_of_weights(policy),
        dtype=str(policy.base.dtype).removeprefix("torch."),
        task=task.name,
        options=_options(task),
        data=digest(rows),
        count=len(rows),
        sampling=_facts(used),
        seed=seed,
        mistakes=mistakes,
        wrong_tokens=evidence.wrong_tokens,
        scorer=evidence.scorer,
        measures=(),
        samples=(),
        versions={"sequencematch": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        machine=_machine(policy.device),
        seconds=0.0,
    )
    identity = {"weights": record.weights, "task": record.task_signature, "sampling": record.sampling, "seed": seed}
    identity |= {"ends": sorted(policy.space.ends), "self_loops": used.self_loops}

    def made(prompts: Sequence[tuple[int, ...]], name: str) -> list[Trajectory]:
        path = None if folder is None else Path(folder) / name
        return generations(policy, prompts, used, batch_size, path=path, identity=identity, progress=progress)

    evidence = replace(evidence, trajectories=made([case.prompt for case in cases], GENERATIONS))
    if RECOVERIES in mistaken:
        evidence = replace(evidence, recovered=made(mistaken[RECOVERIES], RECOVERIES))
    if PLAUSIBLE in mistaken:
        evidence = replace(evidence, recovered_plausible=made(mistaken[PLAUSIBLE], PLAUSIBLE))
    return replace(
        record,
        measures=tuple(measure for metric in chosen for measure in metric.measure(evidence)),
        samples=samples(evidence, judge=any(metric.judges for metric in chosen)),
        seconds=time.perf_counter() - start,
    )


def describe_saved(folder: str | Path) -> str:
    """One sentence about the generations that an interrupted evaluation has saved."""
    kept = {name: count_kept(Path(folder) / name) for name in (GENERATIONS, RECOVERIES, PLAUSIBLE)}
    places = [f"{count} in {Path(folder) / name}" for name, count in kept.items() if count]
    return f"Generations kept: {', '.join(places)}." if places else "There are no generations yet."


def documentation(*, of_metrics: bool = True) -> dict[str, list[tuple[str, str]]]:
    """Heading → names of metrics, or of a task's options, with their help texts."""
    options = {f"Task {name}, measured by {', '.join(kind.metrics)}": explained(kind) for name, kind in TASKS.items()}
    return ({"Metrics": [(name, metric.help) for name, metric in METRICS.items()]} if of_metrics else {}) | options


def _name(policy: Policy) -> str:
    return policy.base.name_or_path or type(policy.base).__name__


def _sampling(task: Task, seed: int | None, given: Mapping[str, Any]) -> Sampling:
    if "max_new_tokens" in given:
        raise ValueError("`max_new_tokens` must be set in the task: references are cut to it, too.")
    temperature = given.get("temperature", task.temperature)
    drawn = {} if temperature == 0 else {"seed": seed or 0}
    return Sampling(**{"max_new_tokens": task.max_new_tokens, "temperature": temperature, **drawn, **given})


def _check_used(name: str, value: object, is_used: bool, why_not: str) -> None:
    if value is not None and not is_used:
        raise ValueError(f"`{name}` would be ignored: {why_not}. Got {name}={value}; leave it out.")


def _rows(policy: Policy, task: Task, limit: int | None, batch_size: int) -> list[dict[str, Any]]:
    for name, value in (("limit", limit), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1. Got {value}.")
    if policy.tokenizer is None:
        raise ValueError("`policy` must have a tokenizer to read a task's rows with. Got none.")
    rows = task.test(policy.tokenizer)[:limit]
    if not rows:
        raise ValueError(f"`task` must have rows to be tested on. Got none of {task.name}.")
    return rows


def _options(task: Task) -> dict[str, Any]:
    """The options of a task as JSON has them, those that are not set left out."""
    values = {field.name: getattr(task, field.name) for field in fields(cast(Any, task))}
    kept = {name: value for name, value in values.items() if value is not None and value != ()}
    return dict(json.loads(json.dumps(kept, default=str)))


def _facts(sampling: Sampling) -> dict[str, Any]:
    """Temperature and limits, and all else that is not the default."""
    defaults = {field.name: field.default for field in fields(Sampling)} | {
        "temperature": MISSING,
        "seed": sampling.seed,
    }
    facts = {name: value for name, value in vars(sampling).items() if value != defaults[name]}
    facts |= {"max_new_tokens": sampling.max_new_tokens, "max_actions": sampling.action_limit}
    return dict(json.loads(json.dumps(facts, default=str)))


def _machine(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
