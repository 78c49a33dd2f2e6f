"""Sudoku with exactly one solution: the empty cells are filled in reading order."""

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from sequencematch.tasks.task import Row, Task, check_at_least

#: Size → rows and columns of a box.
BOXES: Mapping[int, tuple[int, int]] = {4: (2, 2), 6: (2, 3), 9: (3, 3)}
#: Size → the most cells that can be empty with one solution left: 4, 8 and 17 digits are the fewest.
MOST_HOLES: Mapping[int, int] = {4: 12, 6: 28, 9: 64}
EMPTY, ROW_END, ANSWER = ".", "/", "="
#: Give up after this many draws in a row without a new puzzle.
PATIENCE = 1000


class Puzzle(NamedTuple):
    """The cells in reading order, 0 where empty, and its solution."""

    cells: tuple[int, ...]
    solution: tuple[int, ...]

    @property
    def size(self) -> int:
        """Rows, columns and digits."""
        return max(self.solution)


@dataclass(frozen=True)
class Sudoku(Task):
    """`3 . 1 … / … =` is answered by the digits of the empty cells in reading order, ` 2 4 …`. Each puzzle has one solution.

    A digit must not occur twice in a row, a column or a box; a box of size 6 has 2 rows and 3 columns. Training rows are
    `puzzles` different puzzles, each turned into many by symmetries that keep the solution unique: digits are renamed; bands,
    stacks, and the lines inside each of them change places; square boxes allow a transposition. Every test row is a puzzle of
    its own, and no symmetry turns it into another one of the test or of training. `train_size` does not change the test.

    Noise looks legal (`noise_tokens`): a digit that is not yet in the row, column and box of its cell, given the puzzle and the
    cells filled before it. Where no wrong digit is legal, noise may be any digit that is legal in some empty cell; where that
    leaves none either, any digit.
    """

    name: ClassVar[str] = "sudoku"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "own_errors", "cost", "backspace_rate")
    size: int = field(default=6, metadata={"help": "Rows, columns and digits: 4, 6 or 9."})
    holes: int | None = field(
        default=None,
        metadata={
            "help": "Empty cells. Default: as many as the digits left allow, so that none of these can be spared."
        },
    )
    puzzles: int = field(
        default=2_000,
        metadata={"help": "Puzzles to train on, before symmetries. Slow to make: of size 9 ten a second."},
    )
    train_size: int = field(default=100_000, metadata={"help": "Rows to train on, made from these puzzles."})
    test_size: int = field(default=500, metadata={"help": "Puzzles held out, one row each."})
    seed: int = field(default=0, metadata={"help": "Which puzzles are drawn."})
    max_new_tokens: int | None = field(  # a number after __post_init__
        default=None,
        metadata={
            "help": "Longest answer in tokens. Default: holes, or the most cells that can be empty; one token each."
        },
    )

    def __post_init__(self) -> None:
        """Refuse options that make no sense, and set the default of `max_new_tokens`."""
        if self.size not in BOXES:
            raise ValueError(f"`size` must be one of {', '.join(map(str, BOXES))}. Got size={self.size}.")
        check_at_least(self, {"holes": 1, "puzzles": 1, "train_size": 0, "test_size": 0})
        most = MOST_HOLES[self.size]
        if self.holes is not None and self.holes > most:
            raise ValueError(
                f"`holes` must be at most {most} with size={self.size}: no puzzle with more has one solution. "
                f"Got holes={self.holes}."
            )
        longest = self.holes or most
        if self.max_new_tokens is None:
            object.__setattr__(self, "max_new_tokens", longest)
        elif self.max_new_tokens < longest:
            raise ValueError(
                f"`max_new_tokens` must be at least {longest}, a token for every cell that may be empty. "
                f"Got max_new_tokens={self.max_new_tokens}. None stands for {longest}."
            )

    def train(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        """Rows whose puzzles are not in the test, in any form."""
        count = min(self.puzzles, self.train_size)
        found = _train(self.size, self.holes, self.seed, self.test_size, count) if count else ()
        return self._rows(found, self.train_size, "train")

    def test(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        """Rows held out."""
        return self._rows(_test(self.size, self.holes, self.seed, self.test_size), self.test_size, "test")

    def is_right(self, answer: str, row: Row) -> bool:
        """Whether `answer` has the words of the completion, the only solution, whatever the spaces between them."""
        return super().is_right(" ".join(answer.split()), row)

    def words(self) -> list[str]:
        """Every word of a prompt or an answer, for `word_tokenizer`."""
        return [EMPTY, ROW_END, ANSWER, *_digits(self.size)]

    def _rows(self, puzzles: Sequence[Puzzle], count: int, split: str) -> list[Row]:
        rng = random.Random(f"{split} rows {self.seed}")
        return [as_row(rearranged(p, rng)) for p in itertools.islice(itertools.cycle(puzzles), count)]


def solutions(cells: Sequence[int], size: int, rng: random.Random | None = None) -> Iterator[tuple[int, ...]]:
    """All ways to fill the empty cells, which are 0; with `rng` in random order. None if two given digits clash.

    Depth-first, always at a cell with the fewest digits left; a bit mask per row, column and box holds the digits used.
    """
    filled, units = list(cells), units_of(size)
    used = [0] * (3 * size)
    for cell, digit in enumerate(filled):
        if digit:
            row, column, box = units[cell]
            if (used[row] | used[column] | used[box]) >> digit & 1:
                return
            for unit in units[cell]:
                used[unit] |= 1 << digit
    yield from _fill(filled, [cell for cell, digit in enumerate(filled) if not digit], used, size, rng)


def _fill(
    filled: list[int], empty: list[int], used: list[int], size: int, rng: random.Random | None
) -> Iterator[tuple[int, ...]]:
    if not empty:
        yield tuple(filled)
        return
    units, every = units_of(size), (2 << size) - 2
    fewest, best, options = size + 1, -1, 0
    for cell in empty:
        row, column, box = units[cell]
        left = every & ~(used[row] | used[column] | used[box])
        count = left.bit_count()
        if count < fewest:
            fewest, best, options = count, cell, left
            if count < 2:
                break
    digits = [digit for digit in range(1, size + 1) if options >> digit & 1]
    rest = [cell for cell in empty if cell != best]
    for digit in rng.sample(digits, len(digits)) if rng else digits:
        filled[best] = digit
        for unit in units[best]:
            used[unit] ^= 1 << digit
        yield from _fill(filled, rest, used, size, rng)
        for unit in units[best]:
            used[unit] ^= 1 << digit
    filled[best] = 0


def draw_puzzle(size: int, holes: int | None, rng: random.Random) -> Puzzle:
    """A random grid, with cells emptied in random order as long as its solution stays the only one.

    It ends with `holes` empty cells or, as always with None, with a minimal puzzle: no other cell can be emptied.
    """
    solution = next(solutions([0] * size**2, size, rng))
    cells = list(solution)
    for cell in rng.sample(range(size**2), size**2):
        if cells.count(0) == holes:
            break
        others = (digit for digit in range(1, size + 1) if digit != solution[cell])
        if not any(_solvable([*cells[:cell], digit, *cells[cell + 1 :]], size) for digit in others):
            cells[cell] = 0
    return Puzzle(tuple(cells), solution)


def _solvable(cells: Sequence[int], size: int) -> bool:
    return next(solutions(cells, size), None) is not None


def rearranged(puzzle: Puzzle, rng: random.Random) -> Puzzle:
    """A random symmetry of the rules applied to a puzzle and its solution: each of all that there are is as likely."""
    size = puzzle.size
    high, wide = BOXES[size]
    rows, columns = _shuffled_lines(size, high, rng), _shuffled_lines(size, wide, rng)
    is_transposed = high == wide and rng.random() < 0.5
    order = [column * size + row if is_transposed else row * size + column for row in rows for column in columns]
    digits = [0, *rng.sample(range(1, size + 1), size)]
    cells, solution = (tuple([digits[side[cell]] for cell in order]) for side in puzzle)
    return Puzzle(cells, solution)


def _shuffled_lines(size: int, thick: int, rng: random.Random) -> list[int]:
    """Rows in bands of `thick`, or columns in stacks: bands change places, and so do the lines in each."""
    bands = rng.sample(range(size // thick), size // thick)
    return [band * thick + line for band in bands for line in rng.sample(range(thick), thick)]


def fingerprint(puzzle: Puzzle) -> int:
    """The same for all puzzles that symmetries turn into each other, and nearly always another for others.

    Colour refinement: a cell starts as given or empty, and its colour then takes in those of its row, column and box, and of
    the cells with its digit in the solution. Digits, and the places of lines, only matter by what they share.
    """
    size = puzzle.size
    high, wide = BOXES[size]
    units = [(*places, 3 * size + digit) for places, digit in zip(units_of(size), puzzle.solution, strict=True)]
    colours = [int(cell > 0) for cell in puzzle.cells]
    for _ in range(3):
        members: list[list[int]] = [[] for _ in range(4 * size + 1)]
        for places, colour in zip(units, colours, strict=True):
            for unit in places:
                members[unit].append(colour)
        of_unit = [hash(tuple(sorted(found))) for found in members]  # of integers: the same in every process
        lines = [(of_unit[row], of_unit[column]) for row, column, _, _ in units]
        lines = [(min(pair), max(pair)) for pair in lines] if high == wide else lines
        colours = [
            hash((colour, *pair, of_unit[box], of_unit[digit]))
            for colour, pair, (_, _, box, digit) in zip(colours, lines, units, strict=True)
        ]
    return hash(tuple(sorted(colours)))


def as_row(puzzle: Puzzle) -> Row:
    """A puzzle as text, and for each empty cell the digits that noise may insert: `legal_digits`."""
    size, names = puzzle.size, [EMPTY, *_digits(puzzle.size)]
    lines = [" ".join(names[cell] for cell in puzzle.cells[i : i + size]) for i in range(0, size**2, size)]
    answer = [names[digit] for cell, digit in zip(*puzzle, strict=True) if not cell]
    noise = [[names[digit] for digit in digits] for digits in legal_digits(puzzle)]
    return {
        "prompt": f" {ROW_END} ".join(lines) + f" {ANSWER}",
        "completion": " " + " ".join(answer),
        "noise_tokens": noise if len(set(itertools.chain(*noise))) > 1 else _digits(size),
    }


def legal_digits(puzzle: Puzzle) -> list[list[int]]:
    """For each empty cell in reading order, the digits that clash with no given one and no solved cell before it.

    The right digit is one of them.
    """
    size, units = puzzle.size, units_of(puzzle.size)
    used = [0] * (3 * size)
    for cell, digit in enumerate(puzzle.cells):
        for unit in units[cell]:
            used[unit] |= 1 << digit
    found = []
    for cell, (given, right) in enumerate(zip(*puzzle, strict=True)):
        if not given:
            row, column, box = units[cell]
            taken = used[row] | used[column] | used[box]
            found.append([digit for digit in range(1, size + 1) if not taken >> digit & 1])
            for unit in units[cell]:
                used[unit] |= 1 << right
    return found


def _digits(size: int) -> list[str]:
    return [str(digit) for digit in range(1, size + 1)]


@functools.cache
def units_of(size: int) -> list[tuple[int, int, int]]:
    """The row, column and box of each cell, numbered together: rows from 0, columns from `size`, boxes from 2 · `size`."""
    high, wide = BOXES[size]
    across = size // wide
    return [
        (row, size + column, 2 * size + row // high * across + column // wide)
        for row, column in itertools.product(range(size), repeat=2)
    ]


# Drawing takes seconds: the last few splits are cached.


@functools.lru_cache(maxsize=8)
def _test(size: int, holes: int | None, seed: int, count: int) -> list[Puzzle]:
    return _different(size, holes, random.Random(f"test {seed}"), count, set())


@functools.lru_cache(maxsize=8)
def _train(size: int, holes: int | None, seed: int, test_size: int, count: int) -> list[Puzzle]:
    known = {fingerprint(puzzle) for puzzle in _test(size, holes, seed, test_size)}
    return _different(size, holes, random.Random(f"train {seed}"), count, known)


def _different(size: int, holes: int | None, rng: random.Random, count: int, known: set[int]) -> list[Puzzle]:
    """The next `count` puzzles whose fingerprints are not in `known`, to which they are added."""
    found: list[Puzzle] = []
    misses = 0
    while len(found) < count:
        puzzle = draw_puzzle(size, holes, rng)
        mark = fingerprint(puzzle)
        if mark in known or holes not in (None, puzzle.cells.count(0)):
            misses += 1
        else:
            misses = 0
            known.add(mark)
            found.append(puzzle)
        if misses == PATIENCE:
            raise ValueError(
                f"`size` and `holes` must allow as many puzzles as are asked for, {count:,} here that no symmetry makes equal. "
                f"Got {len(found):,}, and no other in {PATIENCE:,} draws. Lower `holes`, `puzzles` or `test_size`."
            )
    return found
