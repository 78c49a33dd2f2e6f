"""The experiment `overhead`: what SequenceMatch costs beside MLE, in the columns of the paper's two timing tables   (App. F).

A round trains three new models for a few steps, each by `SequenceMatchTrainer` on random tokens: MLE, MLE again as an A/A
control, and SequenceMatch. All times are those that the trainer logs. Rollouts are written to their full length, so that they
cost the same whatever the model has learnt.
"""

import gc
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.data.spelling import check_choice
from sequencematch.experiments import networks
from sequencematch.experiments import overhead_report as report
from sequencematch.experiments.fine_tuning.cells import BUDGETS
from sequencematch.experiments.tuning import load_base
from sequencematch.policy import Policy, Sampling
from sequencematch.training import SequenceMatchConfig, SequenceMatchTrainer
from sequencematch.training.callbacks import ProgressLines, RolloutWarnings
from sequencematch.training.rollouts import InlineRollouts

RESULTS, FIGURE, TABLE = "results.json", "overhead.png", "table.md"
#: What is timed in a round: name → the trainer's objective.
VARIANTS: Mapping[str, str] = MappingProxyType({"MLE": "mle", "MLE again": "mle", "SequenceMatch": "sequencematch"})
#: Steps at the beginning of a run that are not timed, and steps after the second batch of rollouts.
WARM_UP, REST = 3, 4


@dataclass(frozen=True)
class Workload:
    """One of the paper's two tables: a recipe of `training.presets`, and its lengths in tokens.

    Rows have `length` tokens. Rollouts start from `prompt` tokens, from prefixes of random lengths up to that where rows are
    plain text, and write `completion` tokens. `steps_per_sample` is the paper's number of steps per batch of rollouts.
    """

    recipe: str
    length: int
    prompt: int
    completion: int
    steps_per_sample: int
    batch_size: int = 8

    def config(self, folder: str, objective: str, *, checkpointing: bool) -> SequenceMatchConfig:
        """The recipe at these lengths, past cloning: every step of SequenceMatch trains on rollouts. Logs every step.

        A run makes rollouts twice. How many at a time follows from the steps that each of them is used in   (App. E).
        """
        on_gpu, reuse = torch.cuda.is_available(), 8
        lengths = {"max_length": self.length, "max_prompt_length": self.prompt} if self.recipe == "text" else {}
        return SequenceMatchConfig.from_preset(
            self.recipe,
            output_dir=folder,
            objective=objective,
            noise_source="uniform",
            bc_steps=0,
            bc_anneal_steps=0,
            max_steps=self.steps_per_sample + REST,
            warmup_steps=0,
            max_completion_length=self.completion,
            per_device_train_batch_size=self.batch_size,
            replay_reuse=reuse,
            generation_batch_size=self.steps_per_sample * self.batch_size // reuse,
            gradient_checkpointing=checkpointing,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            **lengths,
        )

    def rows(self, count: int, vocab_size: int) -> list[dict[str, list[int]]]:
        """Rows of random tokens, without the first three, which are often special: plain text, or prompts with completions."""
        is_text = self.recipe == "text"
        size = (count, self.length if is_text else self.length - 1)  # after a completion comes <eos>
        tokens = torch.randint(3, vocab_size, size, generator=torch.Generator().manual_seed(0)).tolist()
        mask = [int(place >= self.prompt) for place in range(size[1])]
        return [{"input_ids": row} if is_text else {"input_ids": row, "completion_mask": mask} for row in tokens]


@dataclass(frozen=True)
class Size:
    """A preset: its model in words, and how many rounds are timed."""

    model: str
    rounds: int
    checkpointing: bool = False  # of activations
    needs_gpu: bool = True


SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "cpu": Size("sequencematch/arithmetic-base", 7, needs_gpu=False),
        "gpu": Size("SmolLM2-135M's shape, random weights", 5),
        "gpu_7b": Size("Llama-2-7b's shape, random weights in bfloat16, LoRA", 3, checkpointing=True),
        "paper": Size("meta-llama/Llama-2-7b-hf, QLoRA", 3, checkpointing=True),
    }
)
#: The paper gives no lengths for arithmetic; these are about those of its questions.
_TEXT, _ARITHMETIC = Workload("text", 1024, 256, 512, 16), Workload("arithmetic", 64, 48, 16, 32)
#: Preset → its tables. In the paper a step has one row of text per GPU.
WORKLOADS: Mapping[str, tuple[Workload, ...]] = MappingProxyType(
    {
        "cpu": (Workload("text", 128, 32, 64, 16), _ARITHMETIC),
        "gpu": (_TEXT, _ARITHMETIC),
        "gpu_7b": (_TEXT, _ARITHMETIC),
        "paper": (replace(_TEXT, batch_size=1), _ARITHMETIC),
    }
)


