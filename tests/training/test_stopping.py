"""A run that is stopped early finishes its step, saves, and goes on later as if it had never stopped."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from sequencematch.training import SequenceMatchTrainer, StoppedEarlyError, checkpoints, stopping
from sequencematch.training.stopping import Reason, StopEarly, stopped_by_sigterm
from tests.cli.program import check_error, run
from tests.training import resumable_run, tiny_run
from tests.training.resumable_run import assert_same
from tests.training.test_recipe import check_same, file, model, weights, write

__all__ = ["file", "model"]  # fixtures

#: Checkpoints only where a run stops or ends.
SETTINGS: dict[str, Any] = {"max_steps": 9, "bc_steps": 2, "save_steps": 1000}


class At(TrainerCallback):
    """Does something in the middle of a step: before its gradients are complete."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == self.step - 1:
            self.act()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_gets_sigterm_in_a_step_ends_after_it_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, records = resumable_run.trainer(tmp_path / "whole", tmp_path / "whole.jsonl", **SETTINGS)
    whole.train()
    reference = resumable_run.outcome(whole, records)
    stopped, _ = resumable_run.trainer(tmp_path / "run", tmp_path / "a.jsonl", **SETTINGS)
    stopped.add_callback(At(5, terminate))
    before = signal.getsignal(signal.SIGTERM)
    text = r"^Stopped after step 5, because SIGTERM came\. The last checkpoint is .*/checkpoint-5\.$"
    with pytest.raises(StoppedEarlyError, match=text) as error, stopped_by_sigterm(stopped.stop):
        stopped.train()
    assert error.value.reason == Reason.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    resumed, records = resumable_run.trainer(tmp_path / "run", tmp_path / "b.jsonl", **SETTINGS)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumable_run.outcome(resumed, records), reference, after=5)


def test_a_run_stops_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes a minute forward whenever it is read: once at the beginning, then after each step."""
    minutes = iter(range(1000))
    trainer = tiny_run.trainer(tmp_path, stop_after_minutes=2.5, max_steps=6)
    monkeypatch.setattr(stopping, "monotonic", lambda: 60.0 * next(minutes))
    with pytest.raises(StoppedEarlyError, match=r"Stopped after step 3, because `stop_after_minutes` were over\."):
        trainer.train()
    assert [path.name for path in checkpoints.checkpoints(tmp_path / "run")] == ["checkpoint-3"]


def test_a_run_whose_last_step_is_done_has_ended_and_was_not_stopped(tmp_path: Path) -> None:
    trainer = tiny_run.trainer(tmp_path, max_steps=3, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    trainer.add_callback(At(3, trainer.stop.ask))
    trainer.train()
    assert trainer.state.global_step == 3


def test_all_processes_stop_when_one_of_them_is_asked() -> None:
    """`highest` is the exchange between processes; this one was not asked."""

    class State:
        global_step, max_steps = 4, 9

    class Control:
        should_save = should_training_stop = False

    for highest, stops in ((lambda _: int(Reason.SIGTERM), True), (lambda own: own, False)):
        stop, control = StopEarly(None, highest), Control()
        stop.on_step_end(None, State(), control)
        assert control.should_save == control.should_training_stop == stops


@pytest.mark.parametrize("minutes", [0, -1.0])
def test_a_time_that_is_not_positive_is_refused(minutes: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"`stop_after_minutes` must be positive\. Got {minutes}\."):
        tiny_run.config(tmp_path, stop_after_minutes=minutes)


# On the command line.


def at(step: int, act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SequenceMatchTrainer.train

    def train(self: SequenceMatchTrainer, *arguments: Any, **options: Any) -> Any:
        self.add_callback(At(step, act))
        return real(self, *arguments, **options)

    monkeypatch.setattr(SequenceMatchTrainer, "train", train)


def test_sigterm_ends_the_program_with_143_and_without_a_final_policy_and_it_can_be_resumed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_steps": 4, "save_steps": 1000, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    assert run("train", write(tmp_path / "whole", model, **settings)).exit_code == 0
    path = write(tmp_path / "stopped", model, **settings)
    with monkeypatch.context() as patch:
        at(2, terminate, patch)
        stopped = run("train", path)
    assert (stopped.exit_code, stopped.stdout) == (143, ""), stopped.output
    folder = tmp_path / "stopped" / "run"
    again = f"sequencematch train {path} --resume"
    line = f"Stopped after step 2, because SIGTERM came. The last checkpoint is {folder / 'checkpoint-2'}. To resume: {again}"
    assert stopped.stderr.splitlines()[-1] == line
    assert not (folder / "final").exists()
    assert run(*again.split()[1:]).exit_code == 0
    check_same(weights(tmp_path / "whole" / "run" / "final"), weights(folder / "final"))


def test_a_program_whose_time_is_up_ends_with_124(file: Path) -> None:
    result = run("train", file, "--stop-after-minutes", "0.0000001")
    assert (result.exit_code, result.stdout) == (124, ""), result.output
    assert "Stopped after step 1, because `stop_after_minutes` were over." in result.stderr
    assert not (file.parent / "run" / "final").exists()


# Resuming with other data, or another number of rows in a step.


def test_other_rows_or_another_global_batch_size_are_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    tiny_run.trainer(tmp_path, **saving).train()
    remedy = r"Choose another folder\. To resume all the same set `resume_anyway`\."
    rows = tiny_run.rows()
    for other in (rows[:-1], [*rows[:-1], {"prompt": "x", "completion": "y"}], rows[::-1]):
        text = rf"whose run had dataset='\w{{16}}' and not '\w{{16}}'\. {remedy}"
        with pytest.raises(ValueError, match=text):
            tiny_run.trainer(tmp_path, dataset=other, **saving)
    fitting = r"For 4 rows a step with 1 process, set `per_device\w+` × `gradient\w+` to 4 × 1, 2 × 2 or 1 × 4\."
    for changes in ({"per_device_train_batch_size": 2}, {"gradient_accumulation_steps": 2}):
        with pytest.raises(ValueError, match=rf"whose run had global_batch_size=4 and not [28]\. {fitting} {remedy}"):
            tiny_run.trainer(tmp_path, **saving, **changes)
    same = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}  # four a step, too
    tiny_run.trainer(tmp_path, **saving, **same).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("is_recorded", [True, False], ids=["now", "older run file"])
def test_prompts_of_rollouts_that_come_or_go_are_refused_when_a_run_is_resumed(
    is_recorded: bool, tmp_path: Path
) -> None:
    """Older run files name no prompts where there were none."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    prompts = [{"prompt": "x"}, {"prompt": "yz"}]
    for place, began, other in (("without", None, prompts), ("with", prompts, None)):
        tiny_run.trainer(tmp_path / place, rollout_dataset=began, **saving).train()
        path = tmp_path / place / "run" / checkpoints.RUN
        known = json.loads(path.read_text())
        assert (known["rollout_dataset"] is None) == (began is None)
        if began is None and not is_recorded:
            path.write_text(json.dumps({name: value for name, value in known.items() if name != "rollout_dataset"}))
        with pytest.raises(ValueError, match=r"whose run had rollout_dataset=.* and not .*set `resume_anyway`\."):
            tiny_run.trainer(tmp_path / place, rollout_dataset=other, **saving)
        resumed = tiny_run.trainer(tmp_path / place, rollout_dataset=began, max_steps=6, **saving)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 6


