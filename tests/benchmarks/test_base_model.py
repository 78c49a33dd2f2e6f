"""The script that trained the bundled base model: its questions, its tokens, its loss, and a run of a few steps."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from benchmarks import base_model
from benchmarks.base_model import (
    CHARACTERS,
    PHRASES,
    ROW,
    accuracy,
    answer_loss,
    arithmetic_tokenizer,
    questions,
    tokenised,
)
from sequencematch.policy import Policy

QUESTION = re.compile(r"In base 10, what is (-?\d+) ([+-]) (-?\d+)\? Solution:")
ON_CPU: dict[str, Any] = {"device": "cpu", "compiled": False}


def drawn(count: int, seed: int = 0, *, held_out: bool = False) -> list[tuple[str, str]]:
    return list(questions(count, np.random.default_rng(seed), held_out=held_out))


def prompts(count: int, seed: int = 0, *, held_out: bool = False) -> set[str]:
    return {prompt for prompt, _ in drawn(count, seed, held_out=held_out)}


def numbers(prompt: str) -> tuple[int, str, int]:
    found = QUESTION.fullmatch(prompt)
    assert found, prompt
    return int(found[1]), found[2], int(found[3])


# By hand.


def test_a_token_is_a_character_or_a_phrase() -> None:
    tokenizer = arithmetic_tokenizer()
    ids = tokenizer("In base 7, what is 1? Solution: 2")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        *("<s>", "In base", " ", "7", ", what is", " ", "1", "? Solution:", " ", "2")
    ]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "<s>", "</s>"]
    assert len(tokenizer) == 4 + 95 + 3


def test_the_longest_question_just_fits_a_row() -> None:
    """1 for <s>, 1 + 3 for `In base 10`, 1 + 1 for `, what is `, 13 + 3 + 13, 1 for `? Solution:`, 15 and 1 for </s>: 53."""
    a = b = -(10**12 - 1)
    text = f"In base 10, what is {a} + {b}? Solution: {a + b}"
    assert len(arithmetic_tokenizer()(text)["input_ids"]) + 1 == ROW == 53


# Questions.


def test_every_answer_is_right_by_pythons_own_integers() -> None:
    for held_out in (False, True):
        asked = drawn(2000, held_out=held_out)
        assert len(asked) == 2000
        for prompt, answer in asked:
            a, sign, b = numbers(prompt)
            assert answer == f" {a + b if sign == '+' else a - b}"


def test_numbers_have_one_to_twelve_digits_alike_both_signs_and_zero() -> None:
    parts = [numbers(prompt) for prompt, _ in drawn(6000)]
    operands = [n for a, _, b in parts for n in (a, b)]
    lengths = [len(str(abs(n))) for n in operands]
    # Twelve lengths, 12,000 numbers: 1000 of each, with a standard deviation of 30.
    assert {length: abs(lengths.count(length) - 1000) < 150 for length in set(lengths)} == dict.fromkeys(
        range(1, 13), True
    )
    assert sum(n < 0 for n in operands) / len(operands) == pytest.approx(1 / 3, abs=0.03)
    assert 0 in operands
    assert {n for n in operands if abs(n) < 10} == set(range(-9, 10))
    assert {sign for _, sign, _ in parts} == {"+", "-"}


def test_one_question_in_97_is_held_out_by_its_numbers() -> None:
    """31·a + 17·b, and 1 for a difference, is a multiple of 97: 31·2 + 17·2 + 1 is 97, so 2 - 2 is held out."""
    for held_out in (False, True):
        for a, sign, b in map(numbers, prompts(3_000, held_out=held_out)):
            assert ((31 * a + 17 * b + (sign == "-")) % 97 == 0) == held_out
    few = "In base 10, what is 2 {} 2? Solution:"
    held = prompts(20_000, held_out=True)
    assert [few.format(sign) in held for sign in "-+"] == [True, False]


def test_no_question_held_out_is_trained_on() -> None:
    """Only numbers of few digits can meet by chance: of 60,000 questions some 400 have two of one digit."""
    trained, tested = prompts(60_000), prompts(1_000, seed=1, held_out=True)
    assert not trained & tested
    # Controls: but for the rule they would meet.
    assert trained & prompts(1_000, seed=2)
    assert tested & prompts(1_000, seed=2, held_out=True)


def test_the_same_generator_asks_the_same_questions() -> None:
    assert drawn(50, seed=4) == drawn(50, seed=4)
    assert drawn(50, seed=4) != drawn(50, seed=5)


# Tokens.


@pytest.mark.parametrize("held_out", [False, True])
def test_rows_are_what_the_tokenizer_makes_of_the_text(held_out: bool) -> None:
    tokenizer = arithmetic_tokenizer()
    rows, is_answer = tokenised(200, np.random.default_rng(3), held_out=held_out)
    asked = drawn(200, seed=3, held_out=held_out)
    for row, marked, (prompt, answer) in zip(rows, is_answer, asked, strict=True):
        before = tokenizer(prompt)["input_ids"]
        text = [*tokenizer(prompt + answer)["input_ids"], tokenizer.eos_token_id]
        assert row.tolist() == text + [tokenizer.pad_token_id] * (ROW - len(text))
        assert marked.nonzero().flatten().tolist() == list(range(len(before), len(text)))
        assert tokenizer.decode(row[marked]) == f"{answer}</s>"


@pytest.mark.parametrize(
    "text",
    [
        CHARACTERS,
        CHARACTERS[::-1],
        *PHRASES,
        "".join(PHRASES),
        "  two  spaces ,  and three   .  ",
        "Don't, isn't ; a . b ! c ?",
        "in base, In bas, what is? Solution : In baseIn base",
    ],
)
def test_the_tokenizer_gives_any_printable_text_back(text: str) -> None:
    tokenizer = arithmetic_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.unk_token_id in tokenizer(text + "é")["input_ids"]  # the control


# The loss, on the bundled model.


@pytest.fixture(scope="module")
def model() -> Any:
    return Policy.from_pretrained("sequencematch/arithmetic-base").base


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    """Forty questions; ten with another last digit in their answer, five with a digit for </s>."""
    rows, is_answer = tokenised(40, np.random.default_rng(0), held_out=True)
    last = ROW - 1 - is_answer.flip(1).int().argmax(1)
    zero = 4 + CHARACTERS.index("0")
    for row in range(10):
        rows[row, last[row] - 1] = zero + (int(rows[row, last[row] - 1]) - zero + 1) % 10
    for row in range(10, 15):
        rows[row, last[row]] = zero
    return rows, is_answer


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_of_answers_alone(model: Any, batch: tuple[Tensor, Tensor]) -> None:
    rows, is_answer = batch
    loss, _ = answer_loss(model, rows.long(), is_answer)
    log_probs = model(input_ids=rows.long()).logits.double().log_softmax(-1)
    each = -log_probs[:, :-1].gather(2, rows.long()[:, 1:, None]).squeeze(2)
    answers = [float(each[row, place - 1]) for row, place in is_answer.nonzero().tolist()]
    assert float(loss) == pytest.approx(sum(answers) / len(answers), rel=1e-5)  # float32 rounding
    assert float(loss) != pytest.approx(float(each[rows[:, 1:] != 0].mean()), rel=0.1)  # over questions as well


@torch.no_grad()
def test_an_answer_is_right_where_greedy_decoding_writes_it(model: Any, batch: tuple[Tensor, Tensor]) -> None:
    rows, is_answer = batch
    _, is_right = answer_loss(model, rows.long(), is_answer)
    written = []
    for row, marked in zip(rows, is_answer, strict=True):
        prompt = row[: int(marked.int().argmax())].long()[None]
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)
        written.append(made[0, prompt.shape[1] :].tolist() == row[marked].tolist())
    assert is_right.tolist() == written
    assert not any(written[:15])
    assert sum(written) > 20
    assert accuracy(model, rows, is_answer) == pytest.approx(sum(written) / 40)


# A run.


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One narrow layer: bfloat16 is slow on a CPU."""
    monkeypatch.setattr(base_model, "SIZES", {**base_model.SIZES, "hidden_size": 32, "num_hidden_layers": 1})


