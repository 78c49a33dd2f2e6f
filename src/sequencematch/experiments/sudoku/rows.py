"""Sudoku as token ids: rows made by symmetries, digits that look legal as noise, and a solver's search written out."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from sequencematch.experiments.sudoku.cells import LONGEST_TRACE
from sequencematch.tasks.sudoku import BOXES, EMPTY, Puzzle, Sudoku, units_of
from sequencematch.tasks.vocabulary import SPECIAL, word_tokenizer

SIZE = 6
#: The word for going back one cell in a search that is written out.
BACK = "<"
WORDS = [*Sudoku(size=SIZE).words(), BACK]
TOKENS = {word: len(SPECIAL) + number for number, word in enumerate(WORDS)}
#: The token of a digit is ZERO + digit.
ZERO = TOKENS["1"] - 1
#: Places of the cells in a prompt, which begins with <bos> and has a word behind every line.
PLACES = [1 + line * (SIZE + 1) + column for line in range(SIZE) for column in range(SIZE)]
#: Tokens of a prompt.
PROMPT = 1 + SIZE * (SIZE + 1)
#: A bit mask of digits → their tokens.
_TOKENS_OF = [[ZERO + digit for digit in range(1, SIZE + 1) if mask >> digit & 1] for mask in range(2 << SIZE)]


def new_tokenizer() -> Any:
    """A token for each word of a puzzle, and for going back."""
    return word_tokenizer(WORDS)


def as_puzzle(ids: Sequence[int]) -> Puzzle:
    """A row of token ids, prompt and answer, as cells and their solution."""
    answer = iter(ids[PROMPT:])
    cells = [max(ids[place] - ZERO, 0) for place in PLACES]
    return Puzzle(tuple(cells), tuple([cell or next(answer) - ZERO for cell in cells]))


def rearranged(ids: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` rows [row, token] from those of `ids` in turn, each by a random symmetry of the rules, as `tasks.sudoku.rearranged`.

    All puzzles have the same number of empty cells. Boxes are not square: there is no transposition.
    """
    high, wide = BOXES[SIZE]
    parts = []
    for first in range(0, count, 100_000):
        row = np.arange(first, min(first + 100_000, count)) % len(ids)
        number = len(row)
        order = (
            _shuffled_lines(number, high, rng)[:, :, None] * SIZE + _shuffled_lines(number, wide, rng)[:, None]
        ).reshape(number, -1)
        digits = np.concatenate([np.zeros((number, 1), int), 1 + rng.random((number, SIZE)).argsort(1)], 1)
        cells = np.maximum(ids[row][:, PLACES].astype(int) - ZERO, 0)
        solution = cells.copy()
        solution[cells == 0] = ids[row, PROMPT:].ravel().astype(int) - ZERO
        cells, solution = (
            np.take_along_axis(digits, np.take_along_axis(side, order, 1), 1) for side in (cells, solution)
        )
        part = ids[row]
        part[:, PLACES] = np.where(cells == 0, TOKENS[EMPTY], ZERO + cells)
        part[:, PROMPT:] = ZERO + solution[cells == 0].reshape(number, -1)  # in reading order
        parts.append(part)
    return np.concatenate(parts)


def legal_masks(ids: np.ndarray) -> np.ndarray:
    """For each empty cell of each row [row, cell], a bit mask of the digits that look legal, as `tasks.sudoku.legal_digits`."""
    given = np.maximum(ids[:, PLACES].astype(int) - ZERO, 0)
    solution = given.copy()
    solution[given == 0] = ids[:, PROMPT:].ravel().astype(int) - ZERO
    used = np.zeros((len(ids), 3 * SIZE), np.uint8)
    legal = np.zeros(given.shape, np.uint8)
    units, every = units_of(SIZE), (2 << SIZE) - 2
    for cell, digits in enumerate(given.T):
        used[:, units[cell]] |= (1 << digits).astype(np.uint8)[:, None]
    for cell, digits in enumerate(solution.T):
        row, column, box = units[cell]
        legal[:, cell] = every & ~(used[:, row] | used[:, column] | used[:, box])
        used[:, units[cell]] |= (1 << digits).astype(np.uint8)[:, None]
    found: np.ndarray = legal[given == 0].reshape(len(ids), -1)
    return found


