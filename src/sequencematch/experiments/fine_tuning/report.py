"""What came out for fine-tuned models: tables and figures, from the cells' results alone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sequencematch.data.markdown import table_lines
from sequencematch.experiments.fine_tuning.cells import METHODS
from sequencematch.experiments.reporting import figure, spread

COLOURS: Mapping[str, str] = {"mle": "#9aa5b1", "bc": "#e0a458", "sequencematch": "#2f6f8f"}
NOISE_NAMES: Mapping[str, str] = {"none": "–", "digits": "digits", "uniform": "any token", "own": "the model's own"}


@dataclass(frozen=True)
class Column:
    """A measure in tables and figures: its name in the results, its heading, and a factor, by which shares become percent."""

    measure: str
    heading: str
    factor: float = 100.0


ACCURACY = Column("accuracy", "right")
DELETIONS = (
    Column("own errors deleted", "own errors deleted"),
    Column("right tokens deleted", "right tokens deleted"),
)


@dataclass(frozen=True)
class Result:
    """One model under one way to decode. Shares are NaN where they are shares of nothing."""

    method: str
    noise: str
    rate: float
    seed: int
    decoding: str
    measures: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        """A measure by its name; NaN if it was not measured."""
        return self.measures.get(name, math.nan)


def results(cells: Iterable[Mapping[str, Any]]) -> list[Result]:
    """Every model under every way to decode it."""
    return [
        Result(
            **{name: cell["cell"][name] for name in ("method", "noise", "rate", "seed")},
            decoding=decoding,
            measures={measure["name"]: measure["value"] for measure in measures if measure["count"]},
        )
        for cell in cells
        for decoding, measures in cell["decodings"].items()
    ]


def table(
    found: Sequence[Result],
    paper: Mapping[tuple[str, float], str],
    score: Column = ACCURACY,
    also: Sequence[Column] = DELETIONS,
) -> str:
    """A score by method and noise, in Markdown: means and ranges over seeds, beside the paper's where it has a number.

    The score is shown for every way to decode, the columns `also` for samples at temperature 1. `paper` has a text for a method
    and a rate of noise.
    """
    models = dict.fromkeys((r.method, r.noise, r.rate) for r in found)
    decodings = list(dict.fromkeys(r.decoding for r in found))
    rows = []
    for method, noise, rate in models:
        of = [r for r in found if (r.method, r.noise, r.rate) == (method, noise, rate)]
        sampled = [r for r in of if r.decoding == "temperature 1"]
        rows.append(
            [
                METHODS[method],
                NOISE_NAMES[noise],
                f"{rate:g}",
                *(_cell(score, [r for r in of if r.decoding == decoding]) for decoding in decodings),
                *(_cell(column, sampled) for column in also),
                str(len(sampled)),
                *([paper.get((method, rate), "–")] if paper else []),
            ]
        )
    headings = ["trained by", "noise", "rate", *(f"{score.heading}, {name}" for name in decodings)]
    headings += [*(column.heading for column in also), "seeds", *(["paper"] if paper else [])]
    return "\n".join(table_lines(headings, rows)) + "\n"


def _cell(column: Column, found: Iterable[Result]) -> str:
    return spread(column.factor * r[column.measure] for r in found)


def draw_against_noise(found: Sequence[Result], noises: Sequence[str], path: Path, score: Column = ACCURACY) -> None:
    """A score against the rate of noise: a column per kind of noise, a row per way to decode.

    Bars, and MLE's band, reach over the seeds. Methods stand a little apart, so that no bar hides another.
    """
    decodings = ("temperature 1", "greedy")
    margin = 0.05 * max(r.rate for r in found)
    rates = (-margin, max(r.rate for r in found) + margin)
    apart = {"bc": -margin / 6, "sequencematch": margin / 6}

    def paint(panels: Any) -> None:
        for row, decoding in zip(panels, decodings, strict=True):
            here = [r for r in found if r.decoding == decoding]
            for axes, noise in zip(row, noises, strict=True):
                for method in METHODS:
                    _line(axes, here, method, noise, score, apart.get(method, 0.0))
                axes.set(title=f"{NOISE_NAMES[noise]} as noise, {decoding}", xlabel="rate of noise", xlim=rates)
            row[0].set(ylabel=f"{score.heading}, percent" if score.factor == 100 else score.heading)

    figure(path, len(noises), len(decodings), paint)


def _line(axes: Any, here: Sequence[Result], method: str, noise: str, score: Column, shift: float) -> None:
    """One method: a line over rates, whose first point has no noise; of MLE a dashed line at its mean, in a band."""
    points: dict[float, list[float]] = {}
    for r in here:
        if r.method == method and r.noise in ("none", noise):
            points.setdefault(r.rate, []).append(score.factor * r[score.measure])
    if not points:
        return
    if method == "mle":
        axes.axhspan(min(points[0.0]), max(points[0.0]), color=COLOURS[method], alpha=0.2, lw=0)
        axes.axhline(mean(points[0.0]), color=COLOURS[method], ls="--", lw=1.5, label=METHODS[method])
        return
    rates = sorted(points)
    means = [mean(points[rate]) for rate in rates]
    below = [centre - min(points[rate]) for rate, centre in zip(rates, means, strict=True)]
    above = [max(points[rate]) - centre for rate, centre in zip(rates, means, strict=True)]
    places = [rate + shift for rate in rates]
    look: dict[str, Any] = {"fmt": "-o", "ms": 4, "capsize": 2, "color": COLOURS[method], "label": METHODS[method]}
    axes.errorbar(places, means, [below, above], **look)
