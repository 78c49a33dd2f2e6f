"""Fine-tuned models of a study: trained, measured, and some of them saved."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import set_seed

from sequencematch.evaluation import Record, evaluate
from sequencematch.experiments import networks
from sequencematch.experiments.fine_tuning.cells import Budget, Cell
from sequencematch.experiments.fine_tuning.questions import Questions
from sequencematch.experiments.stability import WatchedTrainer
from sequencematch.experiments.tuning import load_base, tuning_config
from sequencematch.policy import Policy
from sequencematch.training import SequenceMatchConfig

NEVER_DELETE: Mapping[str, Any] = MappingProxyType({"backspace_bias": -math.inf})
FORBIDDEN = "temperature 1, <bkspc> forbidden"
#: Ways to decode: name → options of `evaluate`.
DECODINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "greedy": MappingProxyType({"temperature": 0.0}),
        "temperature 1": MappingProxyType({"temperature": 1.0, "seed": 0}),
        FORBIDDEN: MappingProxyType({"temperature": 1.0, "seed": 0, **NEVER_DELETE}),
    }
)


def config(
    folder: str | Path, cell: Cell, budget: Budget, *, room: int, max_length: int = Questions.max_length
) -> SequenceMatchConfig:
    """The settings of a cell: the same for every method but its own. A rollout writes at most `room` tokens."""
    return tuning_config(
        folder,
        budget,
        seed=cell.seed,
        warmup_steps=budget.steps // 10,
        max_length=max_length,
        max_completion_length=room,
        generation_batch_size=8 * budget.batch_size,
        packing=True,
        **cell.settings(budget),
    )


def run_cell(cell: Cell, questions: Questions, budget: Budget, folder: Path) -> dict[str, Any]:
    """Fine-tune a model and measure it. Returns, and writes, its result."""
    own = budget.of(cell.method)
    return networks.once(folder / "cells" / cell.file, cell, own, partial(_run, cell, questions, own, folder))


def _run(cell: Cell, questions: Questions, budget: Budget, folder: Path) -> dict[str, Any]:
    task = questions.task
    set_seed(cell.seed)
    policy, adapter = load_base(budget.model, adapter=budget.adapter, four_bits=budget.four_bits)
    with tempfile.TemporaryDirectory() as scratch:
        assert task.max_new_tokens is not None
        args = config(scratch, cell, budget, room=task.max_new_tokens, max_length=questions.max_length)
        rows = task.train(policy.tokenizer)
        others = questions.rollout_rows() if questions.rollout_rows else None
        trainer = WatchedTrainer(policy, args, train_dataset=rows, peft_config=adapter, rollout_dataset=others)
        trainer.train()
    policy = trainer.model.eval()
    if cell.is_kept:
        policy.save_pretrained(saved(cell, folder))
    records = {name: measured(policy, questions, how) for name, how in decodings(cell).items()}
    return {
        "log": trainer.state.log_history,
        "gradient_norms": trainer.gradient_norms,
        "settings": {k: v for k, v in args.own_values().items() if v is not None},
        "decodings": {name: [asdict(measure) for measure in record.measures] for name, record in records.items()},
        "signature": records["greedy"].signature,
    }


def decodings(cell: Cell) -> Mapping[str, Mapping[str, Any]]:
    """The ways to decode a model. One trained without `<bkspc>` is a plain language model: its untrained row takes no part."""
    if cell.method != "mle":
        return DECODINGS
    return {name: {**how, **NEVER_DELETE} for name, how in DECODINGS.items() if name != FORBIDDEN}


def measured(policy: Policy, questions: Questions, how: Mapping[str, Any]) -> Record:
    """The metrics of one way to decode."""
    return evaluate(policy, questions.task, metrics=questions.metrics, batch_size=256, progress=False, **how)


def saved(cell: Cell, folder: Path) -> Path:
    """Where a fine-tuned model is kept, if it is."""
    return folder / "policies" / Path(cell.file).stem


def run_cells(cells: Sequence[Cell], questions: Questions, budget: Budget, folder: Path, jobs: int) -> None:
    """Every cell that has no result yet, `jobs` at a time."""
    networks.side_by_side(partial(run_cell, questions=questions, budget=budget, folder=folder), cells, jobs)
