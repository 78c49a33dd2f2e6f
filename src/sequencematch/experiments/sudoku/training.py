"""Networks trained from scratch on Sudoku."""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import set_seed

from sequencematch.experiments import networks
from sequencematch.experiments.networks import Budget
from sequencematch.experiments.sudoku.cells import METHODS, TRACE_CONTEXT, Cell
from sequencematch.experiments.sudoku.measures import Questions, measure
from sequencematch.experiments.sudoku.rows import PROMPT, Rows, TraceRows, new_tokenizer, rearranged
from sequencematch.policy import Policy
from sequencematch.training import SequenceMatchTrainer


def load(cell: Cell, budget: Budget, folder: Path) -> tuple[np.ndarray, Questions]:
    """Token ids of all training rows, [row, token], and the puzzles held out; made once for all cells with these puzzles."""
    count = networks.all_rows(budget)
    path = folder / "data" / f"h{cell.holes}_{count}_{budget.test_rows}.npz"
    stored = networks.arrays(path, partial(_made, cell, count, budget.test_rows))
    return stored["train"], Questions(stored["test"], stored["tune"])


def _made(cell: Cell, count: int, test_rows: int) -> dict[str, np.ndarray]:
    tokenizer, task = new_tokenizer(), cell.task(count, test_rows)
    train, held_out = (
        np.array(tokenizer([row["prompt"] + row["completion"] for row in rows])["input_ids"], dtype=np.uint8)
        for rows in (task.train(), task.test())
    )
    every = rearranged(train, count, np.random.default_rng(task.seed))
    return {"train": every, "test": held_out[:test_rows], "tune": held_out[test_rows:]}


def run_cell(cell: Cell, budget: Budget, folder: Path, **changes: Any) -> dict[str, Any]:
    """Train a network and measure it; `changes` are settings of the trainer. Returns, and writes, its result."""
    return networks.once(folder / "cells" / cell.file, cell, budget, lambda: _run(cell, budget, folder, **changes))


def _run(cell: Cell, budget: Budget, folder: Path, **changes: Any) -> dict[str, Any]:
    ids, questions = load(cell, budget, folder)
    done = networks.once(
        folder / "training" / cell.file, cell, budget, lambda: _trained(cell, budget, folder, ids, **changes)
    )
    found = measure(finished(cell, folder), cell.method, questions)
    return {"train_seconds": done["seconds"], "log": done["log"], **found}


def _trained(cell: Cell, budget: Budget, folder: Path, ids: np.ndarray, **changes: Any) -> dict[str, Any]:
    """Train a network and save it; returns its learning curve."""
    method, tokenizer = METHODS[cell.method], new_tokenizer()
    ids, steps = ids[networks.own_rows(cell.method, method, budget)], networks.own_steps(cell.method, method, budget)
    set_seed(cell.seed)
    model: Any = networks.new_model(budget, tokenizer, positions=TRACE_CONTEXT)
    if cell.start is not None:
        run_cell(cell.start, budget, folder, **changes)
        model = finished(cell.start, folder).base
    is_traced = method.rows == "traces"
    settings = {
        "max_length": TRACE_CONTEXT if is_traced else PROMPT + 4 * cell.holes,
        # Writing out the searches of a batch takes as long as a step on a GPU.
        "dataloader_num_workers": 1 if is_traced and torch.cuda.is_available() else 0,
        **changes,
    }
    with tempfile.TemporaryDirectory() as scratch:
        # Room for a digit too many and its deletion: a rollout that is cut teaches nothing about ends.
        args = networks.config(scratch, method, budget, cell.seed, steps=steps, room=cell.holes + 2, **settings)
        data = TraceRows(ids) if is_traced else Rows(ids, has_noise=method.deletes)
        trainer = SequenceMatchTrainer(model, args, train_dataset=data, processing_class=tokenizer)
        trainer.train()
    trainer.model.save_pretrained(_saved(cell, folder))
    return {"log": trainer.state.log_history}


def _saved(cell: Cell, folder: Path) -> Path:
    return folder / "policies" / Path(cell.file).stem


def finished(cell: Cell, folder: Path) -> Policy:
    """A trained network."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Policy.from_pretrained(_saved(cell, folder), device=device).eval()


def run_cells(cells: Sequence[Cell], budget: Budget, folder: Path, jobs: int) -> None:
    """Every cell that has no result yet, `jobs` at a time."""
    for cell in {cell.holes: cell for cell in cells}.values():
        load(cell, budget, folder)
    networks.side_by_side(partial(run_cell, budget=budget, folder=folder), cells, jobs)
