"""Networks trained from scratch for a study: their size, the settings they share, and processes side by side.

A cell is one network. It writes one JSON file, and is not run again while that file exists.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import MISSING, asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from sequencematch.core.divergences import DIVERGENCES
from sequencematch.core.integral_metrics import INTEGRAL_METRICS
from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.experiments.provenance import commit
from sequencematch.training import SequenceMatchConfig


@dataclass(frozen=True)
class Budget:
    """The size of a network, how long it is trained, and on how many rows it is tested. The same for all cells of a study.

    `steps` are those of next-token prediction from random weights, `tuning_steps` those of a method after it.
    """

    layers: int = 4
    width: int = 256
    steps: int = 2000
    tuning_steps: int = 1000
    batch_size: int = 256
    learning_rate: float = 1e-3
    test_rows: int = 2000


@dataclass(frozen=True)
class Method:
    """A way to train: settings of the trainer, and on which rows.

    A method starts from a network that was trained by next-token prediction, or `from_scratch`, from random weights.
    """

    settings: Mapping[str, Any]
    rows: str = "answers"
    from_scratch: bool = False

    @property
    def deletes(self) -> bool:
        """Whether the network has `<bkspc>`."""
        return bool(self.settings["objective"] != "mle")


#: A gradient norm is a spike if it exceeds this many times the median of its run.
SPIKE = 10.0
#: Next-token prediction from random weights, from which other methods start.
START = "start"


def own_steps(name: str, method: Method, budget: Budget) -> int:
    """The steps of a method. Methods from random weights have as many as the start and a method after it together."""
    if name == START:
        return budget.steps
    return budget.tuning_steps + (budget.steps if method.from_scratch else 0)


def own_rows(name: str, method: Method, budget: Budget) -> slice:
    """The rows that a method is trained on, each once: the start on the first, the methods after it on the others."""
    count = own_steps(name, method, budget) * budget.batch_size
    return slice(count) if name == START else slice(-count, None)


def all_rows(budget: Budget) -> int:
    """How many rows there are to train on."""
    return (budget.steps + budget.tuning_steps) * budget.batch_size


def new_model(budget: Budget, tokenizer: Any, positions: int = 256) -> LlamaForCausalLM:
    """A Llama with random weights, for sequences of up to `positions` tokens."""
    heads = max(1, budget.width // 64)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=budget.width,
            intermediate_size=4 * budget.width,
            num_hidden_layers=budget.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=positions,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def as_printed(divergence: str) -> dict[str, str]:
    """D of Eq. 4 taken from rollouts, as the paper prints it, with every divergence that makes any."""
    makes_rollouts = divergence in INTEGRAL_METRICS or DIVERGENCES[divergence].on_policy
    return {"model_value_from": "rollouts"} if makes_rollouts else {}


def config(
    folder: str | Path, method: Method, budget: Budget, seed: int, *, steps: int, room: int, **changes: Any
) -> SequenceMatchConfig:
    """The settings of a cell: the same for every method but its own. A rollout writes at most `room` tokens."""
    own = dict(method.settings)
    if own["objective"] == "sequencematch":
        own |= {"bc_steps": steps // 4, "bc_anneal_steps": steps // 4}
        own |= as_printed(own.get("divergence", "chi2_mixture"))
    if own["objective"] == "sequencematch" or "correction_rate" in own:
        own |= {
            "generation_batch_size": 2 * budget.batch_size,
            "replay_size": 16 * budget.batch_size,
            "max_completion_length": room,
            "protect_prompt": True,
        }
    shared: dict[str, Any] = {
        "seed": seed,
        "max_steps": steps,
        "per_device_train_batch_size": budget.batch_size,
        "learning_rate": budget.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": steps // 20,
        "adam_beta2": 0.98,
        "max_length": 160,
        "logging_steps": max(steps // 20, 1),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": torch.cuda.is_available(),
    }
    return SequenceMatchConfig(str(folder), **{**shared, **own, **changes})


def once(path: Path, cell: Any, budget: Any, run: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The result of a cell: that of its file, if there is one, else that of `run`, which is then written."""
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text())
        if not is_same(known["budget"], budget):
            raise ValueError(f"{path} was trained with another budget: {known['budget']}. Choose another folder.")
        return known
    began = time.perf_counter()
    found = {
        "cell": asdict(cell),
        "budget": asdict(budget),
        **run(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "precision": "bf16" if torch.cuda.is_available() else "float32",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": commit(),
        "seconds": time.perf_counter() - began,
    }
    write_files(path.parent, {path.name: json_text(found)})
    return found


def is_same(recorded: Mapping[str, Any], budget: Any) -> bool:
    """Whether a budget is the one of a recorded result. A field that the record lacks had its default then."""
    defaults = {f.name: f.default for f in fields(budget) if f.default is not MISSING}
    return bool({**defaults, **recorded} == asdict(budget))


def side_by_side(run: Callable[[Any], Any], cells: Sequence[Any], jobs: int) -> None:
    """Call `run` on every cell and before it on the one that it starts from, `jobs` at a time in processes of one thread each.

    Earlier cells go first. If a cell fails, those that don't start from it still run, and the error is raised at the end.
    """
    waiting = list(dict.fromkeys(part for cell in cells for part in _with_starts(cell)))
    with tqdm(total=len(waiting), unit="network") as bar:
        if jobs == 1:
            for cell in waiting:
                run(cell)
                bar.update()
        else:
            _in_processes(run, waiting, jobs, bar)


def _in_processes(run: Callable[[Any], Any], waiting: list[Any], jobs: int, bar: Any) -> None:
    running, done, errors = dict[Future[Any], Any](), set[Any](), list[BaseException]()
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        while True:
            ready = [cell for cell in waiting if cell.start is None or cell.start in done]
            for cell in ready[: jobs - len(running)]:
                waiting.remove(cell)
                running[pool.submit(run, cell)] = cell
            if not running:
                break
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                error, cell = ended.exception(), running.pop(ended)
                errors += [error] if error else []
                done |= set() if error else {cell}
                bar.update()
    if errors:
        raise errors[0]


def _with_starts(cell: Any) -> list[Any]:
    """The cells that a cell starts from, the first of them first, and itself."""
    return [*(_with_starts(cell.start) if cell.start else []), cell]


def arrays(path: Path, make: Callable[[], Mapping[str, np.ndarray]]) -> Mapping[str, np.ndarray]:
    """The arrays in a file; if there is none yet, those of `make`, which are then written."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(partial, **make())  # type: ignore[arg-type]
        partial.rename(path)
    with np.load(path) as stored:
        return dict(stored)


def collected(folder: Path, command: str, order: Callable[[Mapping[str, Any]], Any]) -> str:
    """The finished cells of a study without their learning curves, sorted by `order`, as the text of one JSON file."""
    found = sorted((without_curves(path) for path in (folder / "cells").glob("*.json")), key=order)
    return json_text({"command": command, "cells": found})


def without_curves(path: Path) -> dict[str, Any]:
    """The result of a finished cell; of what it recorded for every step, the last loss and the steadiness of its gradients."""
    whole = json.loads(path.read_text())
    norms = whole.pop("gradient_norms", None)
    losses = [entry["loss"] for entry in whole.pop("log", ()) if "loss" in entry]
    gradient = {} if norms is None else {"gradient": steadiness(norms)}
    return {**whole, **gradient, "final_loss": losses[-1] if losses else None}


def steadiness(norms: Sequence[float]) -> dict[str, float]:
    """Of gradient norms after the first quarter of a run: median, largest, and the share that exceeds `SPIKE` medians.

    In the first quarter SequenceMatch only clones, and the first steps of every method have large gradients.
    """
    later = norms[len(norms) // 4 :]
    middle = median(later)
    spikes = sum(norm > SPIKE * middle for norm in later)
    return {"median": middle, "largest": max(later), "spikes": spikes / len(later)}
