"""Rollouts by worker processes: the same as inline, whatever happens to workers, and nothing is left behind."""

import errno
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import pytest
import torch
from peft import LoraConfig

from sequencematch.policy import Policy, Sampling
from sequencematch.training import SequenceMatchTrainer
from sequencematch.training.rollouts.copies import Blueprint
from sequencematch.training.rollouts.pool import Failed
from sequencematch.training.rollouts.processes import ProcessEngine
from sequencematch.training.rollouts.weights import Layout
from sequencematch.training.rollouts.worker import Setup
from tests.policy.tiny_models import character_tokenizer
from tests.training import tiny_run
from tests.training.rollout_runs import Outcome, is_running, make, outcome, run, signal_one, total, wait_until

ROOT = Path(__file__).parents[2]

Undisturbed = tuple[Outcome, SequenceMatchTrainer, Path]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Two workers, weights of any age, and a checkpoint in the middle of a batch."""
    folder = tmp_path_factory.mktemp("undisturbed")
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 3}
    found, trainer = run(folder, rollouts="process", rollout_workers=2, **settings)
    return found, trainer, folder


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_one_worker_without_staleness_equals_inline_bit_for_bit(tmp_path: Path, lora: bool) -> None:
    """Losses, weights and rollouts; LoRA under autocast to bfloat16, with merged adapters and a trained row of <eos>."""
    expected, _ = run(tmp_path / "inline", lora=lora)
    found, trainer = run(tmp_path / "process", lora=lora, rollouts="process", max_staleness=0)
    assert found.equals(expected)
    assert {line["rollouts/staleness"] for line in trainer.state.log_history if "rollouts/staleness" in line} == {0}
    assert {experience.version for experience in found.rollouts} == {3, 7, 11}


def test_a_worker_of_qlora_equals_inline_bit_for_bit(tmp_path: Path) -> None:
    """The base model, in 4 bits, is copied once; adapters and rows of end tokens travel."""
    quantized = pytest.importorskip("tests.policy.test_quantized")
    base = tmp_path / "base"
    tiny_run.policy(hidden_size=64, head_dim=16).base.save_pretrained(base)

    def outcome_of(folder: Path, **changes: Any) -> Outcome:
        torch.manual_seed(0)
        adapter, how = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"), quantized.four_bit()
        policy = Policy.from_pretrained(
            base, tokenizer=character_tokenizer(), quantization_config=how, device="cpu", peft_config=adapter
        )
        return run(folder, policy=policy, **changes)[0]

    expected = outcome_of(tmp_path / "inline")
    assert outcome_of(tmp_path / "process", rollouts="process", max_staleness=0).equals(expected)


def test_rollouts_made_ahead_are_older_and_change_the_run(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """A negative control: with other weights the rollouts are others. Batches due at steps 3, 7 and 11 were begun four before."""
    found, trainer, _ = undisturbed
    assert {experience.version for experience in found.rollouts} == {0, 3, 7}
    lines = [line["rollouts/staleness"] for line in trainer.state.log_history if "rollouts/staleness" in line]
    assert lines == [3, 4, 4]
    assert not found.equals(run(tmp_path)[0])


def test_a_killed_and_a_hung_worker_change_nothing(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Bit for bit; every rollout that workers report was received, and none of them twice."""
    hit = set[int]()
    faults = {step: signal_one(number, hit) for step, number in ((2, SIGKILL), (4, SIGSTOP), (8, SIGKILL))}
    counts = []
    settings: dict[str, Any] = {"rollouts": "process", "rollout_workers": 2, "rollout_timeout_s": 5}
    faults[12] = lambda pool: counts.append((pool.counts.received, pool.reported))
    found, trainer = run(tmp_path, faults, **settings)
    assert found.equals(undisturbed[0])
    ((received, reported),) = counts
    assert received == reported == 24 == trainer.on_policy.buffer.made
    assert total(trainer, "rollouts/replaced") >= 2  # the last one may die unnoticed, if it is not needed any more
    assert total(trainer, "rollouts/duplicates") == 0
    assert total(trainer, "rollouts/dropped_stale") == 0


