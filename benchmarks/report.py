"""A report: all measurements as JSON, Markdown and a plot, and a terminal table that compares them with the targets.

python -m benchmarks.report results/bench/cpu        # writes bench.md and bench.png again, from bench.json
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.session import Session
from benchmarks.targets import MIN_ROUNDS, Bounds, Target, Verdict, judge, targets_of
from benchmarks.timing import Measurement, machine, provenance
from sequencematch.extras import require

STYLES = {Verdict.stretch: "bold green", Verdict.met: "green", Verdict.missed: "bold red", Verdict.not_judged: "dim"}
JSON, PLOT, MARKDOWN = "bench.json", "bench.png", "bench.md"
QUICK = ", quick: small shapes and few rounds"


@dataclass(frozen=True)
class Report:
    """Measurements of one run. `is_full` says that it had full shapes and enough rounds, `is_complete` that it ended."""

    measurements: Sequence[Measurement]
    machine: str
    is_full: bool
    command: str
    is_complete: bool = True

    @classmethod
    def of(
        cls, session: Session, measurements: Sequence[Measurement], command: str, *, is_complete: bool = True
    ) -> "Report":
        """The report of a session's measurements."""
        is_full = session.scale.is_full and session.rounds >= MIN_ROUNDS
        return cls(tuple(measurements), machine(session.device), is_full, command, is_complete)


def table(report: Report, *, judged_only: bool = False) -> Table:
    """A line per measurement with its target and verdict; `judged_only` leaves out measurements without a target here."""
    title = report.machine + ("" if report.is_full else f"{QUICK}, no verdicts")
    lines = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    lines.add_column("what", overflow="fold", min_width=30)
    for heading in ("median", "middle half", "rounds", "must (stretch)"):
        lines.add_column(heading, justify="right", no_wrap=True)
    lines.add_column("", no_wrap=True)
    targets, suite = targets_of(report.machine), None
    for measurement in report.measurements:
        target = targets.get(measurement.target or "")
        if judged_only and target is None:
            continue
        if measurement.suite != suite:
            suite = measurement.suite
            lines.add_section()
            lines.add_row(suite, style="bold")
        verdict = judge(measurement, report.machine, is_full=report.is_full)
        lines.add_row(
            measurement.name,
            f"{measurement.value:.3g} {measurement.unit}",
            "" if measurement.middle is None else f"{measurement.middle[0]:.3g}–{measurement.middle[1]:.3g}",
            str(measurement.rounds),
            "" if target is None else _limits(target),
            verdict.value,
            style=STYLES.get(verdict),
        )
    return lines


def _limits(target: Target) -> str:
    return _limit(target.must) + (f" ({_limit(target.stretch)})" if target.stretch else "")


def _limit(bounds: Bounds) -> str:
    low, high = bounds
    if math.isinf(low):
        return f"≤ {high:g}"
    return f"≥ {low:g}" if math.isinf(high) else f"{low:g}–{high:g}"


def save(report: Report, folder: Path) -> None:
    """Write `bench.json` and `bench.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "signature": provenance(report.command, threads=1),
        "measured_on": report.machine,
        "is_full": report.is_full,
        "is_complete": report.is_complete,
        "rows": [dataclasses.asdict(measurement) for measurement in report.measurements],
    }
    unfinished = folder / f".{JSON}.unfinished"
    unfinished.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    unfinished.replace(folder / JSON)
    (folder / MARKDOWN).write_text(markdown(report))


def read(folder: Path) -> Report:
    """The report that `save` wrote."""
    record = json.loads((folder / JSON).read_text())
    names = [field.name for field in dataclasses.fields(Measurement)]
    found = [{name: row[name] for name in names} for row in record["rows"]]
    measurements = [Measurement(**{**row, "middle": tuple(row["middle"]) if row["middle"] else None}) for row in found]
    command = record["signature"]["command"]
    return Report(measurements, record["measured_on"], record["is_full"], command, record["is_complete"])


def markdown(report: Report) -> str:
    """A table of all measurements."""
    lines = ["| suite | what | median | middle half | rounds |", "|---|---|---:|---:|---:|"]
    for measurement in report.measurements:
        cells = (
            measurement.suite,
            measurement.name,
            f"{measurement.value:.2f} {measurement.unit}",
            "" if measurement.middle is None else f"{measurement.middle[0]:.2f} to {measurement.middle[1]:.2f}",
            str(measurement.rounds),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(report: Report, folder: Path) -> None:
    """Write `bench.png`: all ratios, a panel per suite, with the middle half as a line; A/A controls in grey."""
    require("matplotlib", "plot", "The plot")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ratios = [measurement for measurement in report.measurements if measurement.unit == "×"]
    if not ratios:
        return
    panels = [[m for m in ratios if m.suite == suite] for suite in dict.fromkeys(m.suite for m in ratios)]
    heights = [1 + len(panel) for panel in panels]
    figure, columns = plt.subplots(
        len(panels),
        1,
        figsize=(11, 1.2 + 0.3 * sum(heights)),
        layout="constrained",
        height_ratios=heights,
        sharex=True,
        squeeze=False,
    )
    for axes, panel in zip(columns[:, 0], panels, strict=True):
        _bars(axes, panel)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    axes.set_xlim(min(0.7, axes.get_xlim()[0]), max(1.5, axes.get_xlim()[1] * 1.4))  # room for the numbers
    where = ("One CPU thread" if report.machine == "cpu" else report.machine) + ("" if report.is_full else QUICK)
    title = f"{where}. Time or memory of the first over the second; decoding: actions per second."
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / PLOT, dpi=130)
    plt.close(figure)


def _bars(axes: Any, panel: Sequence[Measurement]) -> None:
    """Bars from 1 on a logarithmic axis: twice and half are equally long."""
    for place, measurement in enumerate(panel):
        color = "#8c959f" if measurement.target == "control" else "#4078b0"
        axes.barh(place, measurement.value - 1, left=1, color=color, height=0.62, zorder=2)
        low, high = measurement.middle or (measurement.value, measurement.value)
        axes.plot([low, high], [place, place], color="black", linewidth=1.2, zorder=3)
        right = (max(1.0, measurement.value, high), place)
        text = f"{measurement.value:.2f}"
        axes.annotate(text, right, (6, 0), textcoords="offset points", va="center", fontsize=9, zorder=4)
    axes.set_yticks(range(len(panel)), [measurement.name for measurement in panel], fontsize=9)
    axes.set_ylim(len(panel) - 0.4, -0.6)
    axes.set_title(panel[0].suite, fontsize=10, weight="bold", loc="left")
    axes.set_xscale("log", base=2)
    axes.axvline(1, color="0.3", linewidth=1, zorder=1)
    axes.grid(axis="x", alpha=0.3, zorder=0)


def main() -> None:
    """Write the table and the plot of recorded measurements again."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=main.__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help=f"holds a {JSON}")
    for folder in parser.parse_args().folders:
        report = read(folder)
        (folder / MARKDOWN).write_text(markdown(report))
        draw(report, folder)


if __name__ == "__main__":
    main()
