"""The tokens that end a sequence: the tokenizer's `<eos>`, and the others that a model's generation config lists."""

from typing import Any


def eos_token(model: Any, tokenizer: Any) -> int:
    """The id of `<eos>`, of the tokenizer if there is one."""
    ids = getattr(model.config if tokenizer is None else tokenizer, "eos_token_id", None)
    if ids is None:
        raise ValueError(
            "`tokenizer` must have an <eos> token: it is what ends a trajectory. Got none; set `tokenizer.eos_token`."
            if tokenizer is not None
            else "`model.config.eos_token_id` must be set, or a tokenizer with <eos> given: it is what ends a trajectory."
        )
    return int(ids[0] if isinstance(ids, list) else ids)


def listed_ends(generation_config: Any) -> frozenset[int]:
    """The ids in `eos_token_id` if it is a list, as in chat models such as Llama 3, Gemma and Qwen.

    A single id is left out: where it differs from the tokenizer's it is mostly a default that nobody changed.
    """
    ids = getattr(generation_config, "eos_token_id", None)
    return frozenset(ids) if isinstance(ids, list | tuple) else frozenset()
