"""What came out for variants: a table and a figure, from the results alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from sequencematch.data.markdown import table_lines
from sequencematch.experiments.fine_tuning.report import ACCURACY, COLOURS, DELETIONS, Result, results
from sequencematch.experiments.reporting import figure, spread

#: Ways to decode that the figure shows.
SHOWN = ("temperature 1", "greedy")


def by_variant(found: Sequence[Mapping[str, Any]]) -> dict[str, list[Result]]:
    """The results of every variant, in the order in which variants occur."""
    names = dict.fromkeys(result["variant"] for result in found)
    return {name: results(r for r in found if r["variant"] == name) for name in names}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """A row per variant, in Markdown: means and ranges over seeds, in percent."""
    variants = by_variant(found)
    decodings = list(dict.fromkeys(r.decoding for own in variants.values() for r in own))
    rows = []
    for name, own in variants.items():
        sampled = [r for r in own if r.decoding == "temperature 1"]
        right = [spread(100 * r[ACCURACY.measure] for r in own if r.decoding == decoding) for decoding in decodings]
        deleted = [spread(100 * r[column.measure] for r in sampled) for column in DELETIONS]
        rows.append([name, *right, *deleted, str(len(sampled))])
    headings = ["variant", *(f"right, {name}" for name in decodings), *(c.heading for c in DELETIONS), "seeds"]
    return "\n".join(table_lines(headings, rows)) + "\n"


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel per way to decode with a row per variant: a dot for each model, a bar at their mean."""
    variants = by_variant(found)

    def paint(panels: Any) -> None:
        for axes, decoding in zip(panels[0], SHOWN, strict=True):
            for row, own in enumerate(variants.values()):
                right = [100 * r[ACCURACY.measure] for r in own if r.decoding == decoding]
                colour = COLOURS[own[0].method]
                axes.plot(right, [row] * len(right), "o", ms=5, alpha=0.75, color=colour)
                axes.plot([mean(right)], [row], "|", ms=12, mew=2, color=colour)
            axes.set(title=decoding, xlabel="right, percent")
        panels[0][0].set_yticks(range(len(variants)), list(variants))
        panels[0][0].invert_yaxis()

    figure(path, len(SHOWN), 1, paint)
