"""Fine-tuning a base model for a study: how it is loaded, and the settings that all methods share   (§6, App. E)."""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import AutoTokenizer

from sequencematch.policy import Policy
from sequencematch.policy.storage import BUNDLED
from sequencematch.training import SequenceMatchConfig


@runtime_checkable
class TuningBudget(Protocol):
    """How long a method fine-tunes a base model: the same for all methods."""

    @property
    def steps(self) -> int:
        """Optimisation steps."""

    @property
    def batch_size(self) -> int:
        """Rows a step."""

    @property
    def learning_rate(self) -> float:
        """The highest of the schedule."""


def load_base(model: str, *, adapter: bool, four_bits: bool = False) -> tuple[Policy, Any]:
    """A base model, and the config of LoRA's adapters if they are trained in place of all weights   (§6, App. E).

    With `four_bits` it is QLoRA as in the paper, with a trained output layer. Without, the base model is in bfloat16 and
    frozen but for the rows of end tokens, the library's default: many models share the output layer with the embedding.
    """
    options: dict[str, Any] = {"dtype": torch.float32}
    config = None
    if adapter:
        from peft import LoraConfig
        from transformers import BitsAndBytesConfig

        shape: dict[str, Any] = {"r": 64, "lora_alpha": 16, "target_modules": "all-linear"}
        options, config = {"dtype": torch.bfloat16}, LoraConfig(**shape)
        if four_bits:
            options = {
                "quantization_config": BitsAndBytesConfig(
                    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
                )
            }
            config = LoraConfig(**shape, modules_to_save=["lm_head"])
    try:
        return Policy.from_pretrained(model, **options), config
    except OSError as error:
        raise _unreachable(model, error) from error


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a base model."""
    try:
        return AutoTokenizer.from_pretrained(BUNDLED.get(model, model))
    except (OSError, ValueError) as error:  # ValueError: a folder without a tokenizer
        raise _unreachable(model, error) from error


def _unreachable(model: str, error: Exception) -> ValueError:
    return ValueError(
        f"`--model`, or the preset's base model, must be a folder or a name on the hub that can be reached. "
        f"Got {model!r}: {str(error).splitlines()[0]}"
    )


def tuning_config(folder: str | Path, budget: TuningBudget, *, seed: int, **own: Any) -> SequenceMatchConfig:
    """The settings of one model: AdamW with a cosine schedule, bf16 autocast on a GPU, and its `own`, which go first."""
    on_gpu = torch.cuda.is_available()
    shared: dict[str, Any] = {
        "seed": seed,
        "max_steps": budget.steps,
        "per_device_train_batch_size": budget.batch_size,
        "learning_rate": budget.learning_rate,
        "lr_scheduler_type": "cosine",
        "adam_beta2": 0.98,
        "logging_steps": max(budget.steps // 20, 1),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
    }
    return SequenceMatchConfig(str(folder), **{**shared, **own})
