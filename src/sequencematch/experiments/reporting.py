"""What the reports of several studies share: how numbers are written, and a figure with a grid of panels."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from sequencematch.extras import require


def percent(values: Iterable[float]) -> str:
    """Mean and range of shares in percent."""
    return spread(100 * value for value in values)


def spread(values: Iterable[float]) -> str:
    """Mean and range of numbers, `12.3 [11.0, 13.5]`; without the range of one, and – of none."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "–"
    around = f" [{min(known):.1f}, {max(known):.1f}]" if len(known) > 1 else ""
    return f"{mean(known):.1f}{around}"


def figure(
    path: Path,
    columns: int,
    rows: int,
    paint: Callable[[Any], None],
    *,
    size: tuple[float, float] = (4.2, 3.1),
) -> None:
    """A figure with a grid of panels that `paint` fills, written to a file; `size` is that of a panel, in inches."""
    require("matplotlib", "plot", "The figure")
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    width, height = size
    figsize = (1 + width * columns, 0.7 + height * rows)
    drawn, panels = plt.subplots(rows, columns, figsize=figsize, layout="constrained", sharey=True, squeeze=False)
    paint(panels)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e5e5e5", lw=0.6)
        axes.set_axisbelow(True)
    lines, labels = panels.flat[0].get_legend_handles_labels()
    drawn.legend(lines, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    drawn.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(drawn)
