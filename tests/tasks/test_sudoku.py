"""Sudoku: puzzles with one solution, turned into many by symmetries."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sequencematch.evaluation import find_task
from sequencematch.tasks import Row, Sudoku, word_tokenizer, write_rows
from sequencematch.tasks.sudoku import (
    BOXES,
    Puzzle,
    as_row,
    draw_puzzle,
    fingerprint,
    legal_digits,
    rearranged,
    solutions,
)

#: 1 2 3 4 / 3 4 1 2 / 2 1 4 3 / 4 3 2 1.
GRID = (1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1)


def holed(solution: Sequence[int], holes: set[int]) -> Puzzle:
    return Puzzle(tuple(0 if cell in holes else digit for cell, digit in enumerate(solution)), tuple(solution))


def small(**options: Any) -> Sudoku:
    return Sudoku(**{"puzzles": 20, "train_size": 60, "test_size": 10, **options})


def is_legal(grid: Sequence[int], size: int) -> bool:
    """The oracle: every row, column and box holds every digit."""
    return all(sorted(unit) == list(range(1, size + 1)) for unit in all_units(grid, size))


def all_units(grid: Sequence[int], size: int) -> list[Sequence[int]]:
    """Its rows, columns and boxes."""
    high, wide = BOXES[size]
    lines = [grid[i : i + size] for i in range(0, size * size, size)]
    columns = list(zip(*lines, strict=True))
    boxes = [
        [lines[r][c] for r in range(top, top + high) for c in range(left, left + wide)]
        for top in range(0, size, high)
        for left in range(0, size, wide)
    ]
    return [*lines, *columns, *boxes]


#: All 288 grids of size 4: four rows out of 24, and those of the 331,776 choices that are legal.
ALL_OF_FOUR = [
    grid
    for rows in itertools.product(itertools.permutations((1, 2, 3, 4)), repeat=4)
    if all(len(set(column)) == 4 for column in zip(*rows, strict=True))
    and is_legal(grid := tuple(itertools.chain(*rows)), 4)
]


def by_brute_force(cells: Sequence[int]) -> set[tuple[int, ...]]:
    return {grid for grid in ALL_OF_FOUR if all(cell in (0, digit) for cell, digit in zip(cells, grid, strict=True))}


def read(row: Row) -> Puzzle:
    """A row as a puzzle and the grid that its completion makes of it."""
    prompt = row["prompt"].removesuffix(" =")
    assert prompt != row["prompt"]
    lines = [line.split(" ") for line in prompt.split(" / ")]
    assert {len(line) for line in lines} == {len(lines)}
    cells = tuple(0 if word == "." else int(word) for line in lines for word in line)
    answer = iter(map(int, row["completion"].split()))
    solution = tuple(cell or next(answer) for cell in cells)
    assert next(answer, None) is None
    return Puzzle(cells, solution)


def check_puzzle(puzzle: Puzzle, size: int) -> None:
    """Its only solution is the one it carries, by the rules."""
    assert is_legal(puzzle.solution, size)
    assert list(itertools.islice(solutions(puzzle.cells, size), 2)) == [puzzle.solution]


def test_a_small_puzzle_reads_as_expected() -> None:
    """1 . 3 4 / 3 4 1 . / . 1 4 3 / 4 3 2 1, where every empty cell is a 2."""
    assert as_row(holed(GRID, {1, 7, 8})) == {
        "prompt": "1 . 3 4 / 3 4 1 . / . 1 4 3 / 4 3 2 1 =",
        "completion": " 2 2 2",
        "noise_tokens": ["1", "2", "3", "4"],
    }
    check_puzzle(holed(GRID, {1, 7, 8}), 4)


def test_noise_is_a_digit_that_looks_legal_given_the_cells_before() -> None:
    """1 2 3 4 / 3 4 1 2 / 2 1 4 3 / 4 3 2 1 without 1 and 2 in the first and the third row.

    The first cell may be 1 or 2; given its 1, the second is 2. Then the same in the third row, where the columns have a digit
    of the two each: 2, and 1.
    """
    assert as_row(holed(GRID, {0, 1, 8, 9}))["noise_tokens"] == [["1", "2"], ["2"], ["2"], ["1"]]
    puzzle = draw_puzzle(6, 20, random.Random(0))
    filled = list(puzzle.cells)
    empty = [cell for cell, digit in enumerate(filled) if not digit]
    for cell, digits in zip(empty, legal_digits(puzzle), strict=True):
        tried = [(digit, [*filled[:cell], digit, *filled[cell + 1 :]]) for digit in range(1, 7)]
        found = [d for d, grid in tried if all(sum(c == d for c in unit) <= 1 for unit in all_units(grid, 6))]
        assert digits == found
        assert puzzle.solution[cell] in digits
        filled[cell] = puzzle.solution[cell]


def test_two_solutions_are_found_by_hand() -> None:
    """The first two columns have 1 2 in the first row and 2 1 in the third: without these four, 1 and 2 can change places."""
    four = {0, 1, 8, 9}
    other = tuple(3 - digit if cell in four else digit for cell, digit in enumerate(GRID))
    assert set(solutions(holed(GRID, four).cells, 4)) == {GRID, other}
    with pytest.raises(AssertionError):
        check_puzzle(holed(GRID, four), 4)


def test_there_are_288_grids_of_size_4() -> None:
    assert len(ALL_OF_FOUR) == 288
    found = list(solutions([0] * 16, 4))
    assert len(found) == 288
    assert set(found) == set(ALL_OF_FOUR)


@settings(max_examples=100)
@given(st.sampled_from(ALL_OF_FOUR), st.sets(st.integers(0, 15)), st.integers(0, 15), st.integers(1, 4))
def test_the_solver_equals_brute_force(grid: tuple[int, ...], holes: set[int], cell: int, digit: int) -> None:
    """Also where a digit was changed, so that there may be no solution."""
    right = list(holed(grid, holes).cells)
    changed = [*right[:cell], digit, *right[cell + 1 :]]
    for cells in (right, changed):
        assert sorted(solutions(cells, 4)) == sorted(by_brute_force(cells))
        assert sorted(solutions(cells, 4, random.Random(cell))) == sorted(by_brute_force(cells))


@pytest.mark.parametrize("size", [4, 6, 9])
def test_a_drawn_puzzle_has_one_solution_and_is_minimal(size: int) -> None:
    """Without any one of its digits there would be a second solution."""
    for seed in range({4: 20, 6: 5, 9: 1}[size]):
        puzzle = draw_puzzle(size, None, random.Random(seed))
        check_puzzle(puzzle, size)
        for cell in [cell for cell, digit in enumerate(puzzle.cells) if digit]:
            fewer = [*puzzle.cells[:cell], 0, *puzzle.cells[cell + 1 :]]
            assert len(list(itertools.islice(solutions(fewer, size), 2))) == 2


@pytest.mark.parametrize(("size", "holes"), [(4, 5), (6, 1), (6, 20), (9, 30)])
def test_a_puzzle_has_as_many_holes_as_asked_for(size: int, holes: int) -> None:
    puzzle = draw_puzzle(size, holes, random.Random(0))
    check_puzzle(puzzle, size)
    assert puzzle.cells.count(0) == holes


@pytest.mark.parametrize("size", [4, 6, 9])
def test_symmetries_keep_the_only_solution_and_the_fingerprint(size: int) -> None:
    puzzle, rng = draw_puzzle(size, 30 if size == 9 else None, random.Random(0)), random.Random(1)
    found = [rearranged(puzzle, rng) for _ in range(20)]
    for other in found:
        check_puzzle(other, size)
        assert fingerprint(other) == fingerprint(puzzle)
    assert len(set(found)) == 20


def test_symmetries_reach_every_place() -> None:
    """A whole row and one cell of the row beside it: 2 · 4 · 4 such shapes, by row or column, which one, and which cell."""
    rng = random.Random(0)
    reached = [rearranged(holed(GRID, set(range(5, 16))), rng).cells for _ in range(2000)]
    assert len({tuple(cell > 0 for cell in cells) for cells in reached}) == 2 * 4 * 4
    assert {digit for cells in reached for digit in cells[:1]} == {0, 1, 2, 3, 4}


def test_a_transposition_would_break_boxes_that_are_not_square() -> None:
    """The negative control: of two rows by three columns, it makes three by two."""
    puzzle = draw_puzzle(6, None, random.Random(0))
    turned = [puzzle.solution[column * 6 + row] for row in range(6) for column in range(6)]
    assert is_legal(puzzle.solution, 6)
    assert not is_legal(turned, 6)


def test_fingerprints_differ_between_puzzles() -> None:
    rng = random.Random(0)
    marks = {fingerprint(draw_puzzle(6, None, rng)) for _ in range(40)}
    assert len(marks) == 40
    solution = draw_puzzle(6, None, rng).solution
    assert fingerprint(holed(solution, {0, 7})) != fingerprint(holed(solution, {0, 1}))


def test_there_are_36_minimal_puzzles_of_size_4_apart_from_symmetries() -> None:
    """13 with 4 digits, 22 with 5 and 1 with 6. All are among the first 300 of this seed."""
    rng = random.Random(0)
    drawn = [draw_puzzle(4, None, rng) for _ in range(300)]
    found = {(fingerprint(puzzle), 16 - puzzle.cells.count(0)) for puzzle in drawn}
    assert Counter(digits for _, digits in found) == {4: 13, 5: 22, 6: 1}


@pytest.mark.parametrize("size", [4, 6])
def test_rows_are_puzzles_and_no_symmetry_leads_from_training_to_the_test(size: int) -> None:
    task = small(size=size, puzzles=8, test_size=6)
    train, test = [read(row) for row in task.train()], [read(row) for row in task.test()]
    assert (len(train), len(test)) == (60, 6)
    for puzzle in train + test:
        check_puzzle(puzzle, size)
    kinds, held_out = {fingerprint(puzzle) for puzzle in train}, {fingerprint(puzzle) for puzzle in test}
    assert (len(kinds), len(held_out)) == (8, 6)
    assert not kinds & held_out


def test_without_that_care_a_test_puzzle_would_be_in_training_in_another_form() -> None:
    train, test = ([draw_puzzle(4, None, random.Random(f"{s} {n}")) for n in range(60)] for s in ("train", "test"))
    assert {fingerprint(puzzle) for puzzle in train} & {fingerprint(puzzle) for puzzle in test}


def test_the_seed_decides() -> None:
    assert small().train() == small().train()
    assert small().train() != small(seed=1).train()
    assert small().test() != small(seed=1).test()


def test_more_rows_change_neither_the_test_nor_those_before() -> None:
    few, many = small(), small(train_size=200)
    assert many.test() == few.test()
    assert many.train()[:60] == few.train()
    assert small(train_size=7).train() == few.train()[:7]
    assert small(train_size=0).train() == []
    assert small(test_size=0).test() == []


def test_rows_belong_to_the_caller() -> None:
    small().test()[0]["noise_tokens"].clear()
    assert len(small().test()[0]["noise_tokens"]) == len(small().test()[0]["completion"].split())


def test_an_answer_is_right_if_it_is_the_solution() -> None:
    row = as_row(holed(GRID, {0, 1, 7}))
    answers = ("1 2 2", " 1 2 2 ", "1  2\n2", "122", "1 2", "2 1 2", "1 2 2 3", "")
    assert [small().is_right(answer, row) for answer in answers] == [True] * 3 + [False] * 5


def test_every_word_is_listed_and_has_a_token() -> None:
    task = small()
    tokenizer = word_tokenizer(task.words())
    rows = task.train() + task.test()
    assert {word for row in rows for word in (row["prompt"] + row["completion"]).split()} == set(task.words())
    for row in rows:
        prompt, whole = tokenizer(row["prompt"])["input_ids"], tokenizer(row["prompt"] + row["completion"])["input_ids"]
        assert whole[: len(prompt)] == prompt
        assert tokenizer.decode(whole[len(prompt) :]).split() == row["completion"].split()
        assert tokenizer.decode(prompt[1:]) == row["prompt"]  # a full stop keeps the space before it
        assert len(whole) - len(prompt) <= (task.max_new_tokens or 0)


def test_flags_make_the_task_and_datasets_reads_its_files(tmp_path: Path) -> None:
    task = find_task(
        "sudoku", ["--size", "4", "--holes", "6", "--puzzles", "3", "--train-size", "9", "--test-size", "2"]
    )
    assert task == Sudoku(size=4, holes=6, puzzles=3, train_size=9, test_size=2)
    assert task.max_new_tokens == 6
    write_rows(task, tmp_path / "rows")
    loaded = datasets.load_dataset(str(tmp_path / "rows"), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"].to_list() == task.train()
    assert loaded["test"].to_list() == task.test()


def test_more_puzzles_than_there_are_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 36 minimal puzzles of size 4, apart from symmetries."""
    monkeypatch.setattr("sequencematch.tasks.sudoku.PATIENCE", 20)
    with pytest.raises(ValueError, match=re.escape("40 here that no symmetry makes equal. Got ")) as error:
        Sudoku(size=4, test_size=40).test()
    assert "no other in 20 draws. Lower `holes`, `puzzles` or `test_size`." in str(error.value)
    with pytest.raises(ValueError, match=re.escape("Got 0, and no other in 20 draws.")):
        Sudoku(size=6, holes=28, test_size=1).test()


def test_wrong_options_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"size": 5}, "`size` must be one of 4, 6, 9. Got size=5."),
        ({"holes": 0}, "`holes` must be at least 1. Got holes=0."),
        ({"holes": 29}, "`holes` must be at most 28 with size=6: no puzzle with more has one solution. Got holes=29."),
        ({"puzzles": 0}, "`puzzles` must be at least 1. Got puzzles=0."),
        ({"train_size": -1}, "`train_size` must be at least 0. Got train_size=-1."),
        ({"test_size": -1}, "`test_size` must be at least 0. Got test_size=-1."),
        ({"holes": 20, "max_new_tokens": 19}, "`max_new_tokens` must be at least 20, a token for every cell"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            Sudoku(**options)
    with pytest.raises(ValueError, match=re.escape("Got max_new_tokens=28. None stands for 64.")):
        replace(Sudoku(), size=9)
