"""Alive intervals → what a Hugging Face model takes as `attention_mask` (Algorithm A's m, without its L×L bits where it can be)."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig, PreTrainedModel

from sequencematch.core.encoding import attend
from sequencematch.policy.rollback import windows
from sequencematch.policy.spine import SPINE, reordered_mask, spine_order

Mask = Tensor | BlockMask | dict[str, Any]
BLOCK = 128


def refuse_what_cannot_delete(model: PreTrainedModel) -> None:
    """Name the models that can't roll back or take no mask; the probe catches those that nobody thought of."""
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


def row_mask(
    config: PreTrainedConfig,
    deleted_at: Int[Tensor, "row node"],
    position_ids: Int[Tensor, "row node"],
    dtype: torch.dtype,
    *,
    reorders: bool = True,
) -> tuple[Mask, Int[Tensor, "row node"] | None]:
    """The mask of encoded rows for the model's attention implementation: one, or one for each kind of layer.

    And, where `reorders`, the order that it takes nodes to be in, if that is another: the one at place p is node `order[p]`.
    """
    kinds = windows(config)
    has_spine = reorders and config._attn_implementation == SPINE and None in kinds.values()
    found = spine_order(deleted_at) if has_spine else None
    if found is None:
        build = _BUILDERS[config._attn_implementation or "eager"]
        masks = {kind: build(deleted_at, position_ids, window, dtype) for kind, window in kinds.items()}
        return masks.get("all", masks), None
    order, length = found
    positions = position_ids.gather(1, order)
    masks = {}
    for kind, window in kinds.items():
        keep = reordered_mask(deleted_at, order, length if window is None else 0)
        masks[kind] = (keep if window is None else keep & _within(positions, window))[:, None]
    return masks.get("all", masks), order


def dense(
    deleted_at: Int[Tensor, "row node"], position_ids: Int[Tensor, "row node"], window: int | None
) -> Bool[Tensor, "row node node"]:
    """True where the first node attends to the second: alive, and within the window counted in positions."""
    keep = attend(deleted_at)
    return keep if window is None else keep & _within(position_ids, window)


def _within(position_ids: Int[Tensor, "row node"], window: int) -> Bool[Tensor, "row node node"]:
    return position_ids[:, None, :] > position_ids[:, :, None] - window


def block_mask(
    deleted_at: Int[Tensor, "row node"], position_ids: Int[Tensor, "row node"], window: int | None = None
) -> BlockMask:
    """FlexAttention's mask from each block's extremes of `deleted_at`, with no tensor of length squared.

    A block of queries i and keys j is skipped if every j > i or every deleted_at[j] ≤ i, and needs no masking inside if
    every j ≤ i < deleted_at[j].
    """
    rows, nodes = deleted_at.shape
    blocks = -(-nodes // BLOCK)
    padded = torch.nn.functional.pad(deleted_at, (0, blocks * BLOCK - nodes)).view(rows, blocks, BLOCK)
    first = torch.arange(blocks, device=deleted_at.device) * BLOCK
    query, key = first[:, None], first[None, :]
    latest, earliest = padded.amax(2)[:, None, :], padded.amin(2)[:, None, :]
    touches = (key <= query + BLOCK - 1) & (latest > query)
    is_full = touches & (key + BLOCK - 1 <= query) & (earliest > query + BLOCK - 1)
    if window is not None:
        is_full = torch.zeros_like(is_full)
    reach = torch.tensor(window if window is not None else nodes, device=deleted_at.device)

    def keeps(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001  (FlexAttention's signature)
        return (j <= i) & (i < deleted_at[row, j]) & (position_ids[row, j] > position_ids[row, i] - reach)

    def listed(blocks_kept: Bool[Tensor, "row block block"]) -> tuple[Tensor, Tensor]:
        kept = blocks_kept[:, None].to(torch.int32)
        return kept.sum(-1, dtype=torch.int32), kept.argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    partial, full = listed(touches & ~is_full), listed(is_full)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=keeps, seq_lengths=(nodes, nodes))


def _sdpa(deleted_at: Tensor, position_ids: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return dense(deleted_at, position_ids, window)[:, None]


def _eager(deleted_at: Tensor, position_ids: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Eager attention adds its mask: a boolean one would be silently wrong there."""
    keep = dense(deleted_at, position_ids, window)
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, torch.finfo(dtype).min)[:, None]


def _flex(deleted_at: Tensor, position_ids: Tensor, window: int | None, dtype: torch.dtype) -> BlockMask:  # noqa: ARG001
    return block_mask(deleted_at, position_ids, window)


_BUILDERS: Mapping[str, Callable[[Tensor, Tensor, int | None, torch.dtype], Any]] = MappingProxyType(
    {"sdpa": _sdpa, SPINE: _sdpa, "eager": _eager, "flex_attention": _flex}
)