def _shuffled_lines(count: int, thick: int, rng: np.random.Generator) -> np.ndarray:
    """[row, line]: lines in bands of `thick`; bands change places, and so do the lines in each."""
    bands = rng.random((count, SIZE // thick)).argsort(1)
    lines = rng.random((count, SIZE // thick, thick)).argsort(2)
    return (bands[:, :, None] * thick + lines).reshape(count, SIZE)


class Rows(Dataset[Mapping[str, Any]]):
    """Puzzles with their answers; noise may be digits that look legal."""

    def __init__(self, ids: np.ndarray, *, has_noise: bool) -> None:
        """`ids` [row, token]: prompts and answers."""
        self.ids, self.legal = ids, legal_masks(ids) if has_noise else None
        self.mask = [0] * PROMPT + [1] * (ids.shape[1] - PROMPT)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.ids)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """A row as the trainer reads it."""
        ids = self.ids[row].tolist()
        found = {"input_ids": ids, "completion_mask": self.mask}
        if self.legal is not None:
            found["noise_tokens"] = [_TOKENS_OF[mask] for mask in self.legal[row].tolist()]
        return found


class TraceRows(Dataset[Mapping[str, Any]]):
    """Puzzles and a solver's search, written out (a stream of search, Gandhi et al. 2024): wrong digits stay in the text.

    A row whose search is longer than `LONGEST_TRACE` is left out; the next one takes its place.
    """

    def __init__(self, ids: np.ndarray) -> None:
        """`ids` [row, token]: prompts and answers."""
        self.ids = ids

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.ids)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """A row as the trainer reads it; the order in which digits are tried is a function of the row's number."""
        found: list[int] = []
        while not found or len(found) > LONGEST_TRACE:
            ids = self.ids[row % len(self.ids)].tolist()
            found = trace(as_puzzle(ids).cells, random.Random(int(row)))
            row += 1
        written = [ZERO + digit if digit else TOKENS[BACK] for digit in found]
        return {"input_ids": ids[:PROMPT] + written, "completion_mask": [0] * PROMPT + [1] * len(written)}


def trace(cells: Sequence[int], rng: random.Random) -> list[int]:
    """The steps of a depth-first search: a digit for the next empty cell in reading order, or 0 to empty the last one again.

    Only legal digits are tried, in random order, each once. It ends with the puzzle solved.
    """
    units, used = units_of(SIZE), [0] * (3 * SIZE)
    for cell, digit in enumerate(cells):
        for unit in units[cell]:
            used[unit] |= 1 << digit
    empty = [cell for cell, digit in enumerate(cells) if not digit]
    steps: list[int] = []
    filled: list[int] = []
    open_digits: list[list[int]] = []  # of each filled cell, and of the next one: those that were not tried
    while len(filled) < len(empty):
        if len(open_digits) == len(filled):
            row, column, box = units[empty[len(filled)]]
            taken = used[row] | used[column] | used[box]
            legal = [digit for digit in range(1, SIZE + 1) if not taken >> digit & 1]
            rng.shuffle(legal)
            open_digits.append(legal)
        if open_digits[-1]:
            digit = open_digits[-1].pop()
            filled.append(digit)
        else:
            open_digits.pop()
            digit = filled.pop()
        steps.append(digit if len(open_digits) == len(filled) else 0)
        for unit in units[empty[len(open_digits) - 1]]:
            used[unit] ^= 1 << digit
    return steps


def answer_of(written: Sequence[int]) -> list[int]:
    """The tokens that a written-out search leaves: each word for going back takes one away."""
    left: list[int] = []
    for token in written:
        if token != TOKENS[BACK]:
            left.append(token)
        elif left:
            left.pop()
    return left
