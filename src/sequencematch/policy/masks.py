"""Alive intervals → the `attention_mask` of encoded rows (Algorithm A's m), for each attention implementation."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig

from sequencematch.core.encoding import attend
from sequencematch.policy.attention import additive, windows, within
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX, causal_prefix_order, reordered_mask

Mask = Tensor | BlockMask | dict[str, Any]
#: Queries and keys per tile of FlexAttention's block mask.
FLEX_BLOCK = 128


def row_mask(
    config: PreTrainedConfig,
    deleted_at: Int[Tensor, "row node"],
    position_ids: Int[Tensor, "row node"],
    dtype: torch.dtype,
    *,
    reorder: bool = True,
) -> tuple[Mask, Int[Tensor, "row node"] | None]:
    """The mask of encoded rows for the model's attention implementation: one, or one for each kind of layer.

    Also returns the order in which nodes must be fed, place p taking node `order[p]`; None for the original order, which
    `reorder=False` keeps.
    """
    kinds = windows(config)
    may_reorder = reorder and config._attn_implementation == CAUSAL_PREFIX and None in kinds.values()
    found = causal_prefix_order(deleted_at) if may_reorder else None
    if found is None:
        build = _BUILDERS[config._attn_implementation or "eager"]
        masks = {kind: build(deleted_at, position_ids, window, dtype) for kind, window in kinds.items()}
        return masks.get("all", masks), None
    order, length = found
    positions = position_ids.gather(1, order)
    masks = {}
    for kind, window in kinds.items():
        keep = reordered_mask(deleted_at, order, length if window is None else 0)
        masks[kind] = (keep if window is None else keep & within(window, positions, positions))[:, None]
    return masks.get("all", masks), order


def dense(
    deleted_at: Int[Tensor, "row node"], position_ids: Int[Tensor, "row node"], window: int | None
) -> Bool[Tensor, "row node node"]:
    """True where the first node attends to the second: alive, and within the window counted in positions."""
    keep = attend(deleted_at)
    return keep if window is None else keep & within(window, position_ids, position_ids)


def block_mask(
    deleted_at: Int[Tensor, "row node"], position_ids: Int[Tensor, "row node"], window: int | None = None
) -> BlockMask:
    """FlexAttention's mask from each block's extremes of `deleted_at`, with no tensor of length squared.

    A block of queries i and keys j is skipped if every j > i or every deleted_at[j] ≤ i, and needs no masking inside if
    every j ≤ i < deleted_at[j].
    """
    rows, nodes = deleted_at.shape
    blocks = -(-nodes // FLEX_BLOCK)
    padded = torch.nn.functional.pad(deleted_at, (0, blocks * FLEX_BLOCK - nodes)).view(rows, blocks, FLEX_BLOCK)
    first = torch.arange(blocks, device=deleted_at.device) * FLEX_BLOCK
    query, key = first[:, None], first[None, :]
    latest, earliest = padded.amax(2)[:, None, :], padded.amin(2)[:, None, :]
    touches = (key <= query + FLEX_BLOCK - 1) & (latest > query)
    is_full = touches & (key + FLEX_BLOCK - 1 <= query) & (earliest > query + FLEX_BLOCK - 1)
    if window is not None:
        is_full = torch.zeros_like(is_full)
    reach = torch.tensor(window if window is not None else nodes, device=deleted_at.device)

    def keeps(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001  (FlexAttention's signature)
        return (j <= i) & (i < deleted_at[row, j]) & (position_ids[row, j] > position_ids[row, i] - reach)

    def listed(blocks_kept: Bool[Tensor, "row block block"]) -> tuple[Tensor, Tensor]:
        kept = blocks_kept[:, None].to(torch.int32)
        return kept.sum(-1, dtype=torch.int32), kept.argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    partial, full = listed(touches & ~is_full), listed(is_full)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=FLEX_BLOCK, mask_mod=keeps, seq_lengths=(nodes, nodes))


def _boolean(deleted_at: Tensor, position_ids: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return dense(deleted_at, position_ids, window)[:, None]


def _additive(deleted_at: Tensor, position_ids: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    return additive(dense(deleted_at, position_ids, window), dtype)[:, None]


def _blocks(deleted_at: Tensor, position_ids: Tensor, window: int | None, dtype: torch.dtype) -> BlockMask:  # noqa: ARG001
    return block_mask(deleted_at, position_ids, window)


_BUILDERS: Mapping[str, Callable[[Tensor, Tensor, int | None, torch.dtype], Any]] = MappingProxyType(
    {"sdpa": _boolean, CAUSAL_PREFIX: _boolean, "eager": _additive, "flex_attention": _blocks}
)
