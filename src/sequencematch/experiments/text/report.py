"""What came out of the study: its tables, its figure and its first rows, beside the paper's numbers."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

from sequencematch.data.markdown import as_markdown, escaped, quoted, table_lines
from sequencematch.data.pieces import Piece
from sequencematch.experiments.reporting import figure, percent
from sequencematch.experiments.text.cells import MISTAKEN, SAMPLED, WAYS, Way
from sequencematch.metrics import Measure

#: Measures: name → its heading, and the paper's numbers in the order of `WAYS`   (Table 2). The last is ours.
MEASURES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "MAUVE": ("MAUVE ↑", ("0.85 ± 0.03", "0.86 ± 0.03", "0.89 ± 0.02", "0.84 ± 0.02", "0.91 ± 0.02")),
        "1-gram entropy": (
            "n-gram entropy ↑",
            ("4.57 ± 0.02", "4.43 ± 0.02", "4.57 ± 0.01", "4.59 ± 0.01", "4.60 ± 0.01"),
        ),
        "diversity": ("diversity ↑", ("0.56 ± 0.02", "0.35 ± 0.03", "0.57 ± 0.01", "0.56 ± 0.01", "0.56 ± 0.01")),
        "perplexity": ("perplexity ↓", ("6.99 ± 0.02", "–", "7.10 ± 0.02", "7.02 ± 0.02", "7.13 ± 0.03")),
        "unknown words": ("unknown words ↓", ()),
    }
)
HUMAN = "human text"
#: Rows that are shown as text, and how much of a prompt.
SHOWN, END_OF_PROMPT = 5, 200
#: The narrowest range of an axis: smaller differences are not worth a look.
MIN_WIDTH = 0.02
COLOURS: Mapping[str, str] = {
    "mle": "#6b7783",
    "unlikelihood": "#b4656f",
    "bc": "#e0a458",
    "sequencematch": "#2f6f8f",
    "bc_own": "#a8641c",
    "sequencematch_own": "#1c3f5c",
    HUMAN: "#222222",
}


@dataclass(frozen=True)
class Point:
    """A measure of one draw of one model."""

    seed: int
    draw: int
    measure: Measure


def points(cells: Iterable[Mapping[str, Any]], method: str, decoding: str, name: str) -> list[Point]:
    """A measure of all draws of a method in one way to decode it; none where it was not measured."""
    return [
        Point(cell["cell"]["seed"], draw["draw"], Measure.read(measure))
        for cell in cells
        for draw in cell["draws"]
        for measure in draw["measures"]
        if (cell["cell"]["method"], draw["decoding"], measure["name"]) == (method, decoding, name)
    ]


def human(cells: Iterable[Mapping[str, Any]], name: str) -> list[Measure]:
    """A measure of the human continuations, one per draw: all models have the same prompts."""
    draws = [draw for draw in next(iter(cells))["draws"] if draw["decoding"] == SAMPLED]
    return [Measure.read(measure) for draw in draws for measure in draw["human"] if measure["name"] == name]


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Two tables in Markdown: paper | ours | interval of every measure; and how models delete."""
    lines = table_lines(
        [
            *("measure", "trained and decoded by", "paper", "ours", "95 % interval"),
            *("less MLE's [draws]", "between draws", "between seeds"),
        ],
        (row for name in MEASURES for row in _compared(cells, name)),
    )
    headings = [
        "trained and decoded by",
        "<bkspc>, % of actions",
        "tokens written",
        "deleted at once, %: a random token",
    ]
    headings += ["the right token", "seeds", "draws"]
    return "\n".join([*lines, "", *table_lines(list(map(escaped, headings)), _deleting(cells))]) + "\n"


def _compared(cells: Sequence[Mapping[str, Any]], name: str) -> list[list[str]]:
    heading, papers = MEASURES[name]
    baseline = {(point.seed, point.draw): point.measure.value for point in points(cells, "mle", SAMPLED, name)}
    rows = []
    for place, way in enumerate(WAYS):
        found = points(cells, way.method, way.decoding, name)
        paper = papers[place] if place < len(papers) else "–"
        if found or paper != "–":
            is_baseline = (way.method, way.decoding) == ("mle", SAMPLED)
            rows.append([heading, way.name, paper, *_ours(found, {} if is_baseline else baseline)])
    references = human(cells, name)
    if references:
        rows.append([heading, HUMAN, "–", *_ours([Point(0, draw, m) for draw, m in enumerate(references)], {})])
    return rows


def _ours(found: Sequence[Point], baseline: Mapping[tuple[int, int], float]) -> list[str]:
    """Mean; the lowest and the highest end of the draws' intervals; the mean difference to the baseline [least, most]; half the
    range between draws, and between seeds.

    `baseline` is keyed by seed and draw: draws of the same number have the same prompts, human texts and random numbers.
    """
    if not found:
        return ["–"] * 5
    less = [p.measure.value - baseline[p.seed, p.draw] for p in found if (p.seed, p.draw) in baseline]
    by_seed: dict[int, list[float]] = {}
    for point in found:
        by_seed.setdefault(point.seed, []).append(point.measure.value)
    means = [mean(values) for values in by_seed.values()]
    between_draws = mean((max(values) - min(values)) / 2 for values in by_seed.values())
    low, high = min(point.measure.low for point in found), max(point.measure.high for point in found)
    return [
        f"{mean(means):.3f}",
        f"{low:.3f} – {high:.3f}",
        f"{mean(less):+.3f} [{min(less):+.3f}, {max(less):+.3f}]" if less else "–",
        f"± {between_draws:.3f}" if max(map(len, by_seed.values())) > 1 else "–",
        f"± {(max(means) - min(means)) / 2:.3f}" if len(means) > 1 else "–",
    ]


