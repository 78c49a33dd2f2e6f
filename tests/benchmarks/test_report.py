"""Measurements are judged by the targets of their machine, on the terminal alone; JSON, Markdown and plot have all of them."""

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.report import JSON, MARKDOWN, PLOT, Report, draw, main, markdown, read, save, table
from benchmarks.targets import Verdict, judge
from benchmarks.timing import Measurement
from tests.benchmarks.known import session

H200 = "NVIDIA H200"
RESULTS = Path(__file__).parents[2] / "results" / "bench"


def ratio(target: str | None, value: float) -> Measurement:
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
def test_a_measurement_is_judged_on_the_machine_of_its_target_only(
    machine: str, target: str | None, value: float, verdict: Verdict
) -> None:
    assert judge(ratio(target, value), machine, is_full=True) == verdict


@pytest.mark.parametrize(("rounds", "verdict"), [(10, Verdict.not_judged), (11, Verdict.missed)])
def test_a_control_of_few_rounds_says_nothing(rounds: int, verdict: Verdict) -> None:
    assert judge(dataclasses.replace(ratio("control", 1.2), rounds=rounds), "cpu", is_full=True) == verdict
    assert judge(dataclasses.replace(ratio("step, equal", 9.0), rounds=1), "cpu", is_full=True) == Verdict.missed


def test_nothing_is_judged_at_small_shapes() -> None:
    assert judge(ratio("step, equal", 9.0), "cpu", is_full=False) == Verdict.not_judged


def test_too_few_rounds_are_not_a_full_run() -> None:
    full = session(is_full=True)
    assert not Report.of(full, [], "").is_full
    full.rounds = 11
    assert Report.of(full, [], "").is_full


RATIOS = [ratio("step, equal", 2.3), ratio("step, shared", 1.3), ratio("control", 1.0), ratio(None, 0.5)]
REPORT = Report(RATIOS, "cpu", is_full=True, command="python -m benchmarks")


def shown(report: Report, **options: bool) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(report, **options))
    return capture.get()


def test_the_table_says_what_was_met_and_what_must_be() -> None:
    text = shown(REPORT)
    missed, stretch, met, plain = (next(line for line in text.splitlines() if r.name in line) for r in RATIOS)
    assert "2.3 ×" in missed
    assert "≤ 2.2 (≤ 2.05)" in missed
    assert missed.split()[-1] == "missed"
    assert stretch.split()[-1] == "stretch"
    assert "0.95–1.05" in met
    assert plain.split()[-1] == "11"
    assert RATIOS[3].name not in shown(REPORT, judged_only=True)


def test_a_quick_table_says_that_it_is() -> None:
    text = shown(dataclasses.replace(REPORT, is_full=False))
    assert "quick: small shapes and few rounds, no verdicts" in text
    assert "missed" not in text


def test_a_report_is_read_as_it_was_saved(tmp_path: Path) -> None:
    save(REPORT, tmp_path)
    found = read(tmp_path)
    assert found == dataclasses.replace(REPORT, measurements=found.measurements)
    assert list(found.measurements) == RATIOS
    assert json.loads((tmp_path / JSON).read_text())["signature"]["command"] == "python -m benchmarks"
    assert (tmp_path / MARKDOWN).read_text() == markdown(REPORT)


def test_what_is_published_has_every_measurement_and_no_verdict(tmp_path: Path) -> None:
    memory = Measurement("encoding", "peak memory", 122.147, unit="B/token")
    report = dataclasses.replace(REPORT, measurements=[ratio("step, equal", 2.3), memory])
    assert markdown(report).splitlines()[2:] == [
        "| step | step, equal at 2.3 | 2.30 × | 2.30 to 2.30 | 11 |",
        "| encoding | peak memory | 122.15 B/token |  | 1 |",
    ]
    save(report, tmp_path)
    published = (tmp_path / JSON).read_text() + (tmp_path / MARKDOWN).read_text()
    assert not [word for word in ("must", "stretch", "met", "missed", "verdict") if word in published]


def test_the_table_and_the_plot_are_written_again_from_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(REPORT, tmp_path)
    draw(REPORT, tmp_path)
    written = {name: (tmp_path / name).read_bytes() for name in (JSON, MARKDOWN, PLOT)}
    for name in (MARKDOWN, PLOT):
        (tmp_path / name).unlink()
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path)])
    main()
    assert {name: (tmp_path / name).read_bytes() for name in written} == written


def test_the_plot_is_written_where_there_is_a_ratio(tmp_path: Path) -> None:
    draw(dataclasses.replace(REPORT, measurements=[]), tmp_path)
    assert not (tmp_path / PLOT).exists()
    draw(REPORT, tmp_path)
    assert (tmp_path / PLOT).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_the_recorded_results_miss_no_target(machine: str) -> None:
    report = read(RESULTS / machine)
    verdicts = [judge(m, report.machine, is_full=report.is_full) for m in report.measurements]
    assert Verdict.missed not in verdicts
    assert len([verdict for verdict in verdicts if verdict in (Verdict.met, Verdict.stretch)]) > 10
    doubled = [dataclasses.replace(m, value=2 * m.value) for m in report.measurements]  # the control
    assert Verdict.missed in [judge(m, report.machine, is_full=report.is_full) for m in doubled]
