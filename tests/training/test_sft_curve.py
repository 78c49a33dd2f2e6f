"""Maximum likelihood against TRL: the same model, data, order and seed give the curve that its `SFTTrainer` gave.

record_sft_curve.py recorded it, in an environment with TRL, and says what is trained on what. The order of rows is equal
because both trainers leave it to `transformers.Trainer`, which shuffles by seed, epoch and number of rows alone.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sequencematch.training import SequenceMatchConfig, SequenceMatchTrainer
from tests.training.record_sft_curve import ARGUMENTS, FORMATS, RECORD, STEPS, llama, rows, tokenizer, train

#: Float32 rounding carried through 20 steps of AdamW. A sum in another order changes a loss by up to 3e-7 and a gradient's
#: norm by up to 4e-6, also with a CPU's older instructions; one item more or less in the denominator, by 4e-3 or more.
RTOL = 1e-5


def recorded(form: str) -> dict[str, Tensor]:
    curve = json.loads(RECORD.read_text())["curves"][form]
    return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in curve.items()}


def trained(folder: Path, form: str, **changes: Any) -> dict[str, Tensor]:
    columns, completion_only = FORMATS[form]
    values = {"objective": "mle", "completion_only_loss": completion_only, "truncation": True, **ARGUMENTS}
    model = llama()
    trainer = SequenceMatchTrainer(
        model=model,
        args=SequenceMatchConfig(output_dir=str(folder / "run"), **(values | changes)),
        train_dataset=rows(columns),
        processing_class=tokenizer(),
    )
    return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in train(trainer, model).items()}


def test_the_rows_are_ragged_and_some_are_cut_or_end_in_their_own_eos() -> None:
    for columns, _ in FORMATS.values():
        lengths = [len(tokenizer()("".join(row.values()))["input_ids"]) for row in rows(columns)]
        assert len(set(lengths)) > 20
        assert max(lengths) > ARGUMENTS["max_length"]
        assert any(row[columns[-1]].endswith("<eos>") for row in rows(columns))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_mle_gives_the_loss_curve_of_sft(tmp_path: Path, form: str, packing: bool) -> None:
    ours, sft = trained(tmp_path, form, packing=packing), recorded(form)
    assert sft["loss"].shape == (STEPS,)
    assert sft["loss"][-1] < 0.6 * sft["loss"][0]  # something was learnt
    torch.testing.assert_close(ours, sft, rtol=RTOL, atol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_with_backspace_in_the_softmax_every_step_is_off_the_curve_of_sft(tmp_path: Path, form: str) -> None:
    ours, sft = trained(tmp_path, form, objective="bc", noise_rate=0.0), recorded(form)
    assert (ours["loss"] / sft["loss"] - 1 > 100 * RTOL).all()  # V is larger by the share of <bkspc>


def test_in_another_order_of_rows_every_step_is_off_the_curve_of_sft(tmp_path: Path) -> None:
    ours, sft = trained(tmp_path, "text", data_seed=ARGUMENTS["seed"] + 1), recorded("text")
    assert ((ours["loss"] / sft["loss"] - 1).abs() > 100 * RTOL).all()
