"""Trains a tiny Llama with TRL's `SFTTrainer` and records its curves in sft_curve.json; test_sft_curve.py compares.

TRL is not a dependency. In an environment of its own:

    pip install --constraint constraints.txt trl==1.16.0
    python tests/training/record_sft_curve.py
"""

import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
import torch
import transformers

RECORD = Path(__file__).with_name("sft_curve.json")
PACKAGES = ("trl", "transformers", "torch", "accelerate", "datasets", "tokenizers")

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,!"
PROSE = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs, how vexingly daft zebras jump! "

#: 42 rows are ten batches of four and one of two: an epoch is five whole steps and one of a single small batch.
ROWS, STEPS, MAX_LENGTH = 42, 20, 32
#: The fields that SFTTrainer and SequenceMatchTrainer know by the same names.
ARGUMENTS: Mapping[str, Any] = MappingProxyType(
    {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "optim": "adamw_torch",
        "learning_rate": 3e-3,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.1,
        "max_length": MAX_LENGTH,
        "seed": 7,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
)
#: What a recording is called → the columns of its rows, and how the loss treats prompts.
FORMATS: Mapping[str, tuple[tuple[str, ...], bool]] = MappingProxyType(
    {
        "text": (("text",), False),
        "completions alone": (("prompt", "completion"), True),
        "prompts and completions": (("prompt", "completion"), False),
    }
)


def tokenizer() -> Any:
    """One token per character."""
    vocabulary = {name: n for n, name in enumerate([*SPECIAL, *CHARACTERS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    names = {f"{name[1:-1]}_token": name for name in SPECIAL}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **names)


def llama() -> Any:
    """A random Llama in float32 with weights so large that attention matters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.2,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=SPECIAL.index("<bos>"),
        eos_token_id=SPECIAL.index("<eos>"),
        dtype=torch.float32,
    )
    return transformers.LlamaForCausalLM(config)


def rows(columns: tuple[str, ...]) -> list[dict[str, str]]:
    """Cuts from the prose: texts of 1 to 41 characters, or prompts of 1 to 8 and completions of 0 to 28.

    Some are longer than `MAX_LENGTH` with their <eos>, and every tenth ends in an <eos> of its own.
    """
    found = []
    for n in range(ROWS):
        piece = (PROSE * 2)[13 * n % len(PROSE) :]
        end = "<eos>" if n % 10 == 0 else ""
        if columns == ("text",):
            found.append({"text": piece[: 1 + 17 * n % 41] + end})
        else:
            cut, stop = 1 + 3 * n % 8, 1 + 3 * n % 8 + 11 * n % 29
            found.append({"prompt": piece[:cut], "completion": piece[cut:stop] + end})
    return found


def train(trainer: Any, model: Any) -> dict[str, list[float]]:
    """The losses, gradient norms and learning rates of every step, and how far each of the model's parameters went."""
    start = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train()
    steps = [line for line in trainer.state.log_history if "loss" in line]
    with torch.no_grad():
        moved = [float((now - then).norm()) for now, then in zip(model.parameters(), start, strict=True)]
    return {name: [line[name] for line in steps] for name in ("loss", "grad_norm", "learning_rate")} | {"moved": moved}


def main() -> None:
    """Record every format."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    curves = {}
    for name, (columns, completion_only) in FORMATS.items():
        model = llama()
        with tempfile.TemporaryDirectory() as folder:
            trainer = SFTTrainer(
                model=model,
                args=SFTConfig(output_dir=folder, completion_only_loss=completion_only, **ARGUMENTS),
                train_dataset=Dataset.from_list(rows(columns)),
                processing_class=tokenizer(),
            )
            curves[name] = train(trainer, model)
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}
    RECORD.write_text(json.dumps({"versions": versions, "curves": curves}, indent=1) + "\n")


if __name__ == "__main__":
    main()
