"""Two processes with DeepSpeed's ZeRO stage 2 train and resume as one without. Skipped where deepspeed is not installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.deepspeed_run import SHORT_ROWS
from tests.training.processes_run import Result, forget_accelerate, run
from tests.training.test_processes import check_same

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("deepspeed")
    own = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HOME": str(folder / "hf")}
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.training.deepspeed_run"]
    with (folder / "log.txt").open("w") as log:
        whole = [sys.executable, "-m", *command, str(folder)]
        done = subprocess.run(whole, cwd=ROOT, env=os.environ | own, stdout=log, stderr=log, check=False)
    assert done.returncode == 0, (folder / "log.txt").read_text()[-10_000:]
    launched: dict[str, Any] = torch.load(folder / "found.pt", weights_only=True)
    return launched


def test_zero_2_trains_and_resumes_as_one_process_without_it(found: dict[str, Any], tmp_path: Path) -> None:
    forget_accelerate()
    alone = run(tmp_path, "alone", "full", 1, **SHORT_ROWS)
    for name in ("whole", "resumed"):
        check_same(Result(**found[name]), alone)


def test_what_deepspeed_cannot_do_is_refused(found: dict[str, Any]) -> None:
    stage, head = found["said"]
    assert stage.startswith("`deepspeed` must use ZeRO stage 0, 1 or 2: ")
    assert stage.endswith("Got stage 3. To shard weights use FSDP2.")
    assert head == "`offset_lr_multiplier` must be 1 with `deepspeed`, which clips all gradients together. Got 5.0."