def _smollm2() -> tuple[Policy, Any]:
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    more = {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    return _random(LlamaConfig(**sizes, **more), torch.float32), None


def _llama2() -> tuple[Policy, Any]:
    from peft import LoraConfig

    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = LlamaConfig(**sizes, vocab_size=32000, max_position_embeddings=4096)
    return _random(config, torch.bfloat16), LoraConfig(r=64, lora_alpha=16, target_modules="all-linear")


def _random(config: LlamaConfig, dtype: torch.dtype) -> Policy:
    """A Llama with random weights, made on the GPU."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Policy.from_pretrained(model)


#: Preset → a new model, and the config of its adapters if there are any.
MODELS: Mapping[str, Callable[[], tuple[Policy, Any]]] = MappingProxyType(
    {
        "cpu": partial(load_base, BUDGETS["cpu"].model, adapter=False),
        "gpu": _smollm2,
        "gpu_7b": _llama2,
        "paper": partial(load_base, BUDGETS["paper"].model, adapter=True, four_bits=True),
    }
)


class FullLength(InlineRollouts):
    """Rollouts that don't end before their length limit."""

    def start(self, policy: Policy, sampling: Sampling) -> None:
        """Store the policy, and its sampling options with a shortest length."""
        super().start(policy, replace(sampling, min_new_tokens=sampling.max_new_tokens))


def run(folder: Path, command: str, *, preset: str = "cpu") -> None:
    """Time the steps of a preset, table by table. A table that is finished is not timed again."""
    check_choice("--preset", preset, SIZES)
    size = SIZES[preset]
    if size.needs_gpu and not torch.cuda.is_available():
        raise ValueError(f"`--preset` {preset} needs a GPU: a step would take minutes. Got none. Use --preset cpu.")
    found = [
        networks.once(
            folder / "cells" / f"{workload.recipe}.json",
            workload,
            size,
            partial(_timed, workload, size, MODELS[preset]),
        )
        for workload in WORKLOADS[preset]
    ]
    write_files(folder, {RESULTS: json_text({"command": command, "preset": preset, "tables": found})})


def _timed(workload: Workload, size: Size, new_model: Callable[[], tuple[Policy, Any]]) -> dict[str, Any]:
    """The seconds of every round: variants take turns, in an order that changes from round to round."""
    names = list(VARIANTS)
    rounds: list[dict[str, Any]] = []
    with tqdm(total=size.rounds * len(names), desc=workload.recipe, unit="run") as bar:
        for number in range(size.rounds):
            first, timed = number % len(names), dict[str, Any]()
            for name in names[first:] + names[:first]:
                timed[name] = seconds(trained(workload, VARIANTS[name], new_model, checkpointing=size.checkpointing))
                bar.update()
            rounds.append({name: timed[name] for name in names})
    return {"rounds": rounds}


def trained(
    workload: Workload, objective: str, new_model: Callable[[], tuple[Policy, Any]], *, checkpointing: bool
) -> list[dict[str, Any]]:
    """The log of a short run, an entry per step."""
    policy, adapter = new_model()
    with tempfile.TemporaryDirectory() as scratch:
        args = workload.config(scratch, objective, checkpointing=checkpointing)
        rows = workload.rows(args.max_steps * workload.batch_size, policy.space.bkspc)
        trainer = SequenceMatchTrainer(policy, args, rows, peft_config=adapter, rollouts=FullLength())
        for loud in (ProgressLines, RolloutWarnings):
            trainer.remove_callback(loud)
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "step_seconds" in entry]
    del policy, trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return log


def seconds(log: list[dict[str, Any]]) -> dict[str, float]:
    """The median step of a run without its rollouts, and of rollouts the seconds of a batch and their mean length.

    Every entry of the log has waited for the GPU. The first batch of rollouts warms up: on a GPU its step is captured.
    """
    steps = [entry["step_seconds"] - entry.get("rollouts/seconds", 0.0) for entry in log[WARM_UP:]]
    found = {"step": median(steps)}
    made = [entry for entry in log if "completions/mean_length" in entry][1:]
    if made:
        found["sampling"] = median(entry["rollouts/seconds"] for entry in made)
        found["rollout_length"] = median(entry["completions/mean_length"] for entry in made)
    return found


def draw(folder: Path) -> None:
    """The tables and the figure, from the results alone."""
    found = json.loads((folder / RESULTS).read_text())["tables"]
    write_files(folder, {TABLE: "\n".join(f"{report.title(timed)}\n\n{report.table(timed)}" for timed in found)})
    report.draw(found, folder / FIGURE)
