"""What isn't finite is never saved: the last good checkpoint stays, and is named."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from sequencematch.policy import Policy
from sequencematch.policy.finite import non_finite
from sequencematch.training import NonFiniteError, checkpoints
from tests.training import tiny_run

SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}


class SpoilAfter(TrainerCallback):
    """Puts a number into the weights, or into the optimizer's state, right after the update of a step."""

    def __init__(self, step: int, value: float, *, into_optimizer: bool = False) -> None:
        self.step, self.value, self.into_optimizer = step, value, into_optimizer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == self.step - 1:
            row = model.backspace.row
            (optimizer.state[row]["exp_avg"] if self.into_optimizer else row.data)[3] = self.value


def spoilt(folder: Path, spoil: TrainerCallback | None, **changes: Any) -> Any:
    trainer = tiny_run.trainer(folder, **(SAVING | changes))
    if spoil is not None:
        trainer.add_callback(spoil)
    return trainer


def test_nan_and_infinities_are_found_by_name_and_large_numbers_pass() -> None:
    tensors = {
        "nan": torch.tensor([1.0, torch.nan]),
        "inf": torch.tensor([[torch.inf, 0.0]]),
        "minus": torch.tensor([-torch.inf], dtype=torch.bfloat16),
        "half": torch.tensor([torch.inf], dtype=torch.float16),
        "large": torch.tensor([1e300, -1e300], dtype=torch.float64),
        "bits": torch.tensor([255], dtype=torch.uint8),
        "empty": torch.zeros(0),
        "eight": torch.tensor([448.0]).to(torch.float8_e4m3fn),
        "eight nan": torch.tensor([torch.nan]).to(torch.float8_e4m3fn),
    }
    assert non_finite(tensors.items()) == ["nan", "inf", "minus", "half", "eight nan"]


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (SpoilAfter(3, torch.nan), r"Weights are not finite \(backspace\.row\)"),
        (SpoilAfter(3, -torch.inf), r"Weights are not finite \(backspace\.row\)"),
        (
            SpoilAfter(3, torch.inf, into_optimizer=True),
            r"The optimizer's state is not finite \(exp_avg of backspace\.row\)",
        ),
    ],
)
def test_a_checkpoint_that_is_not_finite_is_not_written_and_the_one_before_stays_and_is_named(
    spoil: TrainerCallback, what: str, tmp_path: Path
) -> None:
    text = rf"^{what} at step 3\. No checkpoint was written\. The last good checkpoint is .*/run/checkpoint-2\. Lower"
    with pytest.raises(NonFiniteError, match=text):
        spoilt(tmp_path, spoil).train()
    assert [path.name for path in checkpoints.checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    resumed = spoilt(tmp_path, None)  # the control: without the NaN the same run goes on
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert [path.name for path in checkpoints.checkpoints(tmp_path / "run")] == ["checkpoint-4"]


def test_a_loss_that_is_not_finite_because_of_the_weights_says_so_and_names_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    text = r"The loss is nan, .* at step 4\. Weights are not finite \(backspace\.row\)\. The last good checkpoint is "
    with pytest.raises(NonFiniteError, match=text + r".*/run/checkpoint-2\. Lower"):
        spoilt(tmp_path, SpoilAfter(3, torch.nan), save_steps=2).train()
    with pytest.raises(NonFiniteError, match=r"There is no checkpoint yet\. Lower"):
        spoilt(tmp_path / "other", SpoilAfter(3, torch.nan), save_strategy="no").train()


def test_a_policy_that_is_not_finite_is_neither_saved_nor_exported(tmp_path: Path) -> None:
    policy = tiny_run.policy()
    policy.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        policy.model.lm_head.weight[2, 1] = torch.nan
    text = r"`policy` must have finite weights to be saved\. Got NaN or infinity in model\.lm_head\.weight\."
    for write in (policy.save_pretrained, policy.export):
        with pytest.raises(ValueError, match=text):
            write(tmp_path / "saved" if write == policy.save_pretrained else tmp_path / "export")
    assert not (tmp_path / "export").exists()
    Policy.from_pretrained(tmp_path / "saved")  # the one before is whole


def test_a_run_that_ends_with_weights_that_are_not_finite_saves_no_policy(tmp_path: Path) -> None:
    trainer = spoilt(tmp_path, SpoilAfter(4, torch.nan), save_strategy="no")
    trainer.train()
    with pytest.raises(NonFiniteError, match=r"Weights are not finite \(backspace\.row\) at step 4\. Nothing was writ"):
        trainer.save_model(str(tmp_path / "final"))
    assert not (tmp_path / "final").exists()


def test_a_checkpoint_of_an_older_version_with_nan_is_named_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such versions wrote whatever there was."""
    with monkeypatch.context() as patch:
        patch.setattr("sequencematch.training.saving.non_finite", lambda _: [])
        patch.setattr("sequencematch.policy.finite.non_finite", lambda _: [])
        with pytest.raises(NonFiniteError, match="The loss is nan"):
            spoilt(tmp_path, SpoilAfter(3, torch.nan), save_total_limit=None).train()
    text = r"checkpoint-3 must hold finite weights to be resumed\. Got NaN or infinity in backspace\.row\. .* earlier"
    with pytest.raises(ValueError, match=text):
        spoilt(tmp_path, None, save_total_limit=None).train(resume_from_checkpoint=True)
    earlier = spoilt(tmp_path, None, save_total_limit=None)
    earlier.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert earlier.state.global_step == 4


class InfiniteGradient(TrainerCallback):
    """Infinite in one entry, as it is after a loss that overflowed."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == 1:
            model.backspace.row.grad[0] = torch.inf


@pytest.mark.parametrize("precision", [{}, {"fp16": True}, {"bf16": True}])
def test_an_infinite_gradient_stops_a_run_that_has_no_gradient_scaler(
    precision: dict[str, bool], tmp_path: Path
) -> None:
    """On a CPU there is no scaler, in float16 either."""
    trainer = tiny_run.trainer(tmp_path, **precision)
    assert trainer.accelerator.scaler is None
    for place, callback in enumerate(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "StopAtNonFiniteGradients":
            trainer.callback_handler.callbacks.insert(place, InfiniteGradient())
            break
    with pytest.raises(NonFiniteError, match=re.escape("The gradient's norm is inf at step 2. The weights were not")):
        trainer.train()
