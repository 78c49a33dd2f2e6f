"""Models with random weights in known shapes, and the sizes of every suite on each kind of machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sequencematch.extras import require

BOS, EOS, FIRST = 1, 2, 3


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    tied: bool = False

    def config(self) -> LlamaConfig:
        """The shape as a configuration of transformers."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tied,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )


LLAMA_2_7B = Shape("Llama-2-7b", 4096, 11008, 32, 32, 32, 32000, 4096)
#: The length suite measures layers, so a quarter of them is enough.
LLAMA_2_7B_QUARTER = Shape("Llama-2-7b, 8 of its 32 layers", 4096, 11008, 8, 32, 32, 32000, 8192)
SMOLLM2_135M = Shape("SmolLM2-135M", 576, 1536, 30, 9, 3, 49152, 8192, tied=True)
CPU_LLAMA = Shape("Llama of hidden 512", 512, 1376, 8, 8, 8, 32000, 4096)
SMALL = Shape("Llama of hidden 256", 256, 688, 4, 4, 4, 8000, 4096)
TINY = Shape("Llama of hidden 16", 16, 32, 2, 2, 2, 64, 512)


@dataclass(frozen=True)
class Scale:
    """The shapes and sizes of every suite. `targets.py` applies only where `is_full`."""

    is_full: bool
    step: Shape
    context: int
    batch: int
    rollout: int  # nodes of a short rollout
    generation_prompt: int
    generation_batch: int
    prompt: int  # tokens of a shared prompt; its completion and batch follow
    completion: int
    prompt_batch: int
    decoding: Shape
    decoding_batch: int
    decoding_new: int
    decoding_prompt: int
    length: Shape
    lengths: tuple[int, ...]
    length_tokens: int
    encoding_batch: int
    encoding_lengths: tuple[int, ...]  # throughput at the first length, memory at all
    head_hidden: tuple[int, ...]
    head_positions: int
    attention_lengths: tuple[int, ...]
    training: Shape
    training_length: int
    training_generation: int  # rollouts per generation in whole training runs
    reuse: int = 8
    generations: int = 3  # rounds of whole generations and training runs, which are long
    is_lora: bool = False
    same_rows: bool = True  # measure our step over Hugging Face's on the same rows, too

    @property
    def training_steps(self) -> int:
        """Steps that use up one generation."""
        return self.training_generation * self.reuse // self.batch


CPU = Scale(
    is_full=True,
    step=CPU_LLAMA,
    context=128,
    batch=16,
    rollout=80,
    generation_prompt=16,
    generation_batch=64,
    prompt=96,
    completion=32,
    prompt_batch=16,
    decoding=CPU_LLAMA,
    decoding_batch=16,
    decoding_new=96,
    decoding_prompt=32,
    length=SMALL,
    lengths=(128, 256, 512, 1024, 2048),
    length_tokens=2048,
    encoding_batch=64,
    encoding_lengths=(1024, 2048, 4096, 8192, 16384),
    head_hidden=(512,),
    head_positions=512,
    attention_lengths=(256, 1024),
    training=SMALL,
    training_length=64,
    training_generation=32,
)
QUICK = Scale(
    is_full=False,
    step=SMALL,
    context=64,
    batch=8,
    rollout=40,
    generation_prompt=16,
    generation_batch=32,
    prompt=48,
    completion=16,
    prompt_batch=8,
    decoding=SMALL,
    decoding_batch=16,
    decoding_new=32,
    decoding_prompt=32,
    length=TINY,
    lengths=(128, 256, 512),
    length_tokens=512,
    encoding_batch=16,
    encoding_lengths=(1024, 4096),
    head_hidden=(256,),
    head_positions=512,
    attention_lengths=(256,),
    training=SMALL,
    training_length=48,
    training_generation=8,
    generations=1,
)
H200 = Scale(
    is_full=True,
    step=LLAMA_2_7B,
    context=1024,
    batch=8,
    rollout=640,
    generation_prompt=64,
    generation_batch=64,
    prompt=45,
    completion=15,
    prompt_batch=64,
    decoding=SMOLLM2_135M,
    decoding_batch=64,
    decoding_new=128,
    decoding_prompt=32,
    length=LLAMA_2_7B_QUARTER,
    lengths=(512, 1024, 2048, 4096, 8192),
    length_tokens=8192,
    encoding_batch=64,
    encoding_lengths=(1024, 4096),
    head_hidden=(512, 4096),
    head_positions=8192,
    attention_lengths=(1024, 4096),
    training=SMOLLM2_135M,
    training_length=256,
    training_generation=32,
    generations=2,
    is_lora=True,
    same_rows=False,
)


def build(shape: Shape, device: str, *, is_lora: bool = False) -> Any:
    """A model with random weights, made on the device: float32 on a CPU, bfloat16 on a GPU.

    `is_lora` adds the adapters of the paper's text experiments, rank 64 on all linear layers, and gradient checkpointing.
    """
    torch.manual_seed(0)
    with torch.device(device), _default_dtype(dtype_on(device)):
        model: Any = LlamaForCausalLM(shape.config())
    if is_lora:
        require("peft", "peft", "The benchmark with LoRA")
        from peft import LoraConfig, get_peft_model

        model.gradient_checkpointing_enable({"use_reentrant": False})
        model = get_peft_model(
            model, LoraConfig(r=64, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    return model


def dtype_on(device: str) -> torch.dtype:
    """The dtype that models are measured in."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
