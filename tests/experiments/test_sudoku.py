"""The study of networks on Sudoku: its rows, its costs, its cells, its report."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sequencematch.core import ActionSpace, Trajectory
from sequencematch.experiments import networks
from sequencematch.experiments.networks import Budget
from sequencematch.experiments.sudoku import rows, study
from sequencematch.experiments.sudoku.cells import METHODS, Cell
from sequencematch.experiments.sudoku.measures import contexts, decisive_states, recorded, solver, until_right
from sequencematch.experiments.sudoku.report import CURVES, draw, table, ways
from sequencematch.experiments.sudoku.rows import (
    BACK,
    PROMPT,
    TOKENS,
    ZERO,
    Rows,
    TraceRows,
    answer_of,
    as_puzzle,
    new_tokenizer,
    rearranged,
    trace,
)
from sequencematch.experiments.sudoku.training import load, run_cell
from sequencematch.policy import Policy
from sequencematch.tasks.sudoku import Puzzle, Sudoku, as_row, draw_puzzle, fingerprint, legal_digits, solutions

TINY = Budget(layers=1, width=16, steps=4, tuning_steps=2, batch_size=8, test_rows=12)
SPACE = ActionSpace(30, eos=0)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def few_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below which a model without `<bkspc>` deletes: each is tried on a hundred puzzles."""
    monkeypatch.setattr("sequencematch.experiments.sudoku.measures.THRESHOLDS", (0.1, 0.5))


def ids_of(puzzles: list[Puzzle]) -> np.ndarray:
    texts = [row["prompt"] + row["completion"] for row in map(as_row, puzzles)]
    return np.array(new_tokenizer()(texts)["input_ids"], dtype=np.uint8)


@pytest.fixture(scope="module")
def puzzles() -> list[Puzzle]:
    return [draw_puzzle(6, 20, random.Random(seed)) for seed in range(6)]


def test_token_ids_stand_for_the_puzzle_that_they_were_made_of(puzzles: list[Puzzle]) -> None:
    tokenizer, ids = new_tokenizer(), ids_of(puzzles)
    assert [as_puzzle(row) for row in ids.tolist()] == puzzles
    assert tokenizer.convert_tokens_to_ids([*rows.WORDS]) == [TOKENS[word] for word in rows.WORDS]
    assert tokenizer.decode(ids[0, PROMPT - 1 :].tolist()) == "=" + as_row(puzzles[0])["completion"]
    assert ids.shape == (6, PROMPT + 20)


def test_rearranged_rows_are_puzzles_of_the_same_kind_with_their_only_solution(puzzles: list[Puzzle]) -> None:
    made = rearranged(ids_of(puzzles), 60, np.random.default_rng(0))
    found = [as_puzzle(row) for row in made.tolist()]
    for number, puzzle in enumerate(found):
        assert list(solutions(puzzle.cells, 6)) == [puzzle.solution]
        assert fingerprint(puzzle) == fingerprint(puzzles[number % 6])
    assert (made == ids_of(found)).all()  # as the tokenizer reads them
    assert len(set(found)) == 60


def test_symmetries_of_arrays_reach_every_place_and_digit() -> None:
    """Of one puzzle with one empty cell: in each of 36 places, with each of 6 digits as its answer."""
    one = draw_puzzle(6, 1, random.Random(0))
    made = rearranged(ids_of([one]), 4000, np.random.default_rng(0))
    reached = {(as_puzzle(row).cells.index(0), row[PROMPT] - ZERO) for row in made.tolist()}
    assert len(reached) == 36 * 6


def test_noise_of_a_row_is_the_digits_that_look_legal(puzzles: list[Puzzle]) -> None:
    ids = rearranged(ids_of(puzzles), 60, np.random.default_rng(1))
    made = Rows(ids, has_noise=True)
    assert made[0]["input_ids"] == ids[0].tolist()
    assert made[0]["completion_mask"] == [0] * PROMPT + [1] * 20
    for number, row in enumerate(ids.tolist()):
        wanted = [[ZERO + digit for digit in digits] for digits in legal_digits(as_puzzle(row))]
        assert made[number]["noise_tokens"] == wanted
    assert "noise_tokens" not in Rows(ids, has_noise=False)[0]


