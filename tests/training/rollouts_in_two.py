"""Two processes that train together and share one rollout worker with older weights, replicated and sharded.

accelerate launch --multi_gpu --num_processes 2 -m tests.training.rollouts_in_two FOLDER
"""

import gc
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.remembered_probe import remember_probes
from tests.training.distributed_run import HOW, Result, run

#: By how many steps the weights may be older. For none see `processes_run`.
AGE = 2


def agreed(result: Result) -> bool:
    """Whether all processes hold the same rollouts."""
    everywhere: list[Any] = [None for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(everywhere, result.rollouts)
    return all(rollouts == everywhere[0] for rollouts in everywhere)


def main(folder: Path) -> None:
    """Train, replicated and sharded; the first process writes the results down."""
    gc.freeze()
    remember_probes()
    found: dict[str, Any] = {}
    for how in HOW:
        changes: dict[str, Any] = {"rollouts": "process", "max_staleness": AGE}
        result = run(folder / how, "sequencematch", (4, 1), sharded=how == "fsdp", **changes)
        found[how] = {"result": asdict(result), "agreed": agreed(result)}
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
