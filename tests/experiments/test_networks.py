"""Networks: what runs before what, what a failure stops, and when a result counts as that of a budget."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest

from sequencematch.experiments.networks import is_same, once, side_by_side
from tests.experiments.notes import Cell, note


def check_order(folder: Path) -> None:
    """A network was there before those that start from it, directly or not."""
    before = {path.name: path.read_text().split() for path in folder.iterdir()}
    assert set(before) == {"small", "large", "a", "b", "c"}
    assert before["small"] == []
    assert "small" in before["large"]
    assert "small" in before["c"]
    assert {"small", "large"} <= set(before["a"]) & set(before["b"])


SMALL = Cell("small")
LARGE = Cell("large", SMALL)
CELLS = [Cell("b", LARGE), Cell("a", LARGE), Cell("c", SMALL)]


def test_a_network_runs_once_and_after_the_one_it_starts_from(tmp_path: Path) -> None:
    side_by_side(partial(note, folder=tmp_path), CELLS, 1)
    check_order(tmp_path)


@pytest.mark.slow
def test_in_processes_a_failure_stops_only_the_networks_that_start_from_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the disk is full"):
        side_by_side(partial(note, folder=tmp_path), [Cell("never", Cell("broken")), *CELLS], 2)
    check_order(tmp_path)


@dataclass(frozen=True)
class Budget:
    steps: int
    four_bits: bool = False


def test_a_budget_field_that_a_record_lacks_had_its_default_then() -> None:
    assert is_same({"steps": 3}, Budget(3))
    assert not is_same({"steps": 3}, Budget(3, four_bits=True))
    assert not is_same({"steps": 4}, Budget(3))
    assert not is_same({"steps": 3, "unknown": 1}, Budget(3))


def test_a_result_of_another_budget_is_neither_used_nor_replaced(tmp_path: Path) -> None:
    path, cell = tmp_path / "cell.json", Cell("small")
    assert once(path, cell, Budget(3), lambda: {"accuracy": 0.5})["budget"] == asdict(Budget(3))
    before = path.read_text()
    with pytest.raises(ValueError, match=r"cell\.json was trained with another budget: .*Choose another folder"):
        once(path, cell, Budget(4), lambda: {"accuracy": 0.9})
    assert path.read_text() == before
