"""Arithmetic: sums in other bases, products and prime factors   (§6.1, App. G.3 and G.4)."""

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sequencematch.tasks.generator import (
    ENTROPY,
    MODULES,
    Question,
    check_entropy,
    check_questions,
    distinct_questions,
    questions,
)
from sequencematch.tasks.task import Row, Task, check_at_least


@dataclass(frozen=True)
class Arithmetic(Task):
    """Questions of one module, as `{question} Solution: {answer}`; noise may be any digit of the base   (App. E).

    No question occurs twice, and no test question is in training, not even in other words ("3*4", "What is 3 times 4?").
    `train_size` does not change the test.
    """

    name: ClassVar[str] = "arithmetic"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "recovery", "own_errors", "backspace_rate")
    module: str = field(
        default="add_or_sub_in_base", metadata={"help": f"What the questions are about: {', '.join(MODULES)}."}
    )
    train_size: int | None = field(
        default=None,
        metadata={"help": "Questions to train on. Default, as in the paper: 5,000; list_prime_factors: 50,000."},
    )
    test_size: int = field(default=200, metadata={"help": "Questions held out."})
    seed: int = field(default=0, metadata={"help": "Which questions are drawn."})
    entropy: tuple[float, float] = field(
        default=ENTROPY,
        metadata={"help": "How long numbers are: least and greatest log10 of the number of possible operands."},
    )
    test_entropy: tuple[float, float] | None = field(
        default=None,
        metadata={
            "help": "The same for questions held out; (8, 8) is the generator's interpolation. Default: entropy."
        },
    )
    bases: tuple[int, int] | None = field(
        default=None, metadata={"help": "Least and greatest base of add_or_sub_in_base. Default: 2 and 10."}
    )
    max_new_tokens: int = field(default=32, metadata={"help": "Longest answer; right ones have up to 30 characters."})

    def __post_init__(self) -> None:
        """Refuse options that make no sense."""
        check_questions(self.module, self.entropy, self.bases)
        check_entropy("test_entropy", self.test_entropy or self.entropy)
        check_at_least(self, {"train_size": 0, "test_size": 0, "max_new_tokens": 1})

    def train(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        """Rows whose questions are not in the test."""
        return [as_row(question) for question in _train(self)]

    def test(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        """Rows held out."""
        return [as_row(question) for question in _test(self)]


def as_row(question: Question) -> Row:
    """The paper's format, split after `Solution:`, and the digits that noise may insert   (App. E)."""
    return {
        "prompt": f"{question.text} Solution:",
        "completion": f" {question.answer}",
        "noise_tokens": [str(digit) for digit in range(question.base or 10)],
    }


# Drawing takes seconds: the last few splits are cached.


@functools.lru_cache(maxsize=8)
def _test(task: Arithmetic) -> list[Question]:
    entropy = task.test_entropy or task.entropy
    drawn = questions(task.module, f"test {task.seed}", entropy=entropy, bases=task.bases)
    return distinct_questions(drawn, task.test_size, set())


@functools.lru_cache(maxsize=8)
def _train(task: Arithmetic) -> list[Question]:
    size = task.train_size
    if size is None:
        size = 50_000 if task.module == "list_prime_factors" else 5_000
    drawn = questions(task.module, f"train {task.seed}", entropy=task.entropy, bases=task.bases)
    return distinct_questions(drawn, size, {question.operands for question in _test(task)})