#: Its boxes have two rows and three columns.
GRID = tuple(map(int, "123456 456123 231564 564231 312645 645312".replace(" ", "")))


def test_a_search_goes_back_where_no_digit_is_legal() -> None:
    """1 and 4 are missing in the first row and column. With 4 in the first cell the fourth has no digit: 1 is below it."""
    puzzle = Puzzle(tuple(0 if cell in (0, 3, 6) else digit for cell, digit in enumerate(GRID)), GRID)
    found = {tuple(trace(puzzle.cells, random.Random(seed))) for seed in range(20)}
    assert found == {(1, 4, 4), (4, 0, 1, 4, 4)}


def replayed(puzzle: Puzzle, steps: list[int]) -> tuple[int, ...]:
    """The cells after a search that fills the next empty cell or empties the last; every digit must be legal, and new there."""
    cells, empty = list(puzzle.cells), [cell for cell, digit in enumerate(puzzle.cells) if not digit]
    tried: list[set[int]] = [set()]
    for step in steps:
        if step:
            cell = empty[len(tried) - 1]
            cells[cell] = step
            assert not any(clash(cells, cell, other) for other in range(36))
            assert step not in tried[-1]
            tried[-1].add(step)
            tried.append(set())
        else:
            tried.pop()
            cells[empty[len(tried) - 1]] = 0
    return tuple(cells)


