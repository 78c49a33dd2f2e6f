"""Rows are held against the targets of their machine only, and the report says so in a table, JSON and a plot."""

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.report import JSON, PLOT, Report, draw, read, save, table
from benchmarks.targets import Verdict, judge
from benchmarks.timing import Measurement
from tests.benchmarks.known import session

H200 = "NVIDIA H200"


def row(target: str | None, value: float) -> Measurement:
    return Measurement("step", f"{target} at {value}", value, rounds=11, middle=(value, value), target=target)


@pytest.mark.parametrize(
    ("machine", "target", "value", "verdict"),
    [
        ("cpu", "step, equal", 2.0, Verdict.stretch),
        ("cpu", "step, equal", 2.05, Verdict.stretch),
        ("cpu", "step, equal", 2.1, Verdict.met),
        ("cpu", "step, equal", 2.3, Verdict.missed),
        ("cpu", "decoding, dynamic", 0.9, Verdict.missed),
        ("cpu", "decoding, dynamic", 1.1, Verdict.met),
        ("cpu", "control", 1.06, Verdict.missed),
        ("cpu", "control", 0.96, Verdict.met),
        ("cpu", "amortised, equal", 2.0, Verdict.not_judged),  # a target of the H200
        ("cpu", "step, short", 2.0, Verdict.none),
        ("cpu", None, 2.0, Verdict.none),
        (H200, "amortised, equal", 2.1, Verdict.met),
        (H200, "decoding, dynamic", 1.1, Verdict.missed),
        (H200, "roofline", 0.76, Verdict.stretch),
        (H200, "length", 1.11, Verdict.missed),
        (H200, "step, equal", 2.0, Verdict.not_judged),
        ("NVIDIA A100", "amortised, equal", 2.0, Verdict.not_judged),
    ],
)
def test_a_row_is_judged_on_the_machine_of_its_target_only(
    machine: str, target: str | None, value: float, verdict: Verdict
) -> None:
    assert judge(row(target, value), machine, is_full=True) == verdict


@pytest.mark.parametrize(("rounds", "verdict"), [(10, Verdict.not_judged), (11, Verdict.missed)])
def test_a_control_of_few_rounds_says_nothing(rounds: int, verdict: Verdict) -> None:
    assert judge(dataclasses.replace(row("control", 1.2), rounds=rounds), "cpu", is_full=True) == verdict
    assert judge(dataclasses.replace(row("step, equal", 9.0), rounds=1), "cpu", is_full=True) == Verdict.missed


def test_nothing_is_judged_at_small_shapes() -> None:
    assert judge(row("step, equal", 9.0), "cpu", is_full=False) == Verdict.not_judged


def test_too_few_rounds_are_not_a_full_run() -> None:
    full = session(is_full=True)
    assert not Report.of(full, [], "").is_full
    full.rounds = 11
    assert Report.of(full, [], "").is_full


ROWS = [row("step, equal", 2.3), row("step, shared", 1.3), row("control", 1.0), row(None, 0.5)]
REPORT = Report(ROWS, "cpu", is_full=True, command="sequencematch bench")


def shown(report: Report, **options: bool) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(report, **options))
    return capture.get()


def test_the_table_says_what_was_met_and_what_must_be() -> None:
    text = shown(REPORT)
    missed, stretch, met, plain = (next(line for line in text.splitlines() if r.name in line) for r in ROWS)
    assert "2.3 ×" in missed
    assert "≤ 2.2 (≤ 2.05)" in missed
    assert missed.split()[-1] == "missed"
    assert stretch.split()[-1] == "stretch"
    assert "0.95–1.05" in met
    assert plain.split()[-1] == "11"
    assert ROWS[3].name not in shown(REPORT, judged_only=True)


def test_a_quick_table_says_that_it_is() -> None:
    text = shown(dataclasses.replace(REPORT, is_full=False))
    assert "nothing is judged" in text
    assert "missed" not in text


def test_a_report_is_read_as_it_was_saved(tmp_path: Path) -> None:
    save(REPORT, tmp_path)
    found = read(tmp_path)
    assert list(found.rows) == ROWS
    assert dataclasses.replace(found, rows=ROWS) == REPORT
    record = json.loads((tmp_path / JSON).read_text())
    assert record["rows"][0]["verdict"] == "missed"
    assert record["rows"][0]["must"] == "≤ 2.2"
    assert record["signature"]["command"] == "sequencematch bench"


def test_the_plot_is_written_where_there_is_a_ratio(tmp_path: Path) -> None:
    draw(dataclasses.replace(REPORT, rows=[]), tmp_path)
    assert not (tmp_path / PLOT).exists()
    draw(REPORT, tmp_path)
    assert (tmp_path / PLOT).read_bytes()[:4] == b"\x89PNG"