def test_a_run_resumed_in_the_middle_of_a_batch_equals_one_that_was_not(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The checkpoint holds what had been submitted ahead."""
    found, _, folder = undisturbed
    saved = folder / "run" / "checkpoint-5"
    assert (saved / "rollouts_ahead.safetensors").is_file()
    trainer = make(tmp_path, rollouts="process", rollout_workers=2)
    trainer.train(resume_from_checkpoint=str(saved))
    assert outcome(trainer).equals(found)


def test_a_trainer_that_is_killed_leaves_no_worker_and_no_file_and_is_resumed(tmp_path: Path) -> None:
    """The worker is stopped before, so that it can't notice by itself. It has many files to remove, and must not end before."""
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "tests.training.rollout_runs", str(tmp_path)]
        trainer = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    checkpoint = tmp_path / "run" / "checkpoint-8"
    try:
        assert wait_until(checkpoint.is_dir, 120), (tmp_path / "log").read_text()
        worker = int((tmp_path / "worker").read_text())
        folders = [Path(part.decode()) for part in Path(f"/proc/{worker}/cmdline").read_bytes().split(b"\0")[-3:-1]]
        assert all(map(Path.is_dir, folders))
        for number in range(10_000):
            (folders[0] / f"file-{number}").touch()
        os.kill(worker, SIGSTOP)
    finally:
        trainer.kill()
        trainer.wait()
    assert wait_until(lambda: not is_running(worker))
    assert wait_until(lambda: not any(map(Path.exists, folders)))
    resumed = make(tmp_path, max_steps=12, rollouts="process", max_staleness=0)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == resumed.state.max_steps


def test_a_worker_that_can_not_start_says_why() -> None:
    """What the process printed last is the error. Its files and its process are gone after `stop`."""
    engine = ProcessEngine()
    block = engine.block(8)
    nothing = Layout.of([])
    blueprint = Blueprint(b"no policy", (), nothing, nothing)
    engine.begin(Setup(blueprint, Sampling(), "cpu", 1, "highest"), engine.publish(block))
    folder = engine.folder
    engine.launch(1)
    process = engine.workers[1].process
    (event,) = engine.events(60)
    engine.kill(1)
    engine.stop()
    assert isinstance(event, Failed)
    assert event.error.splitlines()[-1].startswith("_pickle.UnpicklingError: ")
    assert "Traceback" in event.error
    assert process.returncode == 1
    assert folder is not None
    assert not folder.exists()


def test_weights_that_do_not_fit_into_memory_are_written_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system in memory is full; then both are. A file with a hole would end the program when it is written."""
    full: list[Path] = []
    allocate = os.posix_fallocate

    def refuse(file: int, start: int, size: int) -> None:
        if any(Path(f"/proc/self/fd/{file}").readlink().is_relative_to(folder) for folder in full):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    engine = ProcessEngine()
    small = engine.publish(engine.block(100))
    assert engine.folder is not None
    full.append(engine.folder)
    large = engine.publish(engine.block(5000))
    assert Path(small.path).parent == engine.folder
    assert Path(large.path).parent == engine.on_disk
    assert Path(large.path).stat().st_blocks * 512 >= 5000
    full.append(tmp_path)
    with pytest.raises(ValueError, match=r"`rollouts` 'process' needs room for weights, 2\.00 GiB, in /dev/shm or in"):
        engine.block(2**31)
    engine.stop()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_forgotten_leaves_no_files() -> None:
    engine = ProcessEngine()
    engine.block(8)
    folders = [folder for folder in (engine.folder, engine.on_disk) if folder is not None]
    assert len(folders) == 2
    assert all(map(Path.is_dir, folders))
    del engine
    gc.collect()
    assert not any(map(Path.exists, folders))


def test_memory_of_weights_is_used_again_when_nobody_refers_to_it() -> None:
    """Two publications that are in use need two files; a third one takes the place of a forgotten one."""
    engine = ProcessEngine()
    first, second = (engine.publish(engine.block(100)) for _ in range(2))
    assert first.path != second.path
    forgotten = first.path
    del first
    assert engine.publish(engine.block(100)).path == forgotten
    assert engine.publish(engine.block(200)).path not in (forgotten, second.path)
    engine.stop()
