"""What came out for networks on Sudoku: a table and a figure, from the cells' results alone."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sequencematch.data.markdown import table_lines
from sequencematch.extras import require


@dataclass(frozen=True)
class Way:
    """One network under one way to decode: the share of right puzzles, and means over puzzles.

    Forward passes after the prompt, 10⁹ FLOPs, the longest context; the share of its own wrong digits that it deleted, or None.
    """

    method: str
    decoding: str
    seed: int
    accuracy: float
    passes: float
    gflops: float
    context: float
    own_errors_deleted: float | None = None


def ways(results: Iterable[Mapping[str, Any]]) -> list[Way]:
    """Every network under every way to decode it."""
    found = []
    for result in results:
        method, seed = result["cell"]["method"], result["cell"]["seed"]
        for name, way in result["ways"].items():
            name = re.sub(r" p = [\d.]+", " a threshold", name)  # tuned for each network
            known = {field: way.get(field) for field in ("passes", "context", "own_errors_deleted")}
            found.append(Way(method, name, seed, way["accuracy"], gflops=way["flops"] / 1e9, **known))
    return found


def _grouped(found: Iterable[Way]) -> dict[tuple[str, str], list[Way]]:
    """The seeds of each way, in the order of first occurrence."""
    groups: dict[tuple[str, str], list[Way]] = {}
    for way in found:
        groups.setdefault((way.method, way.decoding), []).append(way)
    return groups


def _listed(groups: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """All ways, but of those that differ in a limit of actions or tokens every other one, the last included."""
    kinds: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for method, decoding in groups:
        kinds.setdefault((method, re.sub(r", \d+ (actions|tokens)$", r", \1", decoding)), []).append((method, decoding))
    return {way for of_kind in kinds.values() for way in of_kind[::-2]}


def table(found: Sequence[Way]) -> str:
    """Ways in Markdown: means over seeds, and the worst and best accuracy. Of several limits every other one is listed."""
    rows, groups = [], _grouped(found)
    listed = _listed(groups)
    for (method, decoding), group in groups.items():
        if (method, decoding) not in listed:
            continue
        right = [100 * way.accuracy for way in group]
        spread = f"{mean(right):.1f}" + (f" [{min(right):.1f}, {max(right):.1f}]" if len(right) > 1 else "")
        deleted = [100 * way.own_errors_deleted for way in group if way.own_errors_deleted is not None]
        rows.append(
            [
                method,
                decoding,
                spread,
                f"{mean(way.passes for way in group):.1f}",
                f"{mean(way.gflops for way in group):.2f}",
                f"{mean(way.context for way in group):.0f}",
                f"{mean(deleted):.0f}" if deleted else "–",
                str(len(group)),
            ]
        )
    headings = ["trained by", "decoded by", "right, %", "passes", "GFLOPs", "context", "own errors deleted, %", "seeds"]
    return "\n".join(table_lines(headings, rows)) + "\n"


@dataclass(frozen=True)
class Curve:
    """Ways that are one line of the figure: their method, and how the names of their decodings begin, n being any number."""

    method: str
    decoding: str
    colour: str
    marker: str = "o"
    dashes: str = "-"


#: The method whose context grows with its search.
WRITTEN_OUT = "mle, traces"
#: The curves of the figure, by label.
CURVES: Mapping[str, Curve] = {
    "SequenceMatch: search": Curve("sequencematch α 0.5 γ 0.99", "search", "#0b5f8a", "D"),
    "BC, corrected: search": Curve("bc, corrected", "search", "#2a9d8f", "o"),
    "BC, bursts: search": Curve("bc, bursts", "search", "#8ab17d", "o"),
    "BC: search": Curve("bc", "search", "#d3c95f", "o"),
    "search written out, dead ends kept": Curve(WRITTEN_OUT, "greedy", "#8e5ea2", "s"),
    "MLE: search with a threshold": Curve("mle", "search", "#4a4a4a", "v", "--"),
    "MLE: beam search": Curve("mle", "beam", "#9aa5b1", "v", "--"),
    "MLE: best of n by likelihood": Curve("mle", "best of n by likelihood", "#d08770", "^", "--"),
    "MLE: best of n judged by BC": Curve("mle", "best of n judged", "#e0a458", "^", "--"),
    "MLE: samples until the rules accept one": Curve("mle", "best of n by an oracle", "#c0392b", "^", ":"),
}
#: The panels: field of a way, and the label of its axis. Contexts differ only if a search is written out.
PANELS: Mapping[str, str] = {"passes": "forward passes per puzzle", "gflops": "GFLOPs per puzzle"}
CONTEXT = "longest context, tokens"


def draw(found: Sequence[Way], path: Path) -> None:
    """Accuracy against each cost: means over networks, joined where a way has several sizes; bars reach from worst to best."""
    require("matplotlib", "plot", "The figure")
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    is_written_out = any(way.method == WRITTEN_OUT for way in found)
    shown = {**PANELS, "context": CONTEXT} if is_written_out else PANELS
    figure, panels = plt.subplots(1, len(shown), figsize=(1 + 4.4 * len(shown), 5.2), layout="constrained", sharey=True)
    for axes, (field, label) in zip(panels, shown.items(), strict=True):
        for name, curve in CURVES.items():
            _draw_curve(axes, found, name, curve, field)
        greedy = [way for way in found if (way.method, way.decoding) == ("mle", "greedy")]
        if greedy:
            at = mean(getattr(way, field) for way in greedy), 100 * mean(way.accuracy for way in greedy)
            axes.plot(*at, "*", ms=15, color="black", label="MLE: greedy", zorder=5)
        axes.set(xscale="log", xlabel=label)
        axes.grid(color="#e5e5e5", lw=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        _plain_numbers(axes)
    if is_written_out:
        others = max((way.context for way in found if way.method != WRITTEN_OUT), default=0)
        note = f"no other way has\nmore than {others:.0f} tokens:\nprompt and answer"
        panels[2].annotate(note, (others, 8), xytext=(10, 0), textcoords="offset points", fontsize=9, color="#555555")
        panels[2].set(xlim=(0.9 * min(way.context for way in found), None))
    lowest = 100 * min(way.accuracy for way in found if way.decoding != "plain")
    panels[0].set(ylabel="puzzles solved, percent", ylim=(10 * (lowest // 10), 101))
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_curve(axes: Any, found: Sequence[Way], name: str, curve: Curve, field: str) -> None:
    of_curve = [
        way
        for way in found
        if way.method == curve.method and re.sub(r"of \d+ ", "of n ", way.decoding).startswith(curve.decoding)
    ]
    points = sorted(
        (mean(getattr(way, field) for way in group), [100 * way.accuracy for way in group])
        for group in _grouped(of_curve).values()
    )
    if not points:
        return
    xs, accuracies = zip(*points, strict=True)
    ys = [mean(values) for values in accuracies]
    bars = [[y - min(values) for y, values in zip(ys, accuracies, strict=True)]]
    bars += [[max(values) - y for y, values in zip(ys, accuracies, strict=True)]]
    axes.errorbar(
        xs,
        ys,
        yerr=bars,
        fmt=curve.marker,
        ls=curve.dashes,
        color=curve.colour,
        ms=5,
        lw=1.5,
        elinewidth=0.8,
        label=name,
    )


def _plain_numbers(axes: Any) -> None:
    """Numbers such as 20 and 100 at the ticks, not powers of ten."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(NullFormatter())
