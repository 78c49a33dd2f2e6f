"""Questions and answers drawn by DeepMind's generator, `mathematics-dataset`   (§6.1)."""

import importlib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from sequencematch.extras import require

#: A module of the generator that the paper uses → the file it is in.
MODULES: Mapping[str, str] = {
    "add_or_sub_in_base": "arithmetic",
    "mul": "arithmetic",
    "list_prime_factors": "numbers",
}
#: The generator's own range for training: log10 of the number of possible operands, drawn uniformly.
ENTROPY = (3.0, 10.0)
MAX_ENTROPY = 20  # shared by the numbers of a sum; above it, hardly any answer is short enough to be kept
#: Least and greatest base. The generator goes up to 16; the paper drops bases with letters as digits (App. E).
BASES = (2, 10)
#: Give up after this many draws in a row without a new question.
PATIENCE = 10_000


class Question(NamedTuple):
    """A question, its answer, and its base if it names one."""

    text: str
    answer: str
    base: int | None

    @property
    def operands(self) -> str:
        """The question without its words: "Multiply -3 and 0.4." → "-3 0.4"; "In base 2, what is 1 - 10?" → "2 1 - 10"."""
        return re.sub(r"[^\d.+-]+", " ", self.text).strip(" .")


def questions(
    module: str, seed: int | str, *, entropy: tuple[float, float] = ENTROPY, bases: tuple[int, int] | None = None
) -> Iterator[Question]:
    """An endless stream of questions, repeats included; those outside `bases` (default: 2 to 10) or too long are left out.

    As in the generator's own command, questions above 160 characters and answers above 30 are too long.
    """
    check_questions(module, entropy, bases)
    return _accepted(_draws(_generator(module, entropy), seed), *(bases or BASES))


def distinct_questions(drawn: Iterator[Question], count: int, known: set[str]) -> list[Question]:
    """The next `count` questions whose operands are not in `known`, to which they are added."""
    found: list[Question] = []
    misses = 0
    while len(found) < count:
        question = next(drawn)
        misses = misses + 1 if question.operands in known else 0
        if misses == PATIENCE:
            raise ValueError(
                f"`entropy` must allow as many different questions as are asked for, {count:,} here. Got {len(found):,}, and "
                f"no other in {PATIENCE:,} draws. Raise `entropy`, or lower `train_size` or `test_size`."
            )
        if not misses:
            known.add(question.operands)
            found.append(question)
    return found


def check_questions(module: str, entropy: tuple[float, float], bases: tuple[int, int] | None) -> None:
    """Refuse settings that the generator can't draw from, or that would be ignored."""
    if module not in MODULES:
        raise ValueError(f"`module` must be one of {', '.join(MODULES)}. Got {module!r}.")
    check_entropy("entropy", entropy)
    if bases is None:
        return
    if module != "add_or_sub_in_base":
        raise ValueError(f"`bases` must be left out with module={module!r}, which names no base. Got bases={bases}.")
    if not BASES[0] <= bases[0] <= bases[1] <= BASES[1]:
        raise ValueError(
            f"`bases` must be two numbers from {BASES[0]} to {BASES[1]}, the lower first: above {BASES[1]}, some digits are "
            f"letters. Got bases={bases}."
        )


def check_entropy(name: str, entropy: tuple[float, float]) -> None:
    """Refuse an invalid entropy; `name` is the caller's argument."""
    if not 0 < entropy[0] <= entropy[1] <= MAX_ENTROPY:
        raise ValueError(
            f"`{name}` must be two numbers above 0 and up to {MAX_ENTROPY}, the lower first. Got {name}={entropy}. "
            f"The paper's data has (3, 10)."
        )


def _accepted(problems: Iterator[tuple[str, str]], low: int, high: int) -> Iterator[Question]:
    settings = importlib.import_module("mathematics_dataset.generate_settings")
    for text, answer in problems:
        named = re.match(r"In base (\d+),", text)
        base = int(named[1]) if named else None
        fits = len(text) <= settings.MAX_QUESTION_LENGTH and len(answer) <= settings.MAX_ANSWER_LENGTH
        if fits and (base is None or low <= base <= high):
            yield Question(text, answer, base)


def _draws(draw: Callable[[], Any], seed: int | str) -> Iterator[tuple[str, str]]:
    """The generator uses the global states of `random` and numpy: swap in our own for a hundred draws, then restore them."""
    own = random.Random(seed)
    state, numpy_state = own.getstate(), np.random.RandomState(own.getrandbits(32)).get_state()
    while True:
        outside, numpy_outside = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.setstate(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        try:
            drawn = [draw() for _ in range(100)]
            state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
        finally:
            random.setstate(outside)
            np.random.set_state(numpy_outside)  # noqa: NPY002
        yield from ((str(problem.question), str(problem.answer)) for problem in drawn)


def _generator(module: str, entropy: tuple[float, float]) -> Callable[[], Any]:
    require("mathematics_dataset", "arithmetic", "The arithmetic task")
    # The generator imports this function from its old place in sympy.
    moved = importlib.import_module("sympy.solvers.diophantine.diophantine").base_solution_linear
    vars(importlib.import_module("sympy.solvers.diophantine")).setdefault("base_solution_linear", moved)
    file = importlib.import_module(f"mathematics_dataset.modules.{MODULES[module]}")
    draw: Callable[[], Any] = file.train(lambda _: entropy)[module]
    return draw
