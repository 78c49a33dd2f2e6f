"""Networks trained from scratch on path-star graphs. A cell writes one JSON file and is not run again."""

import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from sequencematch.data.files import write_files
from sequencematch.experiments.path_star import peers
from sequencematch.experiments.path_star.cells import BACK, METHODS, Budget, Cell
from sequencematch.experiments.path_star.measures import measure
from sequencematch.policy import Policy
from sequencematch.tasks.vocabulary import word_tokenizer
from sequencematch.training import SequenceMatchConfig, SequenceMatchTrainer


class Rows(Dataset[Mapping[str, Any]]):
    """Training rows as token ids, kept as arrays: all graphs of a task have the same number of tokens."""

    def __init__(self, ids: np.ndarray, nodes: np.ndarray, completion: int, *, noise_ends: bool) -> None:
        """`ids` [row, token]: prompt and completion, of which the last `completion` tokens; `nodes` [row, node]."""
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
    task, count = cell.task, budget.steps * budget.batch_size
    path = folder / "data" / f"d{cell.arms}_l{cell.length}_{count}.npz"
    if not path.exists():
        tokenizer = word_tokenizer(task.words())
        rows = replace(task, train_size=count).train()
        texts = (row["prompt"] + row["completion"] for row in rows)
        ids = [tokenizer(list(part))["input_ids"] for part in _batched(texts, 10_000)]
        nodes = [tokenizer.convert_tokens_to_ids(row["noise_tokens"]) for row in rows]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(partial, ids=np.concatenate(ids).astype(np.uint8), nodes=np.array(nodes, dtype=np.uint8))
        partial.rename(path)
    stored = np.load(path)
    return stored["ids"], stored["nodes"]


def _batched(texts: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    texts = iter(texts)
    while part := tuple(itertools.islice(texts, size)):
        yield part


def new_model(budget: Budget, tokenizer: Any) -> LlamaForCausalLM:
    """A Llama with random weights."""
    heads = max(1, budget.width // 64)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=budget.width,
            intermediate_size=4 * budget.width,
            num_hidden_layers=budget.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=256,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def config(cell: Cell, budget: Budget, folder: str, **changes: Any) -> SequenceMatchConfig:
    """The same settings for every method but its own."""
    own = dict(METHODS[cell.method].settings)
    if own["objective"] == "sequencematch":
        own |= {"bc_steps": budget.steps // 4, "bc_anneal_steps": budget.steps // 4}
    if own["objective"] == "sequencematch" or "correction_rate" in own:
        own |= {
            "generation_batch_size": 2 * budget.batch_size,
            "replay_size": 16 * budget.batch_size,
            "max_completion_length": cell.length,
            "protect_prompt": True,
        }
    settings: dict[str, Any] = {
        "seed": cell.seed,
        "max_steps": budget.steps,
        "per_device_train_batch_size": budget.batch_size,
        "learning_rate": budget.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": budget.steps // 20,
        "adam_beta2": 0.98,
        "max_length": 160,
        "logging_steps": max(budget.steps // 20, 1),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "tf32": torch.cuda.is_available() or None,
    }
    return SequenceMatchConfig(folder, **{**settings, **own, **changes})


def run_cell(cell: Cell, budget: Budget, folder: Path, **changes: Any) -> dict[str, Any]:
    """Train a network and measure it; `changes` are settings of the trainer. Returns, and writes, its result."""
    path = folder / "cells" / cell.file
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text())
        if known["budget"] != asdict(budget):
            raise ValueError(
                f"{path} was trained with another budget: {Budget(**known['budget'])}. Choose another folder."
            )
        return known
    task, method, began = cell.task, METHODS[cell.method], time.perf_counter()
    tokenizer = word_tokenizer([*task.words(), BACK])
    ids, nodes = load(cell, budget, folder)
    set_seed(cell.seed)
    model = new_model(budget, tokenizer)
    rows: dict[str, Callable[[], Dataset[Mapping[str, Any]]]] = {
        "paths": lambda: Rows(ids, nodes, cell.length, noise_ends=method.noise_ends),
        "reversed": lambda: peers.ReversedRows(ids, cell.length),
        "traces": lambda: peers.TraceRows(ids, cell.length, tokenizer.convert_tokens_to_ids(BACK)),
    }
    log: list[dict[str, Any]] = []
    if method.rows in rows:
        with tempfile.TemporaryDirectory() as scratch:
            args = config(cell, budget, scratch, **changes)
            trainer = SequenceMatchTrainer(model, args, train_dataset=rows[method.rows](), processing_class=tokenizer)
            trainer.train()
        policy, log = trainer.model.eval(), trainer.state.log_history
    else:
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        marks = {"dummy": tokenizer.convert_tokens_to_ids(BACK), "eos": tokenizer.eos_token_id}
        sizes: dict[str, Any] = {"steps": budget.steps, "batch": budget.batch_size, "lr": budget.learning_rate}
        peers.teacherless(model, ids, cell.length, **marks, **sizes)
        policy = Policy(model.eval(), tokenizer)
    found = {
        "cell": asdict(cell),
        "budget": asdict(budget),
        "train_seconds": time.perf_counter() - began,
        "log": log,
        **measure(policy, cell, budget),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seconds": time.perf_counter() - began,
    }
    policy.save_pretrained(folder / "policies" / path.stem)
    write_files(path.parent, {path.name: json.dumps(found, indent=1, ensure_ascii=False) + "\n"})
    return found


def run_cells(cells: Sequence[Cell], budget: Budget, folder: Path, jobs: int) -> list[dict[str, Any]]:
    """Every cell that has no result yet, `jobs` at a time in processes of their own. Returns all results, in order."""
    for cell in {(cell.arms, cell.length): cell for cell in cells}.values():
        load(cell, budget, folder)
    if jobs == 1:
        return [run_cell(cell, budget, folder) for cell in tqdm(cells, unit="network")]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        waiting = [pool.submit(run_cell, cell, budget, folder) for cell in cells]
        for done in tqdm(as_completed(waiting), total=len(cells), unit="network"):
            done.result()
    return [run_cell(cell, budget, folder) for cell in cells]
