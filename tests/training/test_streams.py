"""Streams whose passes run out: training ends in an error, not in a run that looks finished or never ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sequencematch.training import SequenceMatchTrainer
from tests.training import tiny_run


class Stream:
    """Rows that can only be read in order; they can be taken away."""

    def __init__(self) -> None:
        self.rows = tiny_run.rows()

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(self.rows)


TEXT = r"A stream must give rows for at least one step each time it is read\. Pass {} gave too few\."


def bc(folder: Path, stream: Stream, **changes: Any) -> SequenceMatchTrainer:
    return tiny_run.trainer(folder, dataset=stream, **({"objective": "bc", "max_steps": 8} | changes))


def test_a_stream_that_is_empty_when_training_starts_is_refused(tmp_path: Path) -> None:
    stream = Stream()
    trainer = bc(tmp_path, stream)
    stream.rows = []
    with pytest.raises(ValueError, match=TEXT.format(0)):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_stream_whose_later_pass_is_empty_is_refused_there(tmp_path: Path) -> None:
    """Twelve rows in batches of four: the second pass begins with step 4."""
    stream = Stream()
    trainer = bc(tmp_path, stream)
    real = trainer.train_dataset.begin_epoch

    def begin(epoch: int) -> None:
        real(epoch)
        stream.rows = stream.rows if epoch < 1 else []

    trainer.train_dataset.begin_epoch = begin
    with pytest.raises(ValueError, match=TEXT.format(1)):
        trainer.train()
    assert trainer.state.global_step == 3


def test_a_stream_with_fewer_rows_than_a_step_needs_is_refused(tmp_path: Path) -> None:
    stream = Stream()
    stream.rows = stream.rows[:4]
    with pytest.raises(ValueError, match=TEXT.format(0)):
        bc(tmp_path, stream, gradient_accumulation_steps=2).train()
    trainer = bc(tmp_path / "enough", stream)  # the control: one step a pass
    trainer.train()
    assert trainer.state.global_step == 8


def test_the_end_of_a_pass_is_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask an exhausted stream again until `max_steps` in every pass."""
    calls: list[int] = []
    real = SequenceMatchTrainer.get_batch_samples

    def count(self: SequenceMatchTrainer, *arguments: Any) -> Any:
        calls.append(self.state.global_step)
        return real(self, *arguments)

    monkeypatch.setattr(SequenceMatchTrainer, "get_batch_samples", count)
    bc(tmp_path, Stream(), max_steps=9).train()
    assert calls == [0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8]  # once more at the end of each pass of three


@pytest.mark.parametrize("name", [None, "held_out"])
def test_held_out_rows_that_run_out_are_refused(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream gives rows when it is checked and at step 1, and none at step 2."""
    stream = Stream()
    prefix = "eval" if name is None else f"eval_{name}"
    trainer = SequenceMatchTrainer(
        model=tiny_run.policy(),
        args=tiny_run.config(tmp_path, objective="bc", eval_strategy="steps", eval_steps=1),
        train_dataset=tiny_run.rows(),
        eval_dataset=stream if name is None else {name: stream},
    )
    real = trainer.log

    def log(logs: dict[str, float], *arguments: Any) -> None:
        real(logs, *arguments)
        stream.rows = [] if f"{prefix}_loss" in logs else stream.rows

    monkeypatch.setattr(trainer, "log", log)
    with pytest.raises(
        ValueError, match=rf"`eval_dataset` must give .* Got none at step 2 for {prefix}_loss\. Let the"
    ):
        trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if f"{prefix}_loss" in entry] == [1]


def test_held_out_rows_that_are_all_dropped_are_refused(tmp_path: Path) -> None:
    def run(rows: int) -> dict[str, float]:
        args = tiny_run.config(
            tmp_path, objective="bc", dataloader_drop_last=True, per_device_eval_batch_size=4, eval_strategy="steps"
        )
        held_out = tiny_run.rows()[:rows]
        made = SequenceMatchTrainer(tiny_run.policy(), args, train_dataset=tiny_run.rows(), eval_dataset=held_out)
        return made.evaluate()

    with pytest.raises(ValueError, match=r"Got none at step 0 for eval_loss\. .* with `dataloader_drop_last`, give"):
        run(3)
    assert run(4)["eval_loss"] > 0  # the control
