"""A short run in which everything random takes part, recorded step by step; it can be killed anywhere."""

import contextlib
import gc
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback

from sequencematch.core.mdp import Trajectory
from sequencematch.data.locks import locked
from sequencematch.policy import storage
from sequencematch.training import SequenceMatchTrainer, checkpoints
from tests.training import tiny_run

#: 19 rows in batches of 3, two to a step: 4 steps an epoch, the last of one batch with one row. So checkpoint 12 is at the
#: end of an epoch, and 3, 6, 9, 15 and the last one are inside.
STEPS = 17
ROWS = [{"text": f"{a} {b}"} for a, b in zip(tiny_run.WORDS * 2, tiny_run.WORDS[5:] * 3, strict=False)][:19]
SETTINGS: Mapping[str, Any] = {
    "objective": "sequencematch",
    "noise_rate": 0.2,
    "bc_steps": 5,
    "bc_anneal_steps": 5,
    "replay_size": 15,
    "replay_reuse": 2.5,
    "generation_batch_size": 8,
    "max_completion_length": 6,
    "max_prompt_length": 4,
    "max_length": 16,
    "max_steps": STEPS,
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "inverse_sqrt",  # never zero: a step too many shows
    "warmup_steps": 5,
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": 2,
    "logging_steps": 5,  # a checkpoint lies between two lines of the log
    "eval_strategy": "steps",
    "eval_steps": 7,
}


#: Of the clock, or of one call of `train` and not of the run, as transformers has it.
NOT_OF_THE_RUN = ("step_seconds", "rollouts/seconds", "_runtime", "_per_second", "train_loss")


@dataclass(frozen=True)
class Kill:
    """A point of a run, counted in the run's own events and not in time, so that it is the same one each time.

    It lies inside a stage of writing the step's checkpoint or, without a stage, that many calls after the step; step 0 is the
    start of training.
    """

    step: int
    stage: str | None = None
    calls: int = 0


def run_folder(folder: Path) -> Path:
    """Where the checkpoints are."""
    return folder / "run"


class RecordedTrainer(SequenceMatchTrainer):
    """Keeps the losses of a step, and what was drawn for it."""

    record: dict[str, Any]

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """The loss, noted to the last bit."""
        loss = super().compute_loss(*arguments, **options)
        self.record.setdefault("losses", []).append(float(loss.detach()).hex())
        return loss

    def get_batch_samples(self, *arguments: Any) -> Any:
        """The batches, with an empty record."""
        self.record = {}
        return super().get_batch_samples(*arguments)

    def _data(self, batch: dict[str, Any]) -> list[Trajectory]:
        found = super()._data(batch)
        self.record.setdefault("data", []).append(_digest(found))
        return found


class Recorder(TrainerCallback):
    """Writes a line a step, at once."""

    def __init__(self, path: Path, records: list[dict[str, Any]]) -> None:
        """`records` gets the same."""
        self.path, self.records = path, records
        self.trainer: RecordedTrainer | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """The step's losses, data with its noise, the rollouts there are to draw from, and torch's random state."""
        assert self.trainer is not None
        rollouts = [experience.trajectory for experience in self.trainer.on_policy.buffer.rollouts]
        random_state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]
        record = {
            "step": state.global_step,
            **self.trainer.record,
            "rollouts": _digest(rollouts),
            "random": random_state,
        }
        self.records.append(record)
        self.trainer.record = {}  # what evaluation looks at is no part of it
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


class Killer(TrainerCallback):
    """Kills its process so many calls, of Python or C functions, after a step."""

    def __init__(self, when: Kill) -> None:
        """The kill's step and calls."""
        self.when, self.left = when, when.calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Step 0, unless the run is resumed."""
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Begin to count."""
        if state.global_step == self.when.step:
            sys.setprofile(self._count)

    def _count(self, frame: Any, event: str, argument: Any) -> None:  # noqa: ARG002
        self.left -= 1
        if self.left < 0:
            _die()


def trainer(
    folder: Path,
    record: Path,
    dataset: Any = None,
    peft_config: Any = None,
    rollout_dataset: Any = None,
    **changes: Any,
) -> tuple[RecordedTrainer, list[dict[str, Any]]]:
    """A fresh trainer in a folder, and the list that its steps are recorded in."""
    records: list[dict[str, Any]] = []
    recorder = Recorder(record, records)
    made = RecordedTrainer(
        model=tiny_run.policy(attention_dropout=0.2),
        args=tiny_run.config(folder, **{**SETTINGS, "output_dir": str(run_folder(folder)), **changes}),
        train_dataset=ROWS if dataset is None else dataset,
        eval_dataset=ROWS[:5],
        callbacks=[recorder],
        peft_config=peft_config,
        rollout_dataset=rollout_dataset,
    )
    recorder.trainer = made
    return made, records