def clash(cells: list[int], one: int, other: int) -> bool:
    """Whether two cells that see each other hold the same digit."""
    (line, column), (line2, column2) = divmod(one, 6), divmod(other, 6)
    sees = line == line2 or column == column2 or (line // 2, column // 3) == (line2 // 2, column2 // 3)
    return one != other and sees and cells[one] == cells[other]


def test_replaying_a_trace_gives_the_solution(puzzles: list[Puzzle]) -> None:
    lengths = set()
    for seed in range(5):
        for puzzle in puzzles:
            steps = trace(puzzle.cells, random.Random(seed))
            assert replayed(puzzle, steps) == puzzle.solution
            assert steps == trace(puzzle.cells, random.Random(seed))
            lengths.add(len(steps))
    assert min(lengths) >= 20
    assert len(lengths) > 5  # the order of the digits matters


def test_a_written_out_search_leaves_the_answer(puzzles: list[Puzzle]) -> None:
    ids = ids_of([puzzle for n, puzzle in enumerate(puzzles) if len(trace(puzzle.cells, random.Random(n))) < 100][:3])
    data = TraceRows(ids)
    for number in range(3):
        row = data[number]
        assert row["input_ids"][:PROMPT] == ids[number, :PROMPT].tolist()
        assert answer_of(row["input_ids"][PROMPT:]) == ids[number, PROMPT:].tolist()
        assert len(row["input_ids"]) == len(row["completion_mask"]) == PROMPT + sum(row["completion_mask"])
    assert data[1] == data[1]
    back = TOKENS[BACK]
    assert answer_of([7, 8, back, 9, back, back, back, 10]) == [10]


def test_a_search_that_is_too_long_is_left_out(puzzles: list[Puzzle], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next row takes its place."""
    ids = ids_of(puzzles)
    lengths = [len(trace(puzzle.cells, random.Random(number))) for number, puzzle in enumerate(puzzles)]
    longest = lengths.index(max(lengths))
    monkeypatch.setattr(rows, "LONGEST_TRACE", max(lengths))
    assert TraceRows(ids)[longest]["input_ids"][:PROMPT] == ids[longest, :PROMPT].tolist()
    monkeypatch.setattr(rows, "LONGEST_TRACE", max(lengths) - 1)
    left = TraceRows(ids)[longest]["input_ids"]
    assert left[:PROMPT] != ids[longest, :PROMPT].tolist()
    assert len(left) < PROMPT + max(lengths)


def test_costs_by_hand() -> None:
    """Two tokens of prompt; 5 is pushed and deleted, then 6 and 7: three passes, with contexts of 3, 3 and 4 tokens."""
    deleting = Trajectory.rollout(SPACE, (1, 2), (5, SPACE.bkspc, 6, 7, 0), floor=2)
    assert contexts(deleting) == [3, 3, 4]
    at_the_floor = Trajectory.rollout(SPACE, (1, 2), (SPACE.bkspc, 5, 0), floor=2)
    assert contexts(at_the_floor) == [3]
    tokenizer = new_tokenizer()
    policy = Policy(networks.new_model(TINY, tokenizer), tokenizer)
    # Of one layer of width 16: 4 · 16² in attention, 3 · 16 · 64 in the MLP, three norms, and 14 rows of the output layer.
    weights = 4 * 16**2 + 3 * 16 * 64 + 3 * 16 + 14 * 16
    assert recorded(policy, [True, False], [contexts(deleting), [3]]) == {
        "accuracy": 0.5,
        "passes": 2.0,
        "flops": (2 * weights * 4 + 4 * 16 * (3 + 3 + 4 + 3)) / 2,
        "context": 3.5,
        "longest_context": 4,
    }


def test_an_oracle_needs_no_sample_after_a_right_one() -> None:
    def sample(*answer: int) -> Trajectory:
        return Trajectory.rollout(SPACE, (1,), (*answer, 0))

    drawn = [sample(5), sample(6), sample(7)]
    taken = [until_right(drawn, [6], random.Random(seed)) for seed in range(30)]
    assert {len(samples) for samples in taken} == {1, 2, 3}
    assert all(samples[-1] == sample(6) for samples in taken)
    assert len(until_right(drawn, [8], random.Random(0))) == 3


def test_the_states_that_decide_have_at_most_one_wrong_digit(puzzles: list[Puzzle]) -> None:
    row = ids_of(puzzles)[0].tolist()
    states = decisive_states(row, random.Random(0))
    place = len(states["right"])
    wrong = states["wrong digit"][-1]
    assert states["right"] == row[:place] == states["wrong digit"][:-1]
    assert wrong != row[place]
    assert wrong - ZERO in legal_digits(puzzles[0])[place - PROMPT]
    assert states["right grid"] == row
    assert [n for n, (a, b) in enumerate(zip(states["wrong grid"], row, strict=True)) if a != b] == [place]


def test_a_solver_writes_as_many_tokens_as_its_trace(puzzles: list[Puzzle]) -> None:
    found = solver(ids_of(puzzles))
    lengths = [len(trace(puzzle.cells, random.Random(number))) for number, puzzle in enumerate(puzzles)]
    assert found["tokens"] == pytest.approx(sum(lengths) / 6)
    assert found["digits"] == pytest.approx((found["tokens"] + 20) / 2)  # all but 20 are taken back


def test_rows_are_made_once_and_no_test_puzzle_is_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("bc", 0, holes=6)
    ids, questions = load(cell, TINY, tmp_path)
    assert (len(ids), len(questions.test), len(questions.tune)) == (48, 12, 100)
    held_out = {fingerprint(as_puzzle(row)) for part in (questions.test, questions.tune) for row in part.tolist()}
    assert len(held_out) == 112
    assert not held_out & {fingerprint(as_puzzle(row)) for row in ids.tolist()}
    monkeypatch.setattr(Sudoku, "train", None)
    assert load(cell, TINY, tmp_path)[0].tolist() == ids.tolist()


@pytest.mark.parametrize("method", ["mle", "mle, traces", "bc, corrected", "sequencematch α 0.5 γ 0.99"])
def test_a_cell_writes_its_result_and_is_not_run_again(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(method, 0, holes=6)
    found = run_cell(cell, TINY, tmp_path, use_cpu=True, dataloader_num_workers=0)
    assert all(0 <= way["accuracy"] <= 1 and way["flops"] > 0 for way in found["ways"].values())
    assert ("states" in found) == METHODS[method].deletes
    kinds = {"right", "wrong digit", "right grid", "wrong grid"}
    assert kinds <= set(found.get("states", kinds)) <= {*kinds, "own wrong grid"}
    assert json.loads((tmp_path / "cells" / cell.file).read_text())["cell"]["method"] == method

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(networks, "new_model", refuse)
    assert run_cell(cell, TINY, tmp_path)["cell"] == found["cell"]
    if method == "bc, corrected":
        (tmp_path / "cells" / cell.file).unlink()  # measured again, with the network that was saved
        assert run_cell(cell, TINY, tmp_path)["ways"] == found["ways"]


def test_the_experiment_collects_its_cells_and_draws_them_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "BUDGETS", {"cpu": TINY})
    monkeypatch.setattr(study, "METHODS", {name: METHODS[name] for name in ("start", "mle", "bc, corrected")})
    study.run(tmp_path, "sequencematch reproduce sudoku", preset="cpu")
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["command"] == "sequencematch reproduce sudoku"
    assert [(cell["cell"]["method"], "judge" in cell) for cell in record["cells"]] == [
        ("start", False),
        ("mle", False),
        ("mle", True),
        ("bc, corrected", False),
    ]
    monkeypatch.setattr(study, "run_cells", None)
    study.draw(tmp_path)
    assert (tmp_path / "sudoku.png").stat().st_size > 10_000
    assert (tmp_path / "table.md").read_text().startswith("| trained by | decoded by |")


def test_the_study_has_every_method_with_every_seed() -> None:
    cells = study.study("gpu", seeds=2)
    assert {(cell.method, cell.seed) for cell in cells} == {
        (method, seed) for method in METHODS if method != "start" for seed in range(2)
    }
    assert all(cell.start == Cell("start", cell.seed) for cell in cells if cell.method != "mle, traces")
    assert {cell.holes for cell in cells} == {20}
    assert len({cell.file for cell in cells}) == len(cells)
    with pytest.raises(ValueError, match="`--preset` must be one of"):
        study.study("tpu")


def result(method: str, seed: int, found: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """A made-up result: name → accuracy and passes."""
    return {
        "cell": {"method": method, "seed": seed, "holes": 20},
        "ways": {
            name: {"accuracy": right, "passes": passes, "flops": 1e7 * passes, "context": 63.0}
            for name, (right, passes) in found.items()
        },
    }


RESULTS = [
    result("mle", 0, {"greedy": (0.5, 20.0), "search below p = 0.1, 661 actions": (0.6, 30.0)}),
    result("mle", 1, {"greedy": (0.6, 20.0), "search below p = 0.3, 661 actions": (0.7, 40.0)}),
    result("bc", 0, {f"search, {n} actions": (0.8, 25.0 + n) for n in (23, 31, 46, 81)}),
]


def test_a_table_has_means_and_ranges_over_seeds_and_every_other_limit() -> None:
    assert table(ways(RESULTS)).splitlines()[2:] == [
        "| mle | greedy | 55.0 [50.0, 60.0] | 20.0 | 0.20 | 63 | – | 2 |",
        "| mle | search below a threshold, 661 actions | 65.0 [60.0, 70.0] | 35.0 | 0.35 | 63 | – | 2 |",
        "| bc | search, 31 actions | 80.0 | 56.0 | 0.56 | 63 | – | 1 |",
        "| bc | search, 81 actions | 80.0 | 106.0 | 1.06 | 63 | – | 1 |",
    ]
    with_errors = [
        RESULTS[2] | {"ways": {"plain": RESULTS[2]["ways"]["search, 23 actions"] | {"own_errors_deleted": 0.4}}}
    ]
    assert "| 63 | 40 | 1 |" in table(ways(with_errors))


def test_a_figure_is_drawn_of_the_ways_that_are_there(tmp_path: Path) -> None:
    draw(ways(RESULTS), tmp_path / "some.png")
    every = [
        result(curve.method, seed, {curve.decoding.replace(" n ", " 4 "): (0.5 + 0.1 * seed, 40.0)})
        for curve in CURVES.values()
        for seed in range(2)
    ]
    draw(ways([*RESULTS, *every]), tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > (tmp_path / "some.png").stat().st_size > 10_000


def test_the_page_has_the_table_of_the_recorded_cells() -> None:
    recorded = ROOT / "results" / "sudoku"
    found = table(ways(json.loads((recorded / "results.json").read_text())["cells"]))
    assert found == (recorded / "table.md").read_text()
    assert found in (ROOT / "docs" / "results" / "search.md").read_text()
