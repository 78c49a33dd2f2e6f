"""Properties of a model's attention: its sliding windows, masks over cache columns, and the models that can't delete.

Needs torch alone: `Policy.export` writes this file beside a checkpoint.
"""

from typing import Any

import torch
from torch import Tensor


def refuse_what_cannot_delete(model: Any) -> None:
    """Refuse by name the models that can't roll back or take no mask. The probe refuses the rest."""
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} carries a recurrent state, which can't be rolled back when a token is deleted. Use an attention model."
        )
    if getattr(model.config, "alibi", False) or model.config.model_type in ("bloom", "mpt"):
        raise ValueError(
            f"{name} uses ALiBi, which counts columns, deleted ones too, instead of positions. Use a model with position ids."
        )
    if "flash" in (model.config._attn_implementation or ""):
        raise ValueError(
            f"`attn_implementation` must take a mask, and {model.config._attn_implementation!r} does not. "
            f"Use 'sdpa', 'eager' or, on a GPU, 'flex_attention'."
        )
    windows(model.config)


def windows(config: Any) -> dict[str, int | None]:
    """Each kind of attention layer in the model, with its sliding window in tokens, or None for full attention.

    A window counts the model's positions, which are depths of the stack: a deleted token takes no room in it.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        uses_window = window is not None and getattr(config, "use_sliding_window", True)
        return {"all": window if uses_window else None}
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}, which can't leave out deleted tokens. "
            f"Use a model whose layers all attend (full_attention or sliding_attention)."
        )
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def cache_mask(config: Any, keep: Tensor, key_position: Tensor, query_position: Tensor, dtype: torch.dtype) -> Any:
    """The 4-D mask of new nodes over cache columns, one for each kind of layer. `keep` [row, query, slot]: True for live nodes."""
    masks = {}
    for kind, window in windows(config).items():
        kept = keep if window is None else keep & within(window, key_position, query_position)
        masks[kind] = (additive(kept, dtype) if config._attn_implementation == "eager" else kept)[:, None]
    return masks.get("all", masks)


def within(window: int, key_position: Tensor, query_position: Tensor) -> Tensor:
    """True [row, query, key] where the key's position lies in the query's window."""
    return key_position[:, None, :] > query_position[:, :, None] - window


def additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that eager attention adds to its scores; with a boolean one it would be silently wrong."""
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, torch.finfo(dtype).min)
