"""§6.1, App. G.3 and G.4: rows of arithmetic."""

import itertools
import re
from typing import Any

import pytest

from sequencematch.core.mdp import ActionSpace
from sequencematch.data.examples import Reader
from sequencematch.tasks import Arithmetic, Question, questions
from sequencematch.tasks.arithmetic import as_row
from tests.policy.tiny_models import character_tokenizer
from tests.tasks.answers import ANSWERS

MODULES = list(ANSWERS)
#: Table 1 of the paper: what is right, the base, and where its model ended after a wrong beginning.
PAPER = [
    ("In base 2, what is -11101111011001100 + 10100? Solution: -11101111010111000", 2, "-11101111011000010"),
    ("In base 8, what is 4354 + 33? Solution: 4407", 8, "4417"),
    ("In base 8, what is -4 + -576122? Solution: -576126", 8, "-576126"),
    ("In base 5, what is 10 - 3311121? Solution: -3311111", 5, "-3311111"),
]


def small(module: str, **options: Any) -> Arithmetic:
    return Arithmetic(module, **{"train_size": 300, "test_size": 100, **options})


def paper_question(example: str, base: int) -> Question:
    text, answer = example.split(" Solution: ")
    return Question(text, answer, base)


def asked(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"] for row in rows]


@pytest.mark.parametrize(("example", "base", "_"), PAPER)
def test_a_row_reads_as_in_the_paper(example: str, base: int, _: str) -> None:
    question = paper_question(example, base)
    assert ANSWERS["add_or_sub_in_base"](question.text) == question.answer
    row = as_row(question)
    assert row["prompt"] + row["completion"] == example
    assert row["prompt"].endswith("? Solution:")
    assert row["noise_tokens"] == list("0123456789"[:base])


def test_the_papers_own_final_states_are_right_in_two_of_four_cases() -> None:
    """Its caption says three: 4354 + 33 in base 8 is 4407, not 4417, as its own first column has it."""
    task = small("add_or_sub_in_base")
    rows = [as_row(paper_question(example, base)) for example, base, _ in PAPER]
    right = [task.is_right(final, row) for row, (_, _, final) in zip(rows, PAPER, strict=True)]
    assert right == [False, False, True, True]
    assert [task.is_right(row["completion"], row) for row in rows] == [True] * 4


@pytest.mark.parametrize("module", MODULES)
def test_every_row_has_the_papers_format_and_the_right_answer(module: str) -> None:
    task = small(module)
    train, test = task.train(), task.test()
    assert (len(train), len(test)) == (300, 100)
    for row in train + test:
        assert list(row) == ["prompt", "completion", "noise_tokens"]
        question = row["prompt"].removesuffix(" Solution:")
        assert row["prompt"] == f"{question} Solution:"
        assert row["completion"] == f" {ANSWERS[module](question)}"


@pytest.mark.parametrize("module", MODULES)
def test_noise_is_exactly_the_digits_of_the_base(module: str) -> None:
    rows = small(module).train()
    for row in rows:
        named = re.match(r"In base (\d+),", row["prompt"])
        assert (named is not None) == (module == "add_or_sub_in_base")
        assert row["noise_tokens"] == list("0123456789"[: int(named[1]) if named else 10])
    assert len({len(row["noise_tokens"]) for row in rows}) == (9 if module == "add_or_sub_in_base" else 1)


def test_the_sizes_are_the_papers_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Arithmetic()
    assert (task.module, len(task.train()), len(task.test())) == ("add_or_sub_in_base", 5_000, 200)
    asked_for: list[int] = []

    def distinct_questions(_: Any, count: int, __: Any) -> list[Question]:
        asked_for.append(count)
        return []

    monkeypatch.setattr("sequencematch.tasks.arithmetic.distinct_questions", distinct_questions)
    for module in MODULES:
        Arithmetic(module, seed=-1).train()  # a seed of its own: splits are kept
    assert asked_for == [200, 5_000, 200, 5_000, 200, 50_000]


@pytest.mark.parametrize("module", MODULES)
def test_no_question_occurs_twice_nor_one_of_the_test_in_training(module: str) -> None:
    """Small numbers, where they would: nearly all of the few hundred questions there are."""
    task = small(module, entropy=(1, 2) if module == "add_or_sub_in_base" else (2, 3))
    train, test = task.train(), task.test()
    numbers = [
        re.sub(r"[^\d+.-]+", " ", prompt.removesuffix(" Solution:")).strip(" .") for prompt in asked(train + test)
    ]
    assert len(set(numbers)) == 400
    assert set(asked(train)).isdisjoint(asked(test))


def test_without_that_care_a_test_question_would_occur_in_training() -> None:
    train, test = (itertools.islice(questions("mul", f"{split} 0", entropy=(2, 3)), 300) for split in ("train", "test"))
    assert {question.operands for question in train} & {question.operands for question in test}


@pytest.mark.parametrize("module", MODULES)
def test_the_seed_decides(module: str) -> None:
    assert small(module).train() == small(module, max_new_tokens=9).train()
    assert small(module).test() == small(module, max_new_tokens=9).test()
    assert set(asked(small(module).train())).isdisjoint(asked(small(module, seed=1).train()))
    assert set(asked(small(module).test())).isdisjoint(asked(small(module, seed=1).test()))


def test_more_rows_to_train_on_change_neither_the_test_nor_those_before() -> None:
    few, many = small("mul"), small("mul", train_size=900)
    assert many.test() == few.test()
    assert many.train()[:300] == few.train()
    assert small("mul", train_size=0).train() == []
    assert small("mul", test_size=50).test() == few.test()[:50]


def test_rows_belong_to_the_caller() -> None:
    task = small("mul")
    task.train()[0]["noise_tokens"].clear()
    assert task.train()[0]["noise_tokens"] == list("0123456789")


def test_the_test_may_have_longer_numbers_than_training() -> None:
    """Entropy 3 to 4: up to 10,002. Entropy 8: up to 100,000,002, nine in ten of which have eight digits."""
    task = small("list_prime_factors", entropy=(3, 4), test_entropy=(8, 8))
    train, test = ([len(re.sub(r"\D", "", prompt)) for prompt in asked(rows)] for rows in (task.train(), task.test()))
    assert max(train) <= 5
    assert test.count(8) > 75


def test_rows_are_read_by_the_trainer() -> None:
    tokenizer = character_tokenizer()
    task = small("add_or_sub_in_base", bases=(2, 7))
    space = ActionSpace(len(tokenizer), eos=tokenizer.eos_token_id)
    read = Reader(tokenizer, space.ends, max_length=256, needs_noise=True)
    for row in task.train():
        example = read(row)
        assert "".join(tokenizer.convert_ids_to_tokens(example.completion)) == re.sub(
            "[7-9]", "<unk>", row["completion"]
        )
        assert tokenizer.convert_ids_to_tokens(example.noise_tokens) == row["noise_tokens"]
        assert len(example.completion) < task.max_new_tokens


def test_wrong_options_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"module": "div"}, "`module` must be one of"),
        ({"train_size": -1}, "`train_size` must be at least 0. Got train_size=-1."),
        ({"test_size": -1}, "`test_size` must be at least 0. Got test_size=-1."),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1. Got max_new_tokens=0."),
        ({"bases": (2, 16)}, "`bases` must be two numbers from 2 to 10"),
        ({"module": "mul", "bases": (2, 10)}, "`bases` must be left out with module='mul'"),
        ({"entropy": (-1, 3)}, "`entropy` must be two numbers above 0 and up to 20"),
        ({"test_entropy": (9, 8)}, "the lower first. Got test_entropy=(9, 8)."),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            Arithmetic(**options)
