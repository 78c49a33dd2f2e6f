"""The experiment `mistakes`: wrong digits are appended to a question; who deletes them, and answers right?   (§6.1, Table 1)

The paper shows four such rows of one model. Here they are numbers, for one to three wrong digits: drawn at random, or those that
the MLE model of seed 0 finds likeliest.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.data.markdown import table_lines
from sequencematch.evaluation import evaluate
from sequencematch.evaluation.report import report as as_markdown
from sequencematch.experiments import networks
from sequencematch.experiments.fine_tuning import report
from sequencematch.experiments.fine_tuning.cells import BUDGETS, KEPT, METHODS, Budget, Cell, chosen
from sequencematch.experiments.fine_tuning.questions import Questions, arithmetic
from sequencematch.experiments.fine_tuning.training import run_cells, saved
from sequencematch.experiments.reporting import figure, percent
from sequencematch.policy import Policy

#: Names of their own: the folder may hold the results of `arithmetic`, whose models are used again.
RESULTS, FIGURE, TABLE = "mistakes.json", "mistakes.png", "mistakes.md"
MODULE = "add_or_sub_in_base"
#: Wrong digits that are given.
COUNTS = (1, 2, 3)
#: Kinds of wrong digits: name → what follows the name of a measure.
KINDS: Mapping[str, str] = {"random": "", "plausible": ", plausible"}


def cells(budget: Budget) -> list[Cell]:
    """MLE, and BC and SequenceMatch with digits as noise, for every seed."""
    noise = {"mle": ("none", 0.0)}
    return [Cell(MODULE, method, *noise.get(method, KEPT), seed) for seed in range(budget.seeds) for method in METHODS]


def run(folder: Path, command: str, *, preset: str = "cpu", jobs: int = 1, model: str | None = None) -> None:
    """Fine-tune the models of a preset, `jobs` at a time, give each of them mistakes, and collect what they did."""
    found = on_each_model(_given, folder, "mistakes", preset, jobs, model)
    write_files(folder, {RESULTS: json_text({"command": command, "models": found})})


#: A model, its questions, and the folder it is saved in → a result for JSON.
Measure = Callable[[Cell, Questions, Path], Mapping[str, Any]]


def on_each_model(
    measure: Measure, folder: Path, name: str, preset: str, jobs: int, model: str | None
) -> list[dict[str, Any]]:
    """Fine-tune the models of a preset, `jobs` at a time, and measure each of them.

    A model has one file in the subfolder `name`, and is not measured again while that file exists.
    """
    budget = chosen(BUDGETS, preset, model)
    models, questions = cells(budget), arithmetic(MODULE, preset, budget)
    run_cells(models, questions, budget, folder, jobs)
    files = {cell: folder / name / cell.file for cell in models}
    networks.side_by_side(partial(_once, measure, files, questions, budget, folder), models, jobs)
    return [json.loads(path.read_text()) for path in files.values()]


def _once(
    measure: Measure, files: Mapping[Cell, Path], questions: Questions, budget: Budget, folder: Path, cell: Cell
) -> dict[str, Any]:
    return networks.once(files[cell], cell, budget.of(cell.method), partial(measure, cell, questions, folder))


def _given(cell: Cell, questions: Questions, folder: Path) -> dict[str, Any]:
    """What a fine-tuned model does with wrong digits, greedily: measures by their number. The first rows are kept as text."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = Policy.from_pretrained(saved(cell, folder), device=device).eval()
    scorer = str(saved(Cell(MODULE, "mle"), folder))
    after = {}
    for count in COUNTS:
        record = evaluate(
            policy, questions.task, metrics=("recovery",), mistakes=count, scorer=scorer, batch_size=256, progress=False
        )
        after[count] = [asdict(measure) for measure in record.measures]
        if cell.seed == 0:
            name = f"{cell.method}_{count}.md"
            write_files(folder / "rows", {name: as_markdown(record)})
    trained = json.loads((folder / "cells" / cell.file).read_text())["decodings"]["temperature 1"]
    return {"after": after, "own": [m for m in trained if m["name"] in ("own errors deleted", "right tokens deleted")]}


def _shares(model: Mapping[str, Any], count: int, name: str) -> float:
    return next(float(m["value"]) for m in model["after"][str(count)] if m["name"] == name)


def table(models: Sequence[Mapping[str, Any]]) -> str:
    """Percent that delete first, and percent right in the end, by method and number of wrong digits, in Markdown."""
    rows = []
    for method, name in METHODS.items():
        of = [model for model in models if model["cell"]["method"] == method]
        own = [{m["name"]: m["value"] for m in model["own"] if m["count"]} for model in of]
        for count in COUNTS:
            given = [
                percent(_shares(model, count, f"{measure}{kind}") for model in of)
                for kind in KINDS.values()
                for measure in ("deletes first", "recovers")
            ]
            rest = [percent(m[n] for m in own if n in m) for n in ("own errors deleted", "right tokens deleted")]
            rows.append([name, str(count), *given, *(rest if count == 1 else ("", "")), str(len(of))])
    headings = ["trained by", "wrong digits", "random: deleted at once", "right in the end"]
    headings += [
        "plausible: deleted at once",
        "right in the end",
        "own errors deleted",
        "right tokens deleted",
        "seeds",
    ]
    return "\n".join(table_lines(headings, rows)) + "\n"


def draw(folder: Path) -> None:
    """The figure and the table, from the results alone: right in the end against the number of wrong digits."""
    models = json.loads((folder / RESULTS).read_text())["models"]
    write_files(folder, {TABLE: table(models)})

    def paint(panels: Any) -> None:
        for axes, (kind, suffix) in zip(panels[0], KINDS.items(), strict=True):
            for method, name in METHODS.items():
                of = [model for model in models if model["cell"]["method"] == method]
                shares = [[100 * _shares(model, count, f"recovers{suffix}") for model in of] for count in COUNTS]
                means = [mean(values) for values in shares]
                bars = [
                    [centre - min(values) for centre, values in zip(means, shares, strict=True)],
                    [max(values) - centre for centre, values in zip(means, shares, strict=True)],
                ]
                axes.errorbar(COUNTS, means, bars, fmt="-o", capsize=2, color=report.COLOURS[method], label=name)
            axes.set(title=f"{kind} wrong digits", xlabel="wrong digits given", xticks=COUNTS, ylim=(-3, 103))
        panels[0][0].set(ylabel="right in the end, percent")

    figure(folder / FIGURE, len(KINDS), 1, paint)
