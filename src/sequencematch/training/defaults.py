"""Settings that a run chooses for itself if the caller leaves them open: the context, the schedule and the source of noise."""

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sequencematch.training import checkpoints
from sequencematch.training.config import AUTO, SequenceMatchConfig

#: The settings that may be left open.
OPEN = ("max_length", "bc_steps", "bc_anneal_steps", "noise_source")
#: The paper's context, and the most steps of cloning and of annealing that a run chooses   (§6.2, App. E).
MAX_LENGTH, BC_STEPS, BC_ANNEAL_STEPS = 1024, 1000, 2000


def left_open(args: SequenceMatchConfig) -> list[str]:
    """The settings that the run is to choose."""
    return [name for name in OPEN if getattr(args, name) in (None, AUTO)]


def choose(
    args: SequenceMatchConfig, context: int | None, rows: Any
) -> tuple[SequenceMatchConfig, dict[str, int | str]]:
    """A copy of the settings with none left open, and those that were chosen and that the objective uses.

    A run that is resumed keeps what it chose when it began, also in an older version of this library. `context` is the
    model's, None if it is not known yet.
    """
    steps = num_steps(args, rows)
    fitting = {
        "max_length": min(MAX_LENGTH, context or MAX_LENGTH),
        "bc_steps": min(BC_STEPS, steps // 5) if steps else BC_STEPS,
        "bc_anneal_steps": min(BC_ANNEAL_STEPS, 2 * steps // 5) if steps else BC_ANNEAL_STEPS,
        "noise_source": "tokens" if args.noise_rate and _has_noise_tokens(rows) else "uniform",
    }
    begun = _begun_with(Path(args.output_dir or "."))
    chosen = {name: begun.get(name, fitting[name]) for name in left_open(args)}
    args = copy.copy(args)
    for name, value in chosen.items():
        setattr(args, name, value)
    unused = [] if args.objective_value.rolls_out else ["bc_steps", "bc_anneal_steps"]
    unused += [] if args.noise_rate else ["noise_source"]
    return args, {name: value for name, value in chosen.items() if name not in unused}


def num_steps(args: SequenceMatchConfig, rows: Any) -> int | None:
    """The optimisation steps of a run, as transformers counts them; None for a stream, whose length is not known."""
    if args.max_steps > 0:
        return args.max_steps
    if not hasattr(rows, "__len__"):
        return None
    per_step = args.train_batch_size * args.world_size
    batches = len(rows) // per_step if args.dataloader_drop_last else math.ceil(len(rows) / per_step)
    return math.ceil(args.num_train_epochs * max(math.ceil(batches / args.gradient_accumulation_steps), 1))


def _has_noise_tokens(rows: Any) -> bool:
    """Whether the first row has the column `noise_tokens`. Rows that can't be read are refused elsewhere."""
    if not hasattr(rows, "__iter__") or isinstance(rows, str | Mapping | Iterator):
        return False
    first = next(iter(rows), None)
    return isinstance(first, Mapping) and first.get("noise_tokens") is not None


def _begun_with(output_dir: Path) -> Mapping[str, Any]:
    """The settings of the run whose checkpoints are in a folder."""
    path = output_dir / checkpoints.RUN
    if not path.is_file() or not checkpoints.checkpoints(output_dir):
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError:  # `checkpoints.refuse_another_run` says so
        return {}
    return found if isinstance(found, dict) else {}
