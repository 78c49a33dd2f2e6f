"""What came out for networks on path-star graphs: a table and a figure, from the cells' JSON files alone."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sequencematch.data.markdown import table_lines
from sequencematch.experiments.networks import START
from sequencematch.extras import require


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
    """Every network under every way to decode it; starts are left out."""
    found = []
    for result in results:
        shape = dict(result["cell"])
        method = shape.pop("method")
        if method == START:
            continue
        for name, peer in result.get("peers", {}).items():
            name = re.sub(r" p = [\d.]+", " a threshold", name)  # tuned for each network
            found.append(Way(method, name, **shape, **peer))
        for name, measures in result.get("decodings", {}).items():
            by_name = {measure["name"]: measure["value"] for measure in measures}
            right = by_name["accuracy"]
            # Of each graph, the first pass is the prompt's.
            passes = by_name["forward passes per right answer"] * right - 1 if right else math.nan
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
        spread = _percent(mean(right))
        if len(right) > 1:
            spread += f" [{_percent(min(right))}, {_percent(max(right))}]"
        passes = [way.passes for way in group if math.isfinite(way.passes)]  # unknown where no answer is right
        rows.append([method, decoding, spread, f"{mean(passes):.1f}" if passes else "–", str(len(group))])
    headings = ["trained by", "decoded by", "right, %", "passes", "seeds"]
    return "\n".join(table_lines(headings, rows)) + "\n"


def _percent(number: float) -> str:
    """One decimal, but two where nearly all is not all."""
    return f"{number:.2f}" if 99.9 < number < 100 else f"{number:.1f}"


#: Decodings of networks that delete, in the order of the figure: name → label and colour.
SHOWN: Mapping[str, tuple[str, str]] = {
    "plain": ("no memory", "#9aa5b1"),
    "ban": ("ban_deleted", "#e0a458"),
    "search": ("search", "#2f6f8f"),
}
#: Label → the ways that it joins: method, and the beginning of the decoding's name; and a colour.
JOINED: Mapping[str, tuple[str, str, str]] = {
    "BC: search": ("bc", "search", "#2f6f8f"),
    "SequenceMatch: search": ("sequencematch α 0.5 γ 0.99", "search", "#7fb3c8"),
    "walks written out": ("mle, traces", "", "#8e5ea2"),
    "answers reversed": ("mle, reversed", "", "#5a8f5a"),
    "MLE, best of n by an oracle": ("mle", "best of n by an oracle", "#c9a227"),
    "MLE, best of n judged by BC": ("mle", "best of n judged", "#6c7fb0"),
    "MLE, best of n by likelihood": ("mle", "best of n by likelihood", "#d08770"),
    "MLE, beam search": ("mle", "beam", "#9aa5b1"),
    "MLE, search with a threshold": ("mle", "search", "#555555"),
    "teacherless": ("mle, teacherless", "", "#c0392b"),
}


def draw(found: Sequence[Way], arms: int, length: int, path: Path) -> None:
    """Two panels: every network that deletes by its decoding, and every way against its forward passes."""
    require("matplotlib", "plot", "The figure")
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    here = [way for way in found if (way.arms, way.length) == (arms, length)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained", width_ratios=(1.1, 1))
    _by_decoding(left, here, arms)
    left.set(xlabel=f"right, percent of new graphs ({arms} arms of {length})")
    _against_passes(right, here)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        columns = 4 if axes is left else 2
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _by_decoding(axes: Any, here: Sequence[Way], arms: int) -> None:
    """A dot per network, a bar at the mean."""
    methods = list(dict.fromkeys(way.method for way in here if way.decoding == "search" and way.method != "mle"))
    for row, method in enumerate(methods):
        for place, (decoding, (label, colour)) in enumerate(SHOWN.items()):
            values = [100 * way.accuracy for way in here if (way.method, way.decoding) == (method, decoding)]
            height = [row + 0.24 * (place - 1)] * len(values)
            axes.plot(
                values, height, "o", ms=5, alpha=0.75, color=colour, label=label if row == len(methods) - 1 else None
            )
            if values:
                axes.plot([mean(values)], height[:1], "|", ms=14, mew=2, color=colour)
    axes.axvline(100 / arms, color="#c0392b", lw=1, ls="--", label=f"a guess, 1/{arms}")
    names = [method.replace("sequencematch", "SequenceMatch").replace("bc", "BC") for method in methods]
    axes.set_yticks(range(len(methods)), names)
    axes.set(xlim=(0, 103))
    axes.invert_yaxis()


def _against_passes(axes: Any, here: Sequence[Way]) -> None:
    """Means over networks: one point per way, joined where it has several sizes."""
    for label, (method, decoding, colour) in JOINED.items():
        points: dict[str, list[Way]] = {}
        for way in here:
            if way.method == method and re.sub(r"of \d+ ", "of n ", way.decoding).startswith(decoding):
                points.setdefault(way.decoding, []).append(way)
        means = sorted((mean(w.passes for w in of), 100 * mean(w.accuracy for w in of)) for of in points.values())
        if means:
            xs, ys = zip(*means, strict=True)
            axes.plot(xs, ys, "-o", ms=6, lw=1.2, color=colour, label=label)
    axes.set(xlabel="forward passes per graph", ylabel="right, percent", ylim=(0, 104), xlim=(0, None))
