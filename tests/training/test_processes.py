"""Twenty steps on two and three processes equal those on one, and a checkpoint goes on on any number of processes.

Three processes, started by `torchrun`, run on the CPU over gloo; the first two also form groups of two.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from accelerate import DistributedType
from accelerate.commands.config.config_args import load_config_from_file

from tests.training import processes_run
from tests.training.processes_run import (
    KINDS,
    RESUMED,
    SAVED,
    SPREAD,
    STEPS,
    WITH_WORKER,
    Result,
    name_of,
    resumed_name,
    worker_name,
)

ROOT = Path(__file__).parents[2]
#: Differences of float32 rounding: of a loss, relatively; of a weight of order one, after twenty steps of Adam. Seen were at
#: most 1.4e-6 and 7e-7.
LOSS, WEIGHT = 5e-6, 3e-6


@dataclass(frozen=True)
class Found:
    """Every run's result by its name, and what was refused."""

    results: Mapping[str, Result]
    said: list[str]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All runs, each once: alone in this process before and after those of the launched ones."""
    folder = tmp_path_factory.mktemp("processes")
    alone = processes_run.train_all(folder, 1)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder / "hf"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    with (folder / "log.txt").open("w") as log:
        command = processes_run.launched_command(folder, "process")
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False)
    assert done.returncode == 0, (folder / "log.txt").read_text()[-10_000:]
    results, said = processes_run.found_in(folder)
    return Found(alone | results | processes_run.resume_all(folder, 1), said)


def check_same(result: Result, expected: Result) -> None:
    """Equal losses and rollouts, and in the end equal weights, up to rounding."""
    assert result.rollouts == expected.rollouts
    assert result.losses == pytest.approx(expected.losses, rel=LOSS)
    assert result.held_out == pytest.approx(expected.held_out, rel=LOSS)
    assert result.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert (result.weights[name] - weight).abs().max() <= WEIGHT, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("processes", "how"), [(p, how) for p in (2, 3) for how in SPREAD[p]])
def test_twenty_steps_on_several_processes_equal_those_on_one(
    found: Found, processes: int, how: str, kind: str
) -> None:
    result = found.results[name_of(processes, how, kind)]
    assert (result.processes, result.sharded, result.sharded_layers) == (processes, how != "ddp", how != "ddp")
    assert len(result.losses) == STEPS
    check_same(result, found.results[name_of(1, "alone", kind)])


@pytest.mark.parametrize("case", [pytest.param(case, id=name_of(*case)) for case in WITH_WORKER])
def test_processes_that_share_a_worker_equal_one_without(found: Found, case: tuple[int, str, str]) -> None:
    result = found.results[worker_name(case, "process")]
    assert (result.processes, result.sharded, len(result.losses)) == (case[0], case[1] != "ddp", STEPS)
    check_same(result, found.results[name_of(1, "alone", case[2])])


@pytest.mark.parametrize(("saved", "onto"), [pytest.param(*each, id=resumed_name(*each)) for each in RESUMED])
def test_a_checkpoint_goes_on_on_another_number_of_processes_as_if_nothing_had_happened(
    found: Found, saved: tuple[int, str, str], onto: tuple[int, str]
) -> None:
    result = found.results[resumed_name(saved, onto)]
    assert (result.processes, result.sharded) == (onto[0], onto[1] in ("fully_shard", "fsdp plugin"))
    check_same(result, found.results[name_of(1, "alone", saved[2])])


def test_the_weights_that_are_compared_have_changed_since_the_checkpoint(found: Found) -> None:
    """So a run that was not resumed, or not with its optimizer's state, would be noticed."""
    assert SAVED < STEPS
    full, lora = (found.results[name_of(1, "alone", kind)] for kind in KINDS)
    assert full.losses[:SAVED] != full.losses[SAVED:]
    assert full.losses != pytest.approx(lora.losses, rel=1e-3)


def test_other_numbers_of_rows_in_a_step_are_refused_and_the_fitting_settings_named(found: Found) -> None:
    assert len(found.said) == 3
    for rows, said in zip((3, 12), found.said[:2], strict=True):
        assert f"whose run had global_batch_size=6 and not {rows}. For 6 rows a step with 3 processes, set" in said
        assert "`per_device_train_batch_size` × `gradient_accumulation_steps` to 2 × 1 or 1 × 2." in said


def test_fsdp_1_is_refused(found: Found) -> None:
    assert found.said[2] == "`fsdp_version` must be 2: rollouts gather the weights, which FSDP 1 flattens. Got 1."


@pytest.mark.parametrize(("name", "kind"), [("ddp", "MULTI_GPU"), ("fsdp2", "FSDP"), ("zero2", "DEEPSPEED")])
def test_the_examples_of_accelerates_configuration_are_read_by_accelerate(name: str, kind: str) -> None:
    found = load_config_from_file(str(ROOT / "examples" / "accelerate" / f"{name}.yaml"))
    assert (found.distributed_type, found.num_processes, found.mixed_precision) == (DistributedType[kind], 8, "bf16")
    assert found.fsdp_config.get("fsdp_version") == (2 if kind == "FSDP" else None)
    assert found.deepspeed_config.get("zero_stage") == (2 if kind == "DEEPSPEED" else None)
