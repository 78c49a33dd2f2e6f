"""What came out for divergences: a table for each task and a figure, from the results alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sequencematch.data.markdown import table_lines
from sequencematch.experiments.reporting import figure, percent, spread
from sequencematch.extras import require

#: The tasks, and the row that has no divergence: cloning alone.
SUMS, STARS, CLONING = "arithmetic", "path_star", "bc"
#: Divergences, and cloning, as tables call them.
TITLES: Mapping[str, str] = {
    CLONING: "none: BC",
    "reverse_kl": "reverse KL",
    "forward_kl": "forward KL",
    "js": "Jensen-Shannon",
    "hellinger": "squared Hellinger",
    "chi2": "Pearson χ²",
    "chi2_mixture": "χ²-mixture",
    "total_variation": "total variation",
    "wasserstein": "Wasserstein",
    "mmd": "squared MMD",
}
#: The paper's accuracies on sums, in percent, for both kinds of noise   (App. G.1).
PAPER: Mapping[str, str] = {"js": "60", "chi2_mixture": "85-90"}
#: Task → heading of a column → the way to decode and the measure that it shows. The figure shows each task's first column.
COLUMNS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    SUMS: {
        "right, temperature 1": ("temperature 1", "accuracy"),
        "right, greedy": ("greedy", "accuracy"),
        "wrong digit deleted at once": ("greedy", "deletes first"),
        "right after a wrong digit": ("greedy", "recovers"),
        "own errors deleted": ("temperature 1", "own errors deleted"),
        "right tokens deleted": ("temperature 1", "right tokens deleted"),
    },
    STARS: {
        "right, search": ("search", "accuracy"),
        "right, no memory": ("plain", "accuracy"),
        "own errors deleted": ("search", "own errors deleted"),
        "right tokens deleted": ("search", "right tokens deleted"),
    },
}
COLOURS: Mapping[str, str] = {SUMS: "#2f6f8f", STARS: "#e0a458"}
LABELS: Mapping[str, str] = {SUMS: "sums", STARS: "path-star graphs"}


@dataclass(frozen=True)
class Run:
    """One model: its shares by way to decode and name, and what `steadiness` found. Both are empty if it stopped."""

    task: str
    divergence: str
    measures: Mapping[tuple[str, str], float]
    gradient: Mapping[str, float]
    stopped: bool

    @property
    def peak(self) -> float:
        """The largest gradient norm over the median; NaN if it stopped."""
        return self.gradient["largest"] / self.gradient["median"] if self.gradient else math.nan


def as_run(task: str, result: Mapping[str, Any]) -> Run:
    """A result of a task. A share of nothing is left out."""
    measures = {
        (decoding, measure["name"]): measure["value"]
        for decoding, measures in result.get("decodings", {}).items()
        for measure in measures
        if measure["count"]
    }
    return Run(task, result["divergence"], measures, result.get("gradient", {}), "stopped" in result)


def tables(runs: Sequence[Run]) -> str:
    """A table for each task that was run, in Markdown: a row for each divergence with means and ranges over seeds, in percent."""
    return "\n".join(f"{LABELS[task].capitalize()}:\n\n{table(runs, task)}" for task in _tasks(runs))


def _tasks(runs: Sequence[Run]) -> list[str]:
    """The tasks that were run, in the order of `COLUMNS`."""
    return [task for task in COLUMNS if any(run.task == task for run in runs)]


def table(runs: Sequence[Run], task: str) -> str:
    """The table of a task."""
    rows = []
    for name, title in TITLES.items():
        of = [run for run in runs if (run.task, run.divergence) == (task, name)]
        if not of:
            continue
        shares = [percent(run.measures.get(wanted, math.nan) for run in of) for wanted in COLUMNS[task].values()]
        rows.append(
            [
                title,
                *shares,
                percent(run.gradient.get("spikes", math.nan) for run in of),
                spread(run.peak for run in of),
                f"{sum(run.stopped for run in of)} of {len(of)}",
                *([PAPER.get(name, "–")] if task == SUMS else []),
            ]
        )
    headings = ["divergence", *COLUMNS[task], "spikes", "largest norm / median", "stopped"]
    return "\n".join(table_lines([*headings, *(["paper"] if task == SUMS else [])], rows)) + "\n"


def draw(runs: Sequence[Run], path: Path) -> None:
    """A row for each divergence; panels of right answers on each task that was run, and of the largest gradient norm."""
    require("matplotlib", "plot", "The figure")
    from matplotlib.ticker import LogLocator, NullFormatter

    names, tasks = [name for name in TITLES if any(run.divergence == name for run in runs)], _tasks(runs)

    def paint(panels: Any) -> None:
        *shares, peaks = panels[0]
        for axes, task in zip(shares, tasks, strict=True):
            ((heading, wanted), *_) = COLUMNS[task].items()
            _dots(axes, names, task, runs, lambda run, wanted=wanted: 100 * run.measures.get(wanted, math.nan))
            axes.set(title=LABELS[task], xlabel=f"{heading}, percent")
            if len(tasks) > 1:
                axes.set(xlim=(-3, 103))
                shares[0].plot([], [], "o", color=COLOURS[task], label=LABELS[task])
        for task in tasks:
            _dots(peaks, names, task, runs, lambda run: run.peak)
        peaks.set(title="gradient norms", xlabel="largest / median", xscale="log")
        peaks.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        peaks.xaxis.set_major_formatter("{x:g}")
        peaks.xaxis.set_minor_formatter(NullFormatter())
        shares[0].set_yticks(range(len(names)), [TITLES[name] for name in names])
        shares[0].invert_yaxis()

    figure(path, len(tasks) + 1, 1, paint)


def _dots(axes: Any, names: Sequence[str], task: str, runs: Sequence[Run], value: Any) -> None:
    """A dot for each network, a bar at the mean, and a cross at the left edge for each that stopped."""
    for row, name in enumerate(names):
        of = [run for run in runs if (run.task, run.divergence) == (task, name)]
        known = [value(run) for run in of if math.isfinite(value(run))]
        axes.plot(known, [row] * len(known), "o", ms=5, alpha=0.75, color=COLOURS[task])
        if known:
            axes.plot([mean(known)], [row], "|", ms=14, mew=2, color=COLOURS[task])
        if any(run.stopped for run in of):
            axes.text(0.01, row, "✕ stopped", transform=axes.get_yaxis_transform(), va="center", color="#c0392b")
