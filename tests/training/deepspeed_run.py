"""Runs of ZeRO stage 2 on two processes, to be compared with one.

torchrun --nproc-per-node 2 -m tests.training.deepspeed_run FOLDER
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.training.processes_run import STEPS, forget_accelerate, run

#: Rollouts longer than rows of data: a step takes several passes, of which DeepSpeed must not update after each.
SHORT_ROWS: Mapping[str, Any] = {"max_length": 9, "max_completion_length": 8, "truncation": True}


def zero(stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration; numbers that the trainer has are filled in."""
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    return {
        **dict.fromkeys(auto, "auto"),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def refusal(folder: Path, processes: int, stage: int = 2, **changes: Any) -> str:
    """What is said of a run that can't be."""
    forget_accelerate()
    try:
        run(folder, "ddp", "full", processes, deepspeed=zero(stage), **changes)
    except ValueError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    """A run, the same resumed, and refusals; the first process writes them down."""
    whole = run(folder / "whole", "ddp", "full", 2, deepspeed=zero(2), **SHORT_ROWS)
    forget_accelerate()
    if os.environ["RANK"] == "0":
        (folder / "whole" / "run" / f"checkpoint-{STEPS}").rename(folder / "finished")
    torch.distributed.barrier()
    resumed = run(folder / "whole", "ddp", "full", 2, resume=True, deepspeed=zero(2), **SHORT_ROWS)
    said = [
        refusal(folder / "stage", 2, stage=3),
        refusal(folder / "head", 2, offset_lr_multiplier=5.0),
    ]
    if os.environ["RANK"] == "0":
        torch.save({"whole": asdict(whole), "resumed": asdict(resumed), "said": said}, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
