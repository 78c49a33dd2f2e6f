"""Networks trained from scratch on path-star graphs."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import set_seed

from sequencematch.experiments import networks
from sequencematch.experiments.networks import Budget
from sequencematch.experiments.path_star import rows
from sequencematch.experiments.path_star.cells import BACK, METHODS, TO_THE_GOAL, Cell
from sequencematch.experiments.path_star.measures import ROOM, measure
from sequencematch.experiments.stability import WatchedTrainer
from sequencematch.policy import Policy
from sequencematch.tasks.path_star import ANSWER, EDGE_END, QUESTION, PathStar
from sequencematch.tasks.vocabulary import word_tokenizer


class Rows(Dataset[Mapping[str, Any]]):
    """Training rows as token ids, kept as arrays: all graphs of a task have the same number of tokens."""

    def __init__(self, ids: np.ndarray, nodes: np.ndarray, completion: int, *, noise_ends: bool) -> None:
        """`ids` [row, token]: prompt and completion, of which the last `completion` tokens; `nodes` [row, node].

        With `noise_ends` half of all bursts of noise end in the goal.
        """
        self.ids, self.nodes, self.noise_ends = ids, nodes, noise_ends
        self.mask = [0] * (ids.shape[1] - completion) + [1] * completion

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.ids)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """A row as the trainer reads it."""
        ids = self.ids[row].tolist()
        found = {"input_ids": ids, "completion_mask": self.mask, "noise_tokens": self.nodes[row].tolist()}
        return found | ({"noise_ends": ids[-1:]} if self.noise_ends else {})


def load(cell: Cell, budget: Budget, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and nodes of all training rows, [row, token] and [row, node]; drawn once for all cells with these graphs."""
    count = networks.all_rows(budget)
    path = folder / "data" / f"d{cell.arms}_l{cell.length}_{count}.npz"
    stored = networks.arrays(path, lambda: _drawn(replace(cell.task, train_size=count)))
    return stored["ids"], stored["nodes"]


def _drawn(task: PathStar) -> dict[str, np.ndarray]:
    """The rows of `task.train()` as its tokenizer reads them, without going through text."""
    tokenizer = word_tokenizer(task.words())
    name = np.array(tokenizer.convert_tokens_to_ids([str(n) for n in range(task.names)]), dtype=np.uint8)
    edge_end, question, answer = tokenizer.convert_tokens_to_ids([EDGE_END, QUESTION, ANSWER])
    edges, paths = task.train_arrays()

    def word(token: int) -> np.ndarray:
        return np.full((len(edges), 1), token, dtype=np.uint8)

    listed = np.full((*edges.shape[:2], 3), edge_end, dtype=np.uint8)
    listed[..., :2] = name[edges]
    listed[:, -1, 2] = question
    ends = name[paths[:, [0, -1]]]
    parts = [word(tokenizer.bos_token_id), listed.reshape(len(edges), -1), ends, word(answer), name[paths[:, 1:]]]
    nodes = np.sort(np.concatenate([paths[:, :1], edges[..., 1]], 1), 1)
    return {"ids": np.concatenate(parts, 1), "nodes": name[nodes]}


def run_cell(cell: Cell, budget: Budget, folder: Path, **changes: Any) -> dict[str, Any]:
    """Train a network and measure it; `changes` are settings of the trainer. Returns, and writes, its result."""
    return networks.once(folder / "cells" / cell.file, cell, budget, lambda: _run(cell, budget, folder, **changes))


def _run(cell: Cell, budget: Budget, folder: Path, **changes: Any) -> dict[str, Any]:
    task, method, began = cell.task, METHODS[cell.method], time.perf_counter()
    tokenizer = word_tokenizer([*task.words(), BACK])
    steps, part = networks.own_steps(cell.method, method, budget), networks.own_rows(cell.method, method, budget)
    ids, nodes = (array[part] for array in load(cell, budget, folder))
    back = tokenizer.convert_tokens_to_ids(BACK)
    set_seed(cell.seed)
    model: Any = networks.new_model(budget, tokenizer)
    if cell.start is not None:
        run_cell(cell.start, budget, folder, **changes)
        model = Policy.from_pretrained(_saved(cell.start, folder)).base
    data: dict[str, Callable[[], Dataset[Mapping[str, Any]]]] = {
        "answers": lambda: Rows(ids, nodes, cell.length, noise_ends=False),
        TO_THE_GOAL: lambda: Rows(ids, nodes, cell.length, noise_ends=True),
        "reversed": lambda: rows.ReversedRows(ids, cell.length),
        "traces": lambda: rows.TraceRows(ids, cell.length, back),
    }
    curves: dict[str, Any] = {"log": []}
    if method.rows in data:
        with tempfile.TemporaryDirectory() as scratch:
            # Room for a token behind a dead end and its deletion: a rollout that is cut teaches nothing about ends.
            args = networks.config(scratch, method, budget, cell.seed, steps=steps, room=cell.length + ROOM, **changes)
            trainer = WatchedTrainer(model, args, train_dataset=data[method.rows](), processing_class=tokenizer)
            trainer.train()
        policy = trainer.model.eval()
        curves = {"log": trainer.state.log_history, "gradient_norms": trainer.gradient_norms}
    else:
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        sizes: dict[str, Any] = {"steps": steps, "batch": budget.batch_size, "lr": budget.learning_rate}
        rows.teacherless(model, ids, cell.length, dummy=back, eos=tokenizer.eos_token_id, **sizes)
        policy = Policy(model.eval(), tokenizer)
    seconds = time.perf_counter() - began
    found = measure(policy, cell, budget)
    policy.save_pretrained(_saved(cell, folder))
    return {"train_seconds": seconds, **curves, **found}


def _saved(cell: Cell, folder: Path) -> Path:
    return folder / "policies" / Path(cell.file).stem


def run_cells(cells: Sequence[Cell], budget: Budget, folder: Path, jobs: int) -> None:
    """Every cell that has no result yet, `jobs` at a time, after the networks that they start from."""
    for shape in {(cell.arms, cell.length) for cell in cells}:
        load(Cell("mle", 0, *shape), budget, folder)
    networks.side_by_side(partial(run_cell, budget=budget, folder=folder), cells, jobs)
