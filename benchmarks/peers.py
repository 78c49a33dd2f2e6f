"""The peers: Hugging Face as its users run it, and TRL where it is installed."""

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shapes import BOS, EOS
from benchmarks.timing import Call, now
from sequencematch.core.encoding import Encoding
from sequencematch.policy import Policy
from sequencematch.training.callbacks import ProgressLines


def autocast(device: str) -> Any:
    """The autocast of `bf16=True` on a GPU; none on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.startswith("cuda") else nullcontext()


def updater(module: nn.Module, device: str) -> Callable[[], None]:
    """A function that ends a step after its backward passes.

    On a GPU it clips gradients and steps AdamW as `Trainer` does, with learning rate 0, so that every round sees the same
    weights. On a CPU only forward and backward are compared, and gradients are dropped.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True) if device.startswith("cuda") else None

    def update() -> None:
        if optimizer is not None:
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        for parameter in trained:
            parameter.grad = None

    return update


def with_attention(policy: Policy, implementation: str, call: Call) -> Call:
    """The call under one of transformers' attention implementations."""

    def run() -> object:
        if policy.base.config._attn_implementation != implementation:
            policy.base.set_attn_implementation(implementation)
        return call()

    return run


def mle_step(model: Any, tokens: Tensor, device: str, update: Callable[[], None]) -> Call:
    """Maximum likelihood with a plain Hugging Face model."""

    def step() -> None:
        inputs = tokens.to(device)
        with autocast(device):
            loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
        loss.backward()
        update()

    return step


def same_rows_step(model: Any, rows: Sequence[Encoding], device: str, update: Callable[[], None]) -> Call:
    """Hugging Face's step on the rows, positions and masks of our encodings, which are made outside of the timed step."""
    passes = [(encoding.to(device), encoding.attend()[:, None].to(device)) for encoding in rows]

    def step() -> None:
        for encoding, attend in passes:
            with autocast(device):
                loss = model(
                    input_ids=encoding.tokens,
                    attention_mask=attend,
                    position_ids=encoding.position_ids,
                    labels=encoding.tokens,
                    use_cache=False,
                ).loss
            loss.backward()
        update()

    return step


def hf_generate(policy: Policy, prompts: list[list[int]], new_tokens: int, **options: Any) -> Call:
    """`model.generate` at temperature 1 until every row has ended; `cache_implementation="static"` compiles on a GPU."""
    from transformers import GenerationConfig

    inputs = torch.tensor(prompts, device=policy.device)
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **options,
    )
    attend = torch.ones_like(inputs)
    return lambda: policy.base.generate(inputs, attention_mask=attend, generation_config=config)


def arguments(folder: str, device: str, batch: int, steps: int) -> dict[str, Any]:
    """Settings shared by all trainers."""
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "learning_rate": 1e-5,
        "save_strategy": "no",
        "logging_steps": max(1, steps // 2),
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,  # TRL's default is True
        "use_cpu": device == "cpu",
        "bf16": device.startswith("cuda"),
    }


def trainer_seconds(model: Any, tokens: Tensor, device: str, batch: int, steps: int) -> float:
    """Seconds of `steps` steps of maximum likelihood with `transformers.Trainer`."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, TrainingArguments(**arguments(folder, device, batch, steps)), train_dataset=rows)
        return training_seconds(trainer, device)


def sft_seconds(model: Any, tokens: Tensor, device: str, batch: int, steps: int) -> float:
    """The same with TRL's `SFTTrainer`."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found, unused-ignore]

    words = {str(i): i for i in range(model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")),
        bos_token=str(BOS),
        eos_token=str(EOS),
        pad_token="0",
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**arguments(folder, device, batch, steps), max_length=tokens.shape[1]),
            train_dataset=Dataset.from_dict({"input_ids": tokens.tolist()}),
            processing_class=tokenizer,
        )
        return training_seconds(trainer, device)


def training_seconds(trainer: Any, device: str) -> float:
    """Seconds of `train()`, with nothing printed."""
    from transformers.trainer_callback import PrinterCallback

    for callback in (PrinterCallback, ProgressLines):
        trainer.remove_callback(callback)
    start = now(device)
    trainer.train()
    return now(device) - start


def missing(package: str) -> str | None:
    """The reason why a peer is left out, or None."""
    return None if importlib.util.find_spec(package) else f"{package} is not installed"
