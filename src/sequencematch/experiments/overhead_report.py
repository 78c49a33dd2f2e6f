"""What a step of SequenceMatch costs beside MLE: the paper's two tables with ours beside them, and a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from types import MappingProxyType
from typing import Any

from sequencematch.data.markdown import table_lines
from sequencematch.experiments.fine_tuning.report import COLOURS
from sequencematch.experiments.reporting import figure

HEADINGS = (
    "training procedure",
    "times of",
    "gradient step, s",
    "sampling time, s",
    "gradient steps per sample",
    "total amortised time, s",
    "gradient step / MLE's",
    "total / MLE's",
)


@dataclass(frozen=True)
class Costs:
    """A line of the paper's tables as printed, in seconds: numbers, each with what it gives after ±. MLE samples nothing."""

    step: tuple[float, float]
    total: tuple[float, float]
    sampling: tuple[float, float] | None = None
    steps_per_sample: int | None = None

    @property
    def share(self) -> float:
        """Sampling, divided by the number of steps that use it."""
        return (
            0.0 if self.sampling is None or self.steps_per_sample is None else self.sampling[0] / self.steps_per_sample
        )


#: The paper's tables on execution time   (App. F).
PAPER: Mapping[str, Mapping[str, Costs]] = MappingProxyType(
    {
        "text": {"MLE": Costs((1.5, 0.1), (1.5, 0.1)), "SequenceMatch": Costs((5.3, 0.5), (8.1, 0.2), (50, 10), 16)},
        "arithmetic": {
            "MLE": Costs((1.2, 0.1), (1.5, 0.1)),
            "SequenceMatch": Costs((2.1, 0.5), (2.16, 0.1), (2, 0.1), 32),
        },
    }
)


@dataclass(frozen=True)
class Round:
    """One variant in one round, in seconds: a step, the share of sampling that it uses up, and MLE's step in that round."""

    step: float
    share: float
    mle: float

    @property
    def total(self) -> float:
        """The step with its share of sampling."""
        return self.step + self.share


def rounds_of(timed: Mapping[str, Any], name: str) -> list[Round]:
    """A variant in every round."""
    per_sample = timed["cell"]["steps_per_sample"]
    return [
        Round(one[name]["step"], one[name].get("sampling", 0.0) / per_sample, one["MLE"]["step"])
        for one in timed["rounds"]
    ]


def middle(values: Sequence[float]) -> str:
    """The median, and the range of the middle half, `1.23 [1.20, 1.31]`, with three significant digits of the median."""
    low, centre, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    decimals = next((places for places in range(6) if abs(centre) * 10**places >= 100), 6)
    spread = f" [{low:.{decimals}f}, {high:.{decimals}f}]" if len(values) > 1 else ""
    return f"{centre:.{decimals}f}{spread}"


def table(timed: Mapping[str, Any]) -> str:
    """One of the paper's tables in Markdown: its lines, then ours. Our ratios are medians of the rounds' ratios."""
    paper, lines = PAPER[timed["cell"]["recipe"]], []
    for name, costs in paper.items():
        drawn = ("–", "–") if costs.sampling is None else (_printed(costs.sampling), str(costs.steps_per_sample))
        ratios = [costs.step[0] / paper["MLE"].step[0], costs.total[0] / paper["MLE"].total[0]]
        texts = [f"{ratio:.2f}" for ratio in ratios]
        lines.append([name, "the paper", _printed(costs.step), *drawn, _printed(costs.total), *texts])
    for name in timed["rounds"][0]:
        of = rounds_of(timed, name)
        sampled = [one[name]["sampling"] for one in timed["rounds"] if "sampling" in one[name]]
        drawn = (middle(sampled), str(timed["cell"]["steps_per_sample"])) if sampled else ("–", "–")
        lines.append(
            [
                name,
                "ours",
                middle([r.step for r in of]),
                *drawn,
                middle([r.total for r in of]),
                middle([r.step / r.mle for r in of]),
                middle([r.total / r.mle for r in of]),
            ]
        )
    return "\n".join(table_lines(HEADINGS, lines)) + "\n"


def _printed(number: tuple[float, float]) -> str:
    return f"{number[0]:g} ± {number[1]:g}"


def title(timed: Mapping[str, Any]) -> str:
    """What was timed, in words."""
    cell, size = timed["cell"], timed["budget"]
    return (
        f"{cell['recipe'].capitalize()}: rows of {cell['length']} tokens, {cell['batch_size']} in a step; rollouts of "
        f"{cell['completion']} tokens. Ours: {size['model']}, on {timed['device']}, {len(timed['rounds'])} rounds."
    )


def draw(tables: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A step and the share of sampling that it uses up, over a step of MLE: the paper's beside ours, a panel per table."""

    def paint(panels: Any) -> None:
        for axes, timed in zip(panels[0], tables, strict=True):
            _bars(axes, timed)
        panels[0][0].set(ylabel="time of a step, MLE = 1")

    figure(path, len(tables), 1, paint)


def _bars(axes: Any, timed: Mapping[str, Any]) -> None:
    paper, ours = PAPER[timed["cell"]["recipe"]], rounds_of(timed, "SequenceMatch")
    mle, theirs = paper["MLE"].step[0], paper["SequenceMatch"]
    steps = [1.0, theirs.step[0] / mle, median(r.step / r.mle for r in ours)]
    shares = [0.0, theirs.share / mle, median(r.share / r.mle for r in ours)]
    names = ["MLE", "SequenceMatch,\nthe paper", "SequenceMatch,\nours"]
    axes.bar(names, steps, 0.6, color=COLOURS["sequencematch"], label="gradient step")
    axes.bar(names, shares, 0.6, bottom=steps, color="#a9c9d8", label="sampling, amortised")
    for place, height in enumerate(map(sum, zip(steps, shares, strict=True))):
        axes.annotate(f"{height:.2f}", (place, height), (0, 3), textcoords="offset points", ha="center")
    axes.set(title=f"{timed['cell']['recipe']} (ours: rows of {timed['cell']['length']} tokens)")
    axes.margins(y=0.12)
