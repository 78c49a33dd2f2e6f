"""Processes that train together share the workers of the first: all hold the same rollouts, and the run equals one process."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import programs
from tests.training.distributed_run import HOW, Result, run
from tests.training.rollouts_in_two import AGES
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
def test_two_processes_with_a_shared_worker_equal_one_without(tmp_path: Path, found: dict[str, Any], how: str) -> None:
    """Losses, gradients, weights and rollouts, up to rounding."""
    result = Result(**found[f"{how}, 0"]["result"])
    assert result.processes == 2
    assert result.is_sharded == (how == "fsdp")
    check_same(result, run(tmp_path, "sequencematch", (8, 1)))


@pytest.mark.parametrize("how", HOW)
def test_two_processes_with_older_weights_equal_one_with_weights_of_that_age(
    tmp_path: Path, found: dict[str, Any], how: str
) -> None:
    result = Result(**found[f"{how}, 2"]["result"])
    check_same(result, run(tmp_path, "sequencematch", (8, 1), rollouts="process", max_staleness=2))
    assert result.losses != Result(**found[f"{how}, 0"]["result"]).losses


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("how", HOW)
def test_all_processes_hold_the_same_rollouts(found: dict[str, Any], how: str, age: int) -> None:
    assert found[f"{how}, {age}"]["agreed"]
