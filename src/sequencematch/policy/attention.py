"""Properties of a model's attention: sliding windows, position schemes, masks over cache columns, and models that can't delete.

Needs torch alone: `Policy.export` writes this file beside a checkpoint.
"""

import re
from typing import Any

import torch
from torch import Tensor

from sequencematch.policy.verdicts import WINDOWED

#: Rotary embeddings whose angles depend on a token's position alone.
_ROPE_BY_POSITION = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
#: Rotary embeddings whose angles change for the whole batch once a row passes a limit.
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})
_ANY = 2**31 - 1
#: Fields of configs that limit how far a token sees.
_WINDOW_FIELD = re.compile(r"(?!max_|_|.*pattern).*(window|local_attention|attention_chunk).*")


def refuse_what_cannot_delete(model: Any) -> None:
    """Refuse by name the models that can't roll back, take no mask, or have an untested window. The probe refuses the rest."""
    name, config = type(model).__name__, model.config
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} carries a recurrent state, which can't be rolled back when a token is deleted. Use an attention model."
        )
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise ValueError(
            f"{name} uses ALiBi, whose distances also count deleted tokens. Use a model with position ids."
        )
    if "flash" in (config._attn_implementation or ""):
        raise ValueError(
            f"`attn_implementation` must take a mask, and {config._attn_implementation!r} does not. "
            f"Use 'sdpa', 'eager' or, on a GPU, 'flex_attention'."
        )
    windows(config)
    rope_limit(config)
    is_known = type(model).__module__.startswith("transformers.") and text_config(config).model_type in WINDOWED
    field = _window_field(text_config(config), but_for="sliding_window" if is_known else None)
    if field is not None:
        raise ValueError(
            f"{name} has a window, `{field[0]}`={field[1]}, which loading can't test, and windows of models of type "
            f"{config.model_type} are not known to be exact. See docs/models.md for those that are."
        )


def text_config(config: Any) -> Any:
    """The config of the language model inside a multimodal one, or the config itself."""
    return config.get_text_config(decoder=True)


def windows(config: Any) -> dict[str, int | None]:
    """Each kind of attention layer in the model, with its sliding window in tokens, or None for full attention.

    A window counts the model's positions, which are depths of the stack: a deleted token takes no room in it.
    """
    config = text_config(config)
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


def _window_field(config: Any, but_for: str | None) -> tuple[str, Any] | None:
    """The first field of a config, but for one, that limits how far a token sees, and its value."""
    for name, value in config.to_dict().items():
        is_off = name == but_for or (name == "sliding_window" and not getattr(config, "use_sliding_window", True))
        sizes = value if isinstance(value, list) else [value]
        if _WINDOW_FIELD.fullmatch(name) and not is_off and any(type(size) is int and size > 0 for size in sizes):
            return name, value
    return None


def max_positions(config: Any) -> int:
    """The context length: the deepest stack the model has positions for."""
    return min(rope_limit(config) or _ANY, _max_position_embeddings(text_config(config)))


def _max_position_embeddings(config: Any) -> int:
    return int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or _ANY)


def rope_limit(config: Any) -> int | None:
    """The length from which rotary embeddings of type longrope or dynamic change for all rows of a batch; None for other types.

    A type that is not known is refused.
    """
    config, found = text_config(config), None
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        kind = part.get("rope_type", "default") if isinstance(part, dict) else "default"
        if kind in _ROPE_BY_LENGTH:
            original = getattr(config, "original_max_position_embeddings", None)
            limit = part.get("original_max_position_embeddings") or original or _max_position_embeddings(config)
            found = min(limit, _ANY if found is None else found)
        elif kind not in _ROPE_BY_POSITION:
            raise ValueError(
                f"{config.model_type} has rotary embeddings of type {kind!r}. Only these were tried with deletions: "
                f"{', '.join(sorted(_ROPE_BY_POSITION | _ROPE_BY_LENGTH))}. Use another model."
            )
    return found


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
    """The mask that eager attention adds to its scores; a boolean mask would silently give wrong results."""
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, torch.finfo(dtype).min)