def outcome(trained: SequenceMatchTrainer, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything a run ends with, for comparing."""
    buffer = trained.on_policy.buffer
    return {
        "steps": list(records),
        "parameters": {name: tensor.detach().clone() for name, tensor in trained.model.state_dict().items()},
        "optimizer": trained.optimizer.state_dict(),
        "buffer": (buffer.made, buffer.drawn, [(e.version, _numbers(e.trajectory)) for e in buffer.rollouts]),
        "log": trained.state.log_history,
    }


def assert_same(ours: Mapping[str, Any], reference: Mapping[str, Any], *, after: int = 0) -> None:
    """All that a run did from a step on, and all that it ended with, to the last bit."""
    assert ours["steps"] == reference["steps"][after:], "steps differ"
    assert ours["buffer"] == reference["buffer"], "buffers differ"
    assert ours["parameters"].keys() == reference["parameters"].keys()
    for name, tensor in reference["parameters"].items():
        assert torch.equal(ours["parameters"][name], tensor), f"parameters differ: {name}"
    assert_equal_states(ours["optimizer"], reference["optimizer"])
    assert [of_the_run(line) for line in ours["log"]] == [of_the_run(line) for line in reference["log"]], "logs differ"


def assert_equal_states(ours: Any, reference: Any) -> None:
    """The optimizer's nested state."""
    if isinstance(reference, dict):
        assert ours.keys() == reference.keys(), "optimizers differ"
        for key, value in reference.items():
            assert_equal_states(ours[key], value)
    elif isinstance(reference, torch.Tensor):
        assert torch.equal(ours, reference), "optimizers differ"
    else:
        assert ours == reference, "optimizers differ"


def of_the_run(line: Mapping[str, float]) -> dict[str, float]:
    """A log line without what is different each time."""
    return {name: value for name, value in line.items() if not name.endswith(NOT_OF_THE_RUN)}


def run(folder: Path, record: Path, *, resume: bool = False, kill: Kill | None = None) -> None:
    """Train to the end, on one thread, and leave the outcome in the folder; or die before, at a point."""
    torch.set_num_threads(1)
    gc.freeze()  # every run collects garbage: not among what was imported
    with record.with_suffix(".txt").open("w") as text, contextlib.redirect_stderr(text):
        made, records = trainer(folder, record)
        if kill is not None and kill.stage is not None:
            STAGES[kill.stage](kill.step)
        elif kill is not None:
            made.add_callback(Killer(kill))
        try:
            made.train(resume_from_checkpoint=resume)
        except ValueError as error:
            if "needs a complete checkpoint" not in str(error):
                raise
            made.train()  # killed before there was one
        if kill is not None and kill.stage == "end":
            _die()
        torch.save(outcome(made, records), folder / "outcome.pt")


def _inside_the_weights(step: int) -> None:
    """The model's weights are there, those of the row are not."""

    def die_or_save(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
        if _partial(step) in path.parts:
            _die()
        save_file(tensors, path, **options)

    patch.object(storage, "save_file", die_or_save).start()


def _inside_the_optimizer(step: int) -> None:
    """Half of its file is written."""
    save = torch.save

    def save_half(state: Any, path: Any, *arguments: Any, **options: Any) -> None:
        save(state, path, *arguments, **options)
        if Path(path).parts[-2:] == (_partial(step), "optimizer.pt"):
            os.truncate(path, os.path.getsize(path) // 2)
            _die()

    patch.object(torch, "save", save_half).start()


def _inside_the_manifest(step: int) -> None:
    """Half of it is written."""
    write = Path.write_text

    def write_half(path: Path, text: str, *arguments: Any) -> int:
        if path.parts[-2:] != (_partial(step), checkpoints.MANIFEST):
            return write(path, text, *arguments)
        write(path, text[: len(text) // 2])
        return _die()

    patch.object(Path, "write_text", write_half).start()


def _before_the_name(step: int) -> None:
    """All is written, and still called partial."""
    rename = Path.rename

    def die_or_rename(path: Path, target: Path) -> Path:
        if path.name == _partial(step):
            _die()
        return rename(path, target)

    patch.object(Path, "rename", die_or_rename).start()


def _inside_the_removal(step: int) -> None:
    """Half the files of that checkpoint are gone: it makes room for a later one."""
    remove = shutil.rmtree

    def remove_half(path: Any, *arguments: Any, **options: Any) -> None:
        if Path(path).name != f"checkpoint-{step}":
            return remove(path, *arguments, **options)
        for file in sorted(Path(path).iterdir())[::2]:
            file.unlink()
        _die()

    patch.object(shutil, "rmtree", remove_half).start()


#: Where a run can be killed, as functions of the checkpoint's step.
STAGES: Mapping[str, Callable[[int], None]] = {
    "weights": _inside_the_weights,
    "optimizer": _inside_the_optimizer,
    "manifest": _inside_the_manifest,
    "name": _before_the_name,
    "removal": _inside_the_removal,
    "end": lambda step: None,  # noqa: ARG005  (after the last checkpoint)
}


def _partial(step: int) -> str:
    return checkpoints.partial(Path(f"checkpoint-{step}")).name


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit("Still alive.")


def _numbers(trajectory: Trajectory) -> tuple[Any, ...]:
    return trajectory.initial, trajectory.chosen, trajectory.executed, trajectory.policy_chosen, trajectory.floor


def _digest(trajectories: Sequence[Trajectory]) -> str:
    return hashlib.sha256(repr([_numbers(trajectory) for trajectory in trajectories]).encode()).hexdigest()[:16]


def hold(folder: Path) -> None:
    """Hold a run's folder until killed."""
    with locked(folder, "output_dir", checkpoints.LOCK):
        signal.pause()