@pytest.mark.usefixtures("small")
def test_a_short_run_learns_and_writes_what_can_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"steps": 8, "batch_size": 8, "drawn": 300, "tested": 7}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        base_model.main(tmp_path / name, seed=seed, **sizes, **ON_CPU)
    assert f"% of 7 held-out questions right; wrote {tmp_path / 'c'}" in capsys.readouterr().out.replace("\n", "")

    record = json.loads((tmp_path / "a" / "curve.json").read_text())
    losses = [entry["loss"] for entry in record["curve"]]
    assert losses[0] == pytest.approx(np.log(102), rel=0.1)  # at first every token is as likely
    assert losses[-1] < 0.9 * losses[0]
    assert [entry["step"] for entry in record["curve"]] == list(range(1, 9))
    facts = {"steps": 8, "batch_size": 8, "questions": 300, "test_questions": 7, "seed": 0, "device": "cpu"}
    assert {name: record[name] for name in facts} == facts

    stored = {name: load_file(tmp_path / name / "model.safetensors") for name in "abc"}
    assert {tensor.dtype for tensor in stored["a"].values()} == {torch.bfloat16}
    same = [all(torch.equal(stored["a"][n], other[n]) for n in other) for other in (stored["b"], stored["c"])]
    assert same == [True, False]

    plain, policy = AutoModelForCausalLM.from_pretrained(tmp_path / "a"), Policy.from_pretrained(tmp_path / "a")
    for loaded in (plain, policy.base):
        assert {p.dtype for p in loaded.parameters()} == {torch.float32}
        weights = loaded.state_dict()
        assert all(torch.equal(weights[n], tensor.float()) for n, tensor in stored["a"].items())
    assert record["parameters"] == sum(p.numel() for p in plain.parameters())
    text = f"{drawn(1)[0][0]}  ~"
    expected = arithmetic_tokenizer()(text)["input_ids"]
    tokenizers: list[Any] = [AutoTokenizer.from_pretrained(tmp_path / "a"), policy.tokenizer]
    assert [tokenizer(text)["input_ids"] for tokenizer in tokenizers] == [expected] * 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("steps", [3, 50, 61])
def test_a_run_may_be_as_short_as_three_steps(steps: int, tmp_path: Path) -> None:
    """In 50 steps a warm-up of 2 % is a single one. The last step is always measured, and some thirty before it."""
    base_model.main(tmp_path, steps=steps, batch_size=1, drawn=9, tested=1, **ON_CPU)
    measured = [entry["step"] for entry in json.loads((tmp_path / "curve.json").read_text())["curve"]]
    every = {3: 1, 50: 1, 61: 2}[steps]
    assert measured == sorted({*range(every, steps + 1, every), steps})


def test_fewer_steps_are_refused_and_five_thousand_questions_are_tested_by_default(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(base_model.main)
    result = CliRunner().invoke(app, [str(tmp_path), "--steps", "2"], env={"NO_COLOR": "1", "COLUMNS": "200"})
    assert result.exit_code == 2
    assert "'--steps'" in result.stderr
    assert "greater than or equal to 3" in result.stderr
    assert list(tmp_path.iterdir()) == []
    assert inspect.signature(base_model.main).parameters["tested"].default == 5_000
