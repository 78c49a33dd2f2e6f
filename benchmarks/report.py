"""What was measured: a table, JSON with its signature, and a plot of the ratios beside their targets."""

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
COLORS = {Verdict.stretch: "#1a7f37", Verdict.met: "#57ab5a", Verdict.missed: "#cf222e"}
JSON, PLOT, MARKDOWN = "bench.json", "bench.png", "bench.md"


@dataclass(frozen=True)
class Report:
    """Rows of one run, where they were measured, and whether whole shapes and enough rounds were."""

    rows: Sequence[Measurement]
    machine: str
    is_full: bool
    command: str
    is_complete: bool = True

    @classmethod
    def of(cls, session: Session, rows: Sequence[Measurement], command: str, *, is_complete: bool = True) -> "Report":
        """The report of a session's rows."""
        is_full = session.scale.is_full and session.rounds >= MIN_ROUNDS
        return cls(tuple(rows), machine(session.device), is_full, command, is_complete)

    def target(self, row: Measurement) -> Target | None:
        """What the row is held against here."""
        return targets_of(self.machine).get(row.target or "")

    def verdict(self, row: Measurement) -> Verdict:
        """How the row stands."""
        return judge(row, self.machine, is_full=self.is_full)


def table(report: Report, *, judged_only: bool = False) -> Table:
    """One line a row; `judged_only` keeps those that are held against something here."""
    title = report.machine + ("" if report.is_full else ", quick: small shapes and few rounds, nothing is judged")
    lines = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    lines.add_column("what", overflow="fold", min_width=30)
    for heading in ("median", "middle half", "of", "must (stretch)"):
        lines.add_column(heading, justify="right", no_wrap=True)
    lines.add_column("", no_wrap=True)
    suite = None
    for row in report.rows:
        verdict, target = report.verdict(row), report.target(row)
        if judged_only and target is None:
            continue
        if row.suite != suite:
            suite = row.suite
            lines.add_section()
            lines.add_row(suite, style="bold")
        middle = "" if row.middle is None else f"{row.middle[0]:.3g}–{row.middle[1]:.3g}"
        limit = "" if target is None else _limits(target)
        cells = (row.name, f"{row.value:.3g} {row.unit}", middle, str(row.rounds), limit, verdict.value)
        lines.add_row(*cells, style=STYLES.get(verdict))
    return lines


def _limits(target: Target) -> str:
    return _limit(target.must) + (f" ({_limit(target.stretch)})" if target.stretch else "")


def _limit(bounds: Bounds | None) -> str:
    if bounds is None:
        return ""
    low, high = bounds
    if math.isinf(low):
        return f"≤ {high:g}"
    return f"≥ {low:g}" if math.isinf(high) else f"{low:g}–{high:g}"


def save(report: Report, folder: Path) -> None:
    """Write `bench.json`, and as `bench.md` what is held against something, replacing those of fewer rows."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "signature": provenance(report.command, threads=1),
        "measured_on": report.machine,
        "is_full": report.is_full,
        "is_complete": report.is_complete,
        "rows": [_record(report, row) for row in report.rows],
    }
    unfinished = folder / f".{JSON}.unfinished"
    unfinished.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    unfinished.replace(folder / JSON)
    (folder / MARKDOWN).write_text(markdown(report))


def markdown(report: Report) -> str:
    """A table of the rows that are held against something here."""
    lines = ["| what | median | middle half | must reach | stretch | |", "|---|---|---|---|---|---|"]
    for row in report.rows:
        target, verdict = report.target(row), report.verdict(row)
        if target is not None:
            middle = "" if row.middle is None else f"{row.middle[0]:.2f} to {row.middle[1]:.2f}"
            cells = (
                f"{row.suite}: {row.name}",
                f"{row.value:.2f}",
                middle,
                _limit(target.must),
                _limit(target.stretch),
            )
            lines.append(f"| {' | '.join(cells)} | {verdict.value} |")
    return "\n".join(lines) + "\n"


def _record(report: Report, row: Measurement) -> dict[str, Any]:
    target = report.target(row)
    judged = {"must": _limit(target.must), "stretch": _limit(target.stretch)} if target is not None else {}
    return {**dataclasses.asdict(row), **judged, "verdict": report.verdict(row).value}


def read(folder: Path) -> Report:
    """The report that `save` wrote."""
    record = json.loads((folder / JSON).read_text())
    names = [field.name for field in dataclasses.fields(Measurement)]
    found = [{name: row[name] for name in names} for row in record["rows"]]
    rows = [Measurement(**{**row, "middle": tuple(row["middle"]) if row["middle"] else None}) for row in found]
    signed = record["signature"]
    return Report(rows, record["measured_on"], record["is_full"], signed["command"], record["is_complete"])


def draw(report: Report, folder: Path) -> None:
    """Write `bench.png`: ratios with a target, a thick mark at what they must reach and a thin one at more; then the rest."""
    require("matplotlib", "plot", "The plot")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    held = [row for row in report.rows if report.target(row) is not None]
    held.sort(key=lambda row: row.target == "control")
    rest = [row for row in report.rows if row.unit == "×" and row not in held]
    panels = [rows for rows in (held, rest) if rows]
    if not panels:
        return
    heights = [1 + len(rows) for rows in panels]
    figure, columns = plt.subplots(
        len(panels),
        1,
        figsize=(11, 1 + 0.3 * sum(heights)),
        layout="constrained",
        height_ratios=heights,
        squeeze=False,
    )
    for axes, rows in zip(columns[:, 0], panels, strict=True):
        _bars(axes, report, rows)
    judged = "green: met, red: missed" if report.is_full else "quick: small shapes and few rounds, nothing is judged"
    title = f"{report.machine}; thick mark: must reach, thin: stretch; {judged}"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / PLOT, dpi=130)
    plt.close(figure)


def _bars(axes: Any, report: Report, rows: Sequence[Measurement]) -> None:
    """A panel: from 1 on a logarithmic axis, so that twice as fast and twice as slow look alike."""
    for place, row in enumerate(rows):
        color = COLORS.get(report.verdict(row), "#8c959f")
        axes.barh(place, row.value - 1, left=1, color=color, height=0.62, zorder=2)
        target = report.target(row)
        bounds = [] if target is None else [(target.must, 3.0), (target.stretch, 1.2)]
        marks = [(limit, width) for pair, width in bounds if pair for limit in pair if math.isfinite(limit)]
        for limit, width in marks:
            axes.plot([limit, limit], [place - 0.4, place + 0.4], color="black", linewidth=width, zorder=3)
        right = max(1.0, row.value, *(limit for limit, _ in marks))
        text = f"{row.value:.2f}" + ("" if target is None else f"  must be {_limits(target)}")
        axes.annotate(text, (right, place), (6, 0), textcoords="offset points", va="center", fontsize=9, zorder=4)
    axes.set_yticks(range(len(rows)), [f"{row.suite}: {row.name}" for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log", base=2)
    low, high = min(0.7, axes.get_xlim()[0]), max(1.5, axes.get_xlim()[1])
    room = 0.5 if report.target(rows[0]) is not None else 0.1  # for the text beside the bars
    axes.set_xlim(low, high * (high / low) ** room)
    axes.axvline(1, color="0.3", linewidth=1, zorder=1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    axes.grid(axis="x", alpha=0.3, zorder=0)
