"""DeepMind's generator, checked by arithmetic of our own."""

import importlib.util
import itertools
import random
import re
from typing import Any

import numpy as np
import pytest

from sequencematch.tasks import Question, questions
from sequencematch.tasks.generator import distinct_questions
from tests.tasks.answers import ANSWERS

COUNT = 4_000


@pytest.fixture(scope="module", params=ANSWERS)
def drawn(request: pytest.FixtureRequest) -> tuple[str, list[Question]]:
    return request.param, list(itertools.islice(questions(request.param, 0), COUNT))


def first(count: int, module: str, seed: int | str, **options: Any) -> list[Question]:
    return list(itertools.islice(questions(module, seed, **options), count))


def numpy_state() -> Any:
    return [np.asarray(part).tolist() for part in np.random.get_state()]  # noqa: NPY002


@pytest.mark.parametrize(
    ("module", "question", "answer"),
    [
        # 4·343 + 49 + 35 + 6 = 1462 and 343 + 98 + 28 = 469 differ by 993 = 2·343 + 6·49 + 7 + 6.
        ("add_or_sub_in_base", "In base 7, what is -1240 - -4156?", "2616"),
        ("add_or_sub_in_base", "In base 2, what is 1 + -1?", "0"),
        ("mul", "Work out -0.5 * 0.02.", "-0.01"),
        ("mul", "What is 25 times 0.4?", "10"),
        ("list_prime_factors", "List the prime factors of 360.", "2, 3, 5"),
        ("list_prime_factors", "What are the prime factors of 9999999967?", "9999999967"),
    ],
)
def test_the_oracle_answers_by_hand(module: str, question: str, answer: str) -> None:
    assert ANSWERS[module](question) == answer


def test_four_thousand_answers_are_right(drawn: tuple[str, list[Question]]) -> None:
    module, found = drawn
    assert len(found) == COUNT
    wrong = [question for question in found if ANSWERS[module](question.text) != question.answer]
    assert wrong == []


def test_questions_have_the_papers_bases_and_lengths(drawn: tuple[str, list[Question]]) -> None:
    """Bases 2 to 10, each a ninth of the questions; base 2 less often, since its answers may exceed 30 digits."""
    module, found = drawn
    bases = [question.base for question in found]
    assert set(bases) == (set(range(2, 11)) if module == "add_or_sub_in_base" else {None})
    if module == "add_or_sub_in_base":
        assert all(abs(bases.count(base) - COUNT / 9) < 150 for base in range(2, 11))
        assert all(question.text.startswith(f"In base {question.base}, ") for question in found)
    assert max(len(question.answer) for question in found) <= 30
    assert len({question.text for question in found}) > 0.9 * COUNT


def test_one_seed_gives_one_stream_in_every_process() -> None:
    assert first(1, "mul", "train 0") == [Question("What is -26.3 times -0.042?", "1.1046", None)]
    assert first(250, "mul", 0) == first(250, "mul", 0)
    assert set(first(250, "mul", 0)).isdisjoint(first(250, "mul", 1))


@pytest.mark.parametrize("module", ANSWERS)
def test_drawing_leaves_the_global_generators_alone_and_is_left_alone(module: str) -> None:
    random.seed(3)
    before, numpy_before = random.getstate(), numpy_state()
    expected = first(250, module, 0)
    assert random.getstate() == before
    assert numpy_state() == numpy_before
    stream, interrupted = questions(module, 0), []
    for _ in range(250):
        interrupted.append(next(stream))
        random.random()
        np.random.random()  # noqa: NPY002
    assert interrupted == expected


def test_the_global_generators_are_put_back_when_a_draw_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> None:
        random.random()
        np.random.random()  # noqa: NPY002
        raise RuntimeError

    monkeypatch.setattr("sequencematch.tasks.generator._generator", lambda *_: draw)
    before, numpy_before = random.getstate(), numpy_state()
    with pytest.raises(RuntimeError):
        next(questions("mul", 0))
    assert random.getstate() == before
    assert numpy_state() == numpy_before


def test_small_numbers_in_some_bases_can_be_had() -> None:
    """Entropy 1 to 2: operands from −50 to 50, which have up to six digits in base 2 and four in base 3."""
    small = first(500, "add_or_sub_in_base", 0, entropy=(1, 2), bases=(2, 3))
    assert {question.base for question in small} == {2, 3}
    assert max(len(question.answer) for question in small) <= 1 + 7
    assert [ANSWERS["add_or_sub_in_base"](question.text) for question in small] == [q.answer for q in small]


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("Multiply -3 and 0.4.", "-3 0.4"),
        ("Calculate -3*0.4.", "-3 0.4"),
        ("-3 * 0.4", "-3 0.4"),
        ("What is -3 times 0.4?", "-3 0.4"),
        ("List the prime factors of 36.", "36"),
        ("What are the prime factors of 36?", "36"),
        ("In base 2, what is 1 - -10?", "2 1 - -10"),
        ("In base 2, what is 1 + -10?", "2 1 + -10"),
    ],
)
def test_operands_are_what_is_asked_in_any_words(text: str, operands: str) -> None:
    assert Question(text, "", None).operands == operands


def test_distinct_questions_leave_out_what_is_known() -> None:
    stream = [Question(text, "", None) for text in ("1*2", "2*2", "1 times 2", "2*1", "3*3", "4*4")]
    known = {"3 3"}
    found = distinct_questions(iter(stream), 3, known)
    assert [question.text for question in found] == ["1*2", "2*2", "2*1"]
    assert known == {"1 2", "2 2", "2 1", "3 3"}
    rest = distinct_questions(iter(stream), 1, known)
    assert [question.text for question in rest] == ["4*4"]


def test_wrong_options_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"module": "div"}, "`module` must be one of add_or_sub_in_base, mul, list_prime_factors. Got 'div'."),
        (
            {"bases": (2, 11)},
            "`bases` must be two numbers from 2 to 10, the lower first: above 10, some digits are letters. Got",
        ),
        ({"bases": (1, 3)}, "`bases` must be two numbers from 2 to 10"),
        ({"bases": (5, 3)}, "the lower first: above 10, some digits are letters. Got bases=(5, 3)."),
        ({"module": "mul", "bases": (2, 9)}, "`bases` must be left out with module='mul', which names no base."),
        (
            {"entropy": (0, 3)},
            "`entropy` must be two numbers above 0 and up to 20, the lower first. Got entropy=(0, 3).",
        ),
        ({"entropy": (3, 2)}, "The paper's data has (3, 10)."),
        ({"entropy": (3, 21)}, "Got entropy=(3, 21)."),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            questions(**{"module": "add_or_sub_in_base", "seed": 0, **options})


def test_more_questions_than_there_are_can_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sequencematch.tasks.generator.PATIENCE", 1000)
    with pytest.raises(
        ValueError, match=r"different questions as are asked for, 5,000 here. Got \d\d\d?, and no other"
    ):
        distinct_questions(questions("list_prime_factors", 0, entropy=(1, 2)), 5_000, set())


def test_the_generator_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(
        ValueError, match=r"^The arithmetic task needs the package mathematics_dataset: pip install 'seq"
    ):
        questions("mul", 0)
