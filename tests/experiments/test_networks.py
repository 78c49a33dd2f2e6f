"""Networks side by side: what runs before what, and what a failure stops."""

from functools import partial
from pathlib import Path

import pytest

from sequencematch.experiments.networks import side_by_side
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
