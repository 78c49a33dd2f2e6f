"""What came out for networks on path-star graphs: a table and a figure, from the cells' JSON files alone."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sequencematch.data.markdown import table_lines


@dataclass(frozen=True)
class Way:
    """One way to solve graphs, of one network: share of right answers, and forward passes per graph after the prompt."""

    method: str
    decoding: str
    seed: int
    arms: int
    length: int
    accuracy: float
    passes: float


def ways(results: Iterable[Mapping[str, Any]]) -> list[Way]:
    """Every network under every way to decode it."""
    found = []
    for result in results:
        shape = dict(result["cell"])
        method = shape.pop("method")
        for name, peer in result.get("peers", {}).items():
            name = re.sub(r" p = [\d.]+", " a threshold", name)  # tuned for each network
            found.append(Way(method, name, **shape, **peer))
        for name, measures in result.get("decodings", {}).items():
            by_name = {measure["name"]: measure["value"] for measure in measures}
            right = by_name["accuracy"]
            passes = by_name["forward passes per right answer"] * right if right else math.nan
            found.append(Way(method, name, **shape, accuracy=right, passes=passes))
    return found


def table(found: Sequence[Way], arms: int, length: int) -> str:
    """All ways on graphs of one shape, in Markdown: mean, worst and best of the seeds, in the order of first occurrence."""
    groups: dict[tuple[str, str], list[Way]] = {}
    for way in found:
        if (way.arms, way.length) == (arms, length):
            groups.setdefault((way.method, way.decoding), []).append(way)
    rows = []
    for (method, decoding), group in groups.items():
        right = [100 * way.accuracy for way in group]
        spread = f"{mean(right):.1f} [{min(right):.1f}, {max(right):.1f}]" if len(right) > 1 else f"{right[0]:.1f}"
        rows.append([method, decoding, spread, f"{mean(way.passes for way in group):.1f}", str(len(group))])
    headings = ["trained by", "decoded by", "right, %", "passes", "seeds"]
    return "\n".join(table_lines(headings, rows)) + "\n"


#: Decodings of networks that delete, in the order of the figure.
SHOWN = {"plain": "no memory", "ban": "`ban_deleted`", "search": "search"}


def draw(found: Sequence[Way], arms: int, length: int, path: Path) -> None:
    """Two panels: every network that deletes by its decoding, and every way against its forward passes."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    here = [way for way in found if (way.arms, way.length) == (arms, length)]
    deleting = list(dict.fromkeys(way.method for way in here if way.decoding == "search"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", width_ratios=(1.25, 1))
    for row, method in enumerate(deleting):
        for place, (decoding, colour) in enumerate(zip(SHOWN, ("#9aa5b1", "#e0a458", "#2f6f8f"), strict=True)):
            values = [100 * way.accuracy for way in here if (way.method, way.decoding) == (method, decoding)]
            y = row + 0.24 * (place - 1)
            left.plot(
                values,
                [y] * len(values),
                "o",
                ms=5,
                alpha=0.75,
                color=colour,
                label=SHOWN[decoding] if row == 0 else None,
            )
            left.plot([mean(values)], [y], "|", ms=14, mew=2, color=colour)
    left.axvline(100 / arms, color="#c0392b", lw=1, ls="--", label=f"next-token prediction, 1/{arms}")
    left.set_yticks(
        range(len(deleting)),
        [method.replace("sequencematch", "SequenceMatch").replace("bc", "BC") for method in deleting],
    )
    left.set(xlim=(0, 103), xlabel=f"right, percent of new graphs ({arms} arms of {length})")
    left.invert_yaxis()
    left.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.4, 1.13), ncols=4, fontsize=8)
    _against_passes(right, here)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


#: Label → the ways that it joins: method, and the beginning of the decoding's name.
JOINED: Mapping[str, tuple[str, str]] = {
    "MLE, beam search": ("mle", "beam"),
    "MLE, best of n by likelihood": ("mle", "best of n by likelihood"),
    "MLE, best of n by an oracle": ("mle", "best of n by an oracle"),
    "MLE, search with a threshold": ("mle", "search"),
    "MLE, walks written out": ("mle, traces", ""),
    "MLE, answers reversed": ("mle, reversed", ""),
    "teacherless": ("mle, teacherless", ""),
    "BC, bursts to the goal: search": ("bc, bursts to the goal", "search"),
}


def _against_passes(axes: Any, here: Sequence[Way]) -> None:
    for label, (method, decoding) in JOINED.items():
        points: dict[str, list[Way]] = {}
        for way in here:
            plain = re.sub(r"of \d+ by", "of n by", way.decoding)
            if way.method == method and plain.startswith(decoding):
                points.setdefault(way.decoding, []).append(way)
        if not points:
            continue
        xs, ys = zip(
            *sorted((mean(w.passes for w in ways), 100 * mean(w.accuracy for w in ways)) for ways in points.values()),
            strict=True,
        )
        axes.plot(xs, ys, "-o", ms=5, lw=1.2, label=label, zorder=3 if "search" in label else 2)
    axes.set(xlabel="forward passes per graph", ylim=(0, 103), xlim=(0, None))
    axes.legend(frameon=False, fontsize=8, loc="center right")
