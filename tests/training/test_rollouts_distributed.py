"""Processes that train together share the first one's workers, whose weights are older: the run equals that of one process."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import programs
from tests.training.distributed_run import HOW, Result, run
from tests.training.rollouts_in_two import AGE
from tests.training.test_distributed import LAUNCHER, ROOT, check_same


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes found, started once."""
    folder = tmp_path_factory.mktemp("launched")
    program = [sys.executable, "-S", programs.__file__, "-m", "tests.training.rollouts_in_two", str(folder)]
    done = programs.run("-m", *LAUNCHER.split(), *program, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.parametrize("how", HOW)
def test_two_processes_with_older_weights_equal_one_with_weights_of_that_age(
    tmp_path: Path, found: dict[str, Any], how: str
) -> None:
    """Losses, gradients, weights and rollouts, up to rounding."""
    result = Result(**found[how]["result"])
    assert (result.processes, result.is_sharded) == (2, how == "fsdp")
    check_same(result, run(tmp_path / "older", "sequencematch", (8, 1), rollouts="process", max_staleness=AGE))
    assert result.losses != pytest.approx(run(tmp_path / "inline", "sequencematch", (8, 1)).losses, rel=1e-4)


@pytest.mark.parametrize("how", HOW)
def test_all_processes_hold_the_same_rollouts(found: dict[str, Any], how: str) -> None:
    assert found[how]["agreed"]
