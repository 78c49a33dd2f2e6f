"""The cost model's predictions lie near the recorded measurements, and the table in `docs/scaling.md` is made from them."""

from pathlib import Path

import pytest

from benchmarks.plan_check import Check, checks, table
from sequencematch.training.planning import HARDWARE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("check", list(checks()), ids=lambda check: f"{check.name}, {check.file}")
def test_a_prediction_lies_near_its_measurement(check: Check) -> None:
    assert check.ratio == pytest.approx(1, abs=check.tolerance)


def test_the_table_in_the_document_is_the_one_that_is_made() -> None:
    assert table() in (ROOT / "docs" / "scaling.md").read_text()


def test_every_constant_names_a_recorded_file_or_a_data_sheet() -> None:
    for hardware in HARDWARE.values():
        constants = set(vars(hardware)) - {"name", "sources"}
        assert set(hardware.sources) == constants
        assert all(source == "data sheet" or (ROOT / source).is_file() for source in hardware.sources.values())
