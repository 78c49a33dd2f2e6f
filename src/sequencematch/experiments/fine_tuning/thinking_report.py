"""Accuracy against test-time computation: a table and a figure, from the results of `thinking` alone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

from sequencematch.data.markdown import table_lines
from sequencematch.experiments.fine_tuning.cells import METHODS
from sequencematch.experiments.fine_tuning.report import COLOURS
from sequencematch.experiments.reporting import figure, percent

#: Kinds of decoding in the order of tables: name → its name for people, colour and line in the figure.
KINDS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "greedy": ("greedy", "#2f6f8f", "-"),
        "greedy, banned": ("greedy, ban_deleted", "#2f6f8f", ":"),
        "sampled": ("temperature 1", "#e0a458", "-"),
        "sampled, banned": ("temperature 1, ban_deleted", "#e0a458", ":"),
        "search": ("search", "#7a4f9a", "-"),
        "best of n": ("best of n", "#4d4d4d", "-"),
    }
)
#: How many more forward passes count as equally many.
SLACK = 1.05
#: Labels of the axis of forward passes, where they fit.
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Point:
    """A method under one way to decode: its measures, a number per seed. Shares of nothing are left out."""

    method: str
    kind: str
    dose: str
    measures: Mapping[str, tuple[float, ...]]
    seeds: int

    def mean(self, name: str) -> float:
        """The mean of a measure over the seeds."""
        return mean(self.measures[name])


def points(models: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Every method under every way to decode, over all seeds."""
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for model in models:
        for way in model["ways"]:
            known = {m["name"]: math.inf if m["value"] is None else m["value"] for m in way["measures"] if m["count"]}
            found.setdefault((model["cell"]["method"], way["kind"], way["dose"]), []).append(known)
    return [
        Point(*key, {name: tuple(one[name] for one in of if name in one) for one in of for name in one}, len(of))
        for key, of in found.items()
    ]


def peer(point: Point, found: Sequence[Point]) -> Point | None:
    """MLE decoded in the way that is right most often among those with as many forward passes as a point, or fewer.

    None if all take more. Lengths of answers differ a little from model to model, so `SLACK` times as many count as as many.
    """
    most = SLACK * point.mean("forward passes per question")
    cheap = [other for other in found if other.method == "mle" and other.mean("forward passes per question") <= most]
    return max(cheap, key=lambda other: other.mean("accuracy"), default=None)


def table(found: Sequence[Point]) -> str:
    """Accuracy and cost by method and way to decode, in Markdown, beside MLE with as many forward passes."""
    rows = []
    for point in found:
        beside = peer(point, found)
        shares = [point.measures.get(name, ()) for name in ("own errors deleted", "right tokens deleted")]
        rows.append(
            [
                METHODS[point.method],
                KINDS[point.kind][0],
                point.dose,
                percent(point.measures["accuracy"]),
                *(_number(point.mean(f"{spent} per question")) for spent in ("actions", "forward passes")),
                *(_number(point.mean(f"{spent} per right answer")) for spent in ("actions", "forward passes")),
                *map(percent, shares),
                "–" if beside is None else f"{100 * beside.mean('accuracy'):.1f} ({_short(beside)})",
                str(point.seeds),
            ]
        )
    headings = ["trained by", "decoded by", "dose", "right", "actions", "passes", "actions per right answer"]
    headings += ["passes per right answer", "own errors deleted", "right tokens deleted"]
    headings += ["MLE's best with as many passes", "seeds"]
    return "\n".join(table_lines(headings, rows)) + "\n"


def _short(point: Point) -> str:
    """A way to decode without deletions, in a word or two."""
    return point.dose if point.kind == "best of n" else KINDS[point.kind][0]


def _number(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "–"


def draw(found: Sequence[Point], path: Path) -> None:
    """Accuracy against forward passes: a panel per method that deletes, a line per kind; MLE's best of n in both."""
    methods = [method for method in METHODS if method != "mle"]

    def paint(panels: Any) -> None:
        for axes, method in zip(panels[0], methods, strict=True):
            for kind, (name, colour, line) in KINDS.items():
                _line(axes, found, method, kind, color=colour, ls=line, marker="o", ms=4, label=name)
            grey = COLOURS["mle"]
            _line(axes, found, "mle", "best of n", color=grey, ls="--", marker="s", ms=4, label="MLE, best of n")
            _line(axes, found, "mle", "greedy", color=grey, ls="", marker="*", ms=10, label="MLE, greedy")
            axes.set(title=METHODS[method], xscale="log", xlabel="forward passes per question")
            low, high = axes.get_xlim()
            ticks = [tick for tick in TICKS if low <= tick <= high]
            axes.minorticks_off()
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
        panels[0][0].set(ylabel="right answers, percent")

    figure(path, len(methods), 1, paint)


def _line(axes: Any, found: Sequence[Point], method: str, kind: str, **style: Any) -> None:
    """A line in the order of doses; bars reach over the seeds."""
    of = [point for point in found if (point.method, point.kind) == (method, kind)]
    if not of:
        return
    shares = [[100 * share for share in point.measures["accuracy"]] for point in of]
    means = [mean(values) for values in shares]
    below = [centre - min(values) for centre, values in zip(means, shares, strict=True)]
    above = [max(values) - centre for centre, values in zip(means, shares, strict=True)]
    passes = [point.mean("forward passes per question") for point in of]
    axes.errorbar(passes, means, [below, above], capsize=2, lw=1.5, **style)