def test_numbers_of_processes_that_can_take_the_rows_of_a_step_are_named() -> None:
    assert checkpoints.settings_for(8, 3) == "No settings of 3 processes take 8 rows a step: start 1, 2, 4 or 8."
    set_to = "set `per_device_train_batch_size` × `gradient_accumulation_steps` to"
    assert checkpoints.settings_for(8, 4) == f"For 8 rows a step with 4 processes, {set_to} 2 × 1 or 1 × 2."
    assert checkpoints.settings_for(8, 8) == f"For 8 rows a step with 8 processes, {set_to} 1 × 1."


def test_a_checkpoint_of_deepspeed_needs_the_processes_that_saved_it(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rng_state_{rank}.pth").touch()
    checkpoints.refuse_other_processes(tmp_path, 2)
    with pytest.raises(ValueError, match=r"with `deepspeed`\. Got .*, saved by 2, and 3 now\. DDP and FSDP2 can go on"):
        checkpoints.refuse_other_processes(tmp_path, 3)


def test_other_rows_are_accepted_when_the_caller_insists(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    tiny_run.trainer(tmp_path, **saving).train()
    other = tiny_run.rows()[:-1]
    resumed = tiny_run.trainer(tmp_path, dataset=other, resume_anyway=True, max_steps=6, **saving)
    assert "This is not an exact resume." in caplog.text
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    tiny_run.trainer(tmp_path, dataset=other, max_steps=6, **saving)  # which is the run's dataset now


def test_a_run_of_an_older_version_which_did_not_note_its_rows_is_resumed(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trainer = tiny_run.trainer(tmp_path, **saving)
    for name in checkpoints.INSISTED_ON:
        trainer.identity.pop(name, None)
    trainer.train()
    tiny_run.trainer(tmp_path, dataset=tiny_run.rows()[:-1], **saving).train(resume_from_checkpoint=True)


def test_the_program_says_which_flag_insists(file: Path) -> None:
    assert run("train", file).exit_code == 0
    words = file.parent / "words.jsonl"
    words.write_text("\n".join(words.read_text().splitlines()[1:]) + "\n")
    check_error(run("train", file, "--resume"), "whose run had dataset=", "To resume all the same set `resume_anyway`.")
    assert run("train", file, "--resume", "--resume-anyway", "--max-steps", "4").exit_code == 0
