"""The experiment `text`: how near to human text do MLE, unlikelihood, BC and SequenceMatch write?   (§6.2, Table 2; App. I)"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.data.spelling import check_choice
from sequencematch.experiments import networks
from sequencematch.experiments.text import report
from sequencematch.experiments.text.cells import BUDGETS, Budget, Cell, cells
from sequencematch.experiments.text.continuations import path_of
from sequencematch.experiments.text.likeness import encode, find_encoder, missing_package, score, unencoded, unscored
from sequencematch.experiments.text.passages import prepare
from sequencematch.experiments.text.training import run_cell
from sequencematch.metrics import Encoder

RESULTS, FIGURE, TABLE, ROWS = "results.json", "text.png", "table.md", "rows.md"


def run(
    folder: Path,
    command: str,
    *,
    preset: str = "cpu",
    jobs: int = 1,
    data: Path | None = None,
    model: str | None = None,
) -> None:
    """Fine-tune the models of a preset, `jobs` at a time, let them write, score what they wrote, and collect it.

    Texts are encoded where the encoder can be had, and scored where mauve-text is installed; what is missing is left open. The
    same command in a copy of the folder, on a machine that has it, adds it.
    """
    check_choice("--preset", preset, BUDGETS)
    if data is None and preset != "cpu":
        raise ValueError(
            f"`--data` must be given with --preset {preset}: a file of documents, such as rows with `text` in a .jsonl file. "
            f"Got none. Only the preset cpu has text of its own, Python's manual."
        )
    budget = BUDGETS[preset] if model is None else replace(BUDGETS[preset], model=model)
    models = cells(budget)
    encoder = find_encoder(budget.encoder) if unencoded(models, budget, folder) else None
    lacking = missing_package() if unscored(models, budget, folder) else None
    if isinstance(encoder, str) or lacking:
        reasons = " ".join(reason for reason in (encoder, lacking) if isinstance(reason, str))
        tqdm.write(
            f"MAUVE is left open. {reasons} Then run the same command again, here or in a copy of the folder: what is there "
            f"is kept.",
            file=sys.stderr,
        )
    source = prepare(folder, data, budget)
    networks.side_by_side(partial(run_cell, budget=budget, folder=folder), models, jobs)
    if isinstance(encoder, Encoder):
        encode(models, budget, folder, encoder)
    if not lacking:
        score(models, budget, folder)
    found = {
        "command": command,
        "data": source,
        "cells": [_collected(cell, budget, folder) for cell in models],
    }
    write_files(folder, {RESULTS: json_text(found), ROWS: _rows(models, budget, folder)})


def _collected(cell: Cell, budget: Budget, folder: Path) -> dict[str, Any]:
    """A model's result, its learning curve left out, with all its draws, their texts left out."""
    draws = []
    for which in cell.decodings(budget):
        draw = json.loads(path_of(cell, *which, folder).read_text())
        likeness = path_of(cell, *which, folder, "mauve")
        found = json.loads(likeness.read_text())["measure"] if likeness.exists() else None
        draw["measures"] += [found] if found else []
        draws.append({name: value for name, value in draw.items() if name not in ("cell", "budget", "rows")})
    return {**networks.without_curves(folder / "cells" / f"{cell.name}.json"), "draws": draws}


def _rows(models: Sequence[Cell], budget: Budget, folder: Path) -> str:
    """The first rows of the models of seed 0."""
    first = [cell for cell in models if cell.seed == 0]
    found = {
        (cell.method, decoding): json.loads(path_of(cell, decoding, 0, folder).read_text())["rows"]
        for cell in first
        for decoding, draw in cell.decodings(budget)
        if draw == 0
    }
    return report.rows(found)


def draw(folder: Path) -> None:
    """The figure and the table, from the results alone."""
    found = json.loads((folder / RESULTS).read_text())
    write_files(folder, {TABLE: report.table(found["cells"])})
    report.draw(found["cells"], folder / FIGURE)