def _deleting(cells: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for way in WAYS:
        lengths = points(cells, way.method, way.decoding, "length")
        rate = points(cells, way.method, way.decoding, "backspace rate")
        wrong, right = (
            points(cells, way.method, decoding, "deletes first") if way.decoding == SAMPLED else []
            for decoding in (MISTAKEN, way.decoding)
        )
        shares = [percent(point.measure.value for point in found) for found in (rate, wrong, right)]
        length = f"{mean(point.measure.value for point in lengths):.1f}" if lengths else "–"
        seeds, draws = ({getattr(point, name) for point in lengths} for name in ("seed", "draw"))
        rows.append([way.name, shares[0], length, *shares[1:], str(len(seeds)), str(len(draws))])
    return rows


def draw(cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel per measure: a point per draw with its interval, a bar at their mean, a line for human text."""

    def paint(panels: Any) -> None:
        places = {way: len(WAYS) - place for place, way in enumerate(WAYS)}
        for axes, (name, (heading, _)) in zip(panels[0], MEASURES.items(), strict=True):
            references = human(cells, name)
            shown = [m for way in WAYS for m in _marked(axes, cells, way, name, places[way])] + references
            if references:
                axes.axvline(mean(m.value for m in references), color=COLOURS[HUMAN], ls="--", lw=1)
            if shown:
                near = _near(shown)
                low, high = min(m.low for m in near), max(m.high for m in near)
                for way in WAYS:
                    values = [point.measure.value for point in points(cells, way.method, way.decoding, name)]
                    if values and mean(values) < low:
                        axes.annotate(f"← {mean(values):.2f}", (0.02, places[way]), xycoords=("axes fraction", "data"))
                room = max(MIN_WIDTH - (high - low), 0.1 * (high - low)) / 2
                axes.set_xlim(low - room, high + room)
            else:
                axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#888888")
            axes.set(xlabel=heading, yticks=list(places.values()), ylim=(0.4, len(WAYS) + 0.6))
            axes.locator_params(axis="x", nbins=4)
            axes.set_yticklabels([way.label for way in WAYS])
        first = panels[0][0]
        first.errorbar(
            [], [], xerr=[], fmt="o", color="#888888", mfc="white", ms=5, lw=1, label="one draw, 95 % interval"
        )
        first.plot([], [], "|", color="#888888", ms=16, mew=2, label="mean")
        first.plot([], [], "--", color=COLOURS[HUMAN], lw=1, label=HUMAN)

    figure(path, len(MEASURES), 1, paint, size=(2.9, 0.4 * len(WAYS)))


def _near(measures: Sequence[Measure]) -> list[Measure]:
    """The measures without the lowest few, a quarter at most, if they lie below the others by more than three times their range."""
    ordered = sorted(measures, key=lambda m: m.value)
    for place, (below, above) in enumerate(itertools.pairwise(ordered[: len(ordered) // 4 + 1]), 1):
        if above.value - below.value > 3 * (ordered[-1].value - above.value) > 0:
            return ordered[place:]
    return ordered


def _marked(axes: Any, cells: Sequence[Mapping[str, Any]], way: Way, name: str, place: int) -> list[Measure]:
    """Mark the draws of one way, one above the other, and their mean; returns what was marked."""
    found = [point.measure for point in points(cells, way.method, way.decoding, name)]
    for number, measure in enumerate(found):
        height = place + 0.5 * ((number + 0.5) / len(found) - 0.5)
        bar = [[measure.value - measure.low], [measure.high - measure.value]]
        axes.errorbar([measure.value], [height], xerr=bar, fmt="o", color=COLOURS[way.method], mfc="white", ms=5, lw=1)
    if found:
        axes.plot([mean(m.value for m in found)], [place], "|", color=COLOURS[way.method], ms=16, mew=2, zorder=1)
    return found


def rows(found: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> str:
    """The first rows of every way to write, with their deletions, in Markdown; by method and decoding, none picked."""
    sampled = {(way.method, way.decoding): way.name for way in WAYS}
    mistaken = {(way.method, MISTAKEN): way.name for way in WAYS if way.decoding == SAMPLED}
    lines = [
        "# The first rows",
        "",
        "Deleted text is ~~struck~~; ↵ is a new line. Models of seed 0, draw 0. No row was picked.",
    ]
    lines += ["", "## After the prompt", "", *_blocks(found, sampled)]
    lines += ["", "## After a prompt whose last token was replaced by a random one", "", *_blocks(found, mistaken)]
    return "\n".join(lines) + "\n"


def _blocks(
    found: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], ways: Mapping[tuple[str, str], str]
) -> list[str]:
    lines: list[str] = []
    present = {key: found[key] for key in ways if key in found}
    for number in range(min([SHOWN, *map(len, present.values())])):
        first = next(iter(present.values()))[number]
        given = first.get("given", first["prompt"])
        lines += [f"**{number + 1}.** {'…' if len(given) > END_OF_PROMPT else ''}{escaped(given[-END_OF_PROMPT:])}", ""]
        for key, of in present.items():
            row = of[number]
            pieces = [Piece(*piece) for piece in row.get("written", ())]
            text = as_markdown(pieces) if pieces else escaped(row["completion"])
            lines += [f"{ways[key]}:", "", quoted(text), ""]
        lines += ["In the data:", "", quoted(escaped(first["human"])), ""]
    return lines[:-1]
