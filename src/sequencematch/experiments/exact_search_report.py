"""The exact path-star table as Markdown and as a figure, from the recorded outcomes alone."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sequencematch.data.markdown import table_lines
from sequencematch.experiments.divergences_report import TITLES
from sequencematch.extras import require


def markdown(outcomes: Sequence[Mapping[str, Any]], within: int) -> str:
    """A table of outcomes of `results.json`; those that differ only in their start share a row. `within` limits actions."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for outcome in outcomes:
        rows.setdefault(_name(outcome), []).append(outcome)
    headings = ("", "starts", "p(`<eos>` \\| dead end)", "right", f"right within {within}", "actions")
    lines = [
        (
            name,
            str(len(alike)),
            _range([o["dead_end_ends"] for o in alike], "{:.2g}"),
            _range([100 * o["accuracy"] for o in alike], "{:.1f} %"),
            _range([100 * o["within"] for o in alike], "{:.1f} %"),
            _range([o["actions"] for o in alike], "{:,.0f}"),
            _range([(o["law"] or {}).get("value_right_end") for o in alike], "{:.1f}"),
            _range([(o["law"] or {}).get("value_wrong_end") for o in alike], "{:.1f}"),
        )
        for name, alike in rows.items()
    ]
    return "\n".join(table_lines((*headings, "V, right end", "V, wrong end"), lines)) + "\n"


def stars_markdown(outcomes: Sequence[Mapping[str, Any]], usual: Mapping[str, Any]) -> str:
    """A table of stars that differ from the `usual` one, one a row: how often each objective is right, and its actions."""
    rows: dict[str, dict[str, str]] = {}
    for outcome in outcomes:
        changes = {key: value for key, value in outcome["star"].items() if value != usual[key]}
        change = ", ".join(key if value is True else f"{key} {value}" for key, value in changes.items())
        cell = f"{100 * outcome['accuracy']:.1f} %, {outcome['actions']:,.0f}"
        rows.setdefault(change.replace("_", " "), {})[_name(outcome)] = cell
    columns = next(iter(rows.values()))
    return "\n".join(table_lines(("", *columns), [(change, *cells.values()) for change, cells in rows.items()])) + "\n"


def _name(outcome: Mapping[str, Any]) -> str:
    if outcome["alpha"] is None:
        return "BC"
    return f"{TITLES[outcome['objective']]}, γ {outcome['gamma']:g}, α {outcome['alpha']:g}"


def _range(numbers: Sequence[float | None], form: str) -> str:
    known = sorted(number for number in numbers if number is not None)
    if not known:
        return "–"
    low, high = form.format(known[0]), form.format(known[-1])
    return low if low == high else f"{low} to {high}"


def draw(record: Mapping[str, Any], path: Path, within: int) -> None:
    """How often right, without limit and `within` some actions, and p(`<eos>` | dead end), against the horizon 1/(1 − γ)."""
    require("matplotlib", "plot", "The figure")
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    sweep, cloning = record["sweep"], record["table"][0]
    alphas = sorted({outcome["alpha"] for outcome in sweep})
    colours = mpl.colormaps["viridis"].resampled(len(alphas) + 1)
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), layout="constrained")
    panels: list[tuple[Any, Callable[[Mapping[str, Any]], float]]] = [
        (axes[0], lambda outcome: 100 * outcome["accuracy"]),
        (axes[1], lambda outcome: 100 * outcome["within"]),
        (axes[2], lambda outcome: outcome["dead_end_ends"]),
    ]
    for axis, height in panels:
        for place, alpha in enumerate(alphas):
            line = sorted((o for o in sweep if o["alpha"] == alpha), key=lambda o: o["gamma"])
            x = [1 / (1 - o["gamma"]) for o in line]
            axis.plot(x, [height(o) for o in line], "o-", ms=3.5, lw=1.5, color=colours(place), label=f"α = {alpha:g}")
        axis.axhline(height(cloning), color="#b3543c", ls="--", lw=1.2, label="cloning, from zeros")
        axis.set(xscale="log", xlabel="horizon 1/(1 − γ)")
        axis.set_xticks([2, 10, 100, 500], ["2", "10", "100", "500"])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylim=(0, 104), ylabel="percent of graphs", title="Right, however many actions")
    axes[1].set(ylim=(0, 104), ylabel="percent of graphs", title=f"Right within {within} actions")
    axes[2].set(yscale="log", ylim=(1e-10, 1), ylabel="probability", title="<eos> at a dead end")
    figure.legend(
        *axes[0].get_legend_handles_labels(), frameon=False, ncols=len(alphas) + 1, loc="outside lower center"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
