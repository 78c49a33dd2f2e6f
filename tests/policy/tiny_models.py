"""Tiny random models of many architectures, with weights large enough that attention matters."""

from collections.abc import Callable
from typing import Any

import tokenizers
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

VOCAB, HIDDEN, WINDOW = 1200, 32, 4
#: For decoding: few tokens, and weights so large that attention matters and logits spread over several nats.
DECODED: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The causal LM of an architecture by its name in `ARCHITECTURES`."""
    model_class, config_class, own = ARCHITECTURES[name]
    ids = {"vocab_size": VOCAB, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None}
    config = getattr(transformers, config_class)(**{**ids, **own, **changes})
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, model_class)(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def llama(**changes: Any) -> Any:
    """A Llama to decode from, in float32."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(DECODED | changes))).eval()


def exact_llama() -> Any:
    """In float64 throughout: transformers' LlamaRMSNorm rounds to float32 whatever the model's dtype."""
    model = llama()
    for parent in [module for module in model.modules() if not isinstance(module, LlamaRMSNorm)]:
        for name, child in parent.named_children():
            if isinstance(child, LlamaRMSNorm):
                setattr(parent, name, torch.nn.RMSNorm(HIDDEN, eps=model.config.rms_norm_eps))
    return model.double()


def mistral() -> Any:
    """With a window of four tokens."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(**DECODED, sliding_window=WINDOW, head_dim=8)
    return transformers.MistralForCausalLM(config).eval()


def character_tokenizer() -> Any:
    """One token per character, as many as `DECODED` has."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {name: n for n, name in enumerate([*special, *"abcdefghijklmnopqrstuvwxyz .,:;!?'-()0123456"])}
    assert len(vocabulary) == DECODED["vocab_size"]
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    names = {f"{name[1:-1]}_token": name for name in special}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, padding_side="left", **names)


_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {f"linear_{part}": 2 for part in ("num_key_heads", "num_value_heads")} | {
    f"linear_{part}_head_dim": 8 for part in ("key", "value")
}

#: Name → model class, config class, config.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _GROUPED),
    "Mistral (sliding window)": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": WINDOW}),
    "Mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_GROUPED, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, **_SLIDING}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GROUPED, **_SLIDING}),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "GPT-J": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": HIDDEN, "pad_token_id": 1},
    ),
    "Phi": ("PhiForCausalLM", "PhiConfig", _SIZES),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", {**_SIZES, "num_key_value_heads": 2}),
    "Cohere": ("CohereForCausalLM", "CohereConfig", {**_SIZES, "num_key_value_heads": 2}),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", {**_SIZES, "num_key_value_heads": 2, "logits_scaling": 4.0}),
    "OLMo 2": ("Olmo2ForCausalLM", "Olmo2Config", {**_SIZES, "num_key_value_heads": 2}),
    "Falcon (rotary)": ("FalconForCausalLM", "FalconConfig", {**_SIZES, "alibi": False}),
    "Falcon (ALiBi)": ("FalconForCausalLM", "FalconConfig", {**_SIZES, "alibi": True}),
    "BLOOM": ("BloomForCausalLM", "BloomConfig", {"hidden_size": HIDDEN, "n_layer": 2, "n_head": 4}),
    "MPT": ("MptForCausalLM", "MptConfig", {"d_model": HIDDEN, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
    "GPT-Neo (local attention)": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": HIDDEN,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
            "max_position_embeddings": 128,
        },
    ),
    "Mamba": ("MambaForCausalLM", "MambaConfig", {"hidden_size": HIDDEN, "num_hidden_layers": 2}),
    "Qwen3-Next (hybrid)": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_GROUPED,
            **_LINEAR,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}

Builder = Callable[[], PreTrainedModel]
