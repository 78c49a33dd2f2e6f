"""Fine-tuned models of the study: trained and saved, then asked for continuations."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from transformers import set_seed

from sequencematch.experiments import networks
from sequencematch.experiments.text.cells import Budget, Cell
from sequencematch.experiments.text.continuations import continue_prompts
from sequencematch.experiments.text.passages import text_task
from sequencematch.experiments.tuning import load_base, tuning_config
from sequencematch.training import SequenceMatchConfig, SequenceMatchTrainer


def config(folder: str | Path, cell: Cell, budget: Budget) -> SequenceMatchConfig:
    """The settings of a model: the same for every method but its own. New rollouts are drawn every 64 steps."""
    return tuning_config(
        folder,
        budget,
        seed=cell.seed,
        warmup_steps=budget.warmup_steps,
        max_length=budget.context,
        max_prompt_length=budget.prompt_length,
        max_completion_length=budget.rollout_length,
        generation_batch_size=8 * budget.batch_size,
        **cell.settings(budget),
    )


def run_cell(cell: Cell, budget: Budget, folder: Path) -> None:
    """Fine-tune a model and let it continue the prompts, each unless done before."""
    networks.once(folder / "cells" / f"{cell.name}.json", cell, budget, partial(_train, cell, budget, folder))
    continue_prompts(cell, budget, folder, saved(cell, folder))


def saved(cell: Cell, folder: Path) -> Path:
    """Where a fine-tuned model is kept."""
    return folder / "policies" / cell.name


def _train(cell: Cell, budget: Budget, folder: Path) -> dict[str, Any]:
    set_seed(cell.seed)
    policy, adapter = load_base(budget.model, adapter=budget.adapter, four_bits=True)
    with tempfile.TemporaryDirectory() as scratch:
        args = config(scratch, cell, budget)
        rows = text_task(folder, budget).train()
        trainer = SequenceMatchTrainer(policy, args, train_dataset=rows, peft_config=adapter)
        trainer.train()
    trainer.model.eval().save_pretrained(saved(cell, folder))
    return {
        "log": trainer.state.log_history,
        "settings": {name: value for name, value in args.own_values().items() if value is not None},
    }
