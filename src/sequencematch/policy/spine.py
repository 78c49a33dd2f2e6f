"""Rows with what survives in front: causal attention without a mask for most nodes, with one for the rest.

The *spine* of a row is the deepest stack of its life. Reorder the row so that it comes first. A spine node attends to
exactly the spine nodes before it, since nothing below it on the stack can be popped while it stands there. So their attention
is plainly causal, which kernels are fastest at, and only deleted nodes, and further trajectories of a packed row, need a mask:

    query   spine    j ≤ i, no mask
            others   j ≤ i < deleted_at[j], in the order before
"""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

#: What transformers calls this attention by.
SPINE = "sequencematch_spine"
#: A spine is cut to a multiple of a sixteenth of the row, so that kernels are planned for few shapes.
PARTS = 16
#: With a mask, and half a tile of keys at the end, cuDNN's gradients are wrong where a row's scores are very negative.
CUDNN_TILE = 128
NOT_CUDNN = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def spine_order(deleted_at: Int[Tensor, "row node"]) -> tuple[Int[Tensor, "row node"], int] | None:
    """Which node goes where, and how many of the spine go first: as many as all rows have; None where they are few."""
    nodes = deleted_at.shape[1]
    node = torch.arange(nodes, device=deleted_at.device).repeat(len(deleted_at), 1)
    dead = torch.searchsorted(deleted_at.sort(1).values, node, right=True)
    top = (node + 1 - dead).argmax(1, keepdim=True)  # where the stack is deepest
    on_spine = (node <= top) & (top < deleted_at)
    rank = on_spine.cumsum(1)
    step = max(1, nodes // PARTS)
    length = int(rank[:, -1].min()) // step * step
    if length < nodes / 4 or length < 2:
        return None
    is_later = ~(on_spine & (rank <= length))
    return is_later.to(torch.uint8).argsort(dim=1, stable=True), length


def reordered_mask(
    deleted_at: Int[Tensor, "row node"], order: Int[Tensor, "row node"], first: int
) -> Bool[Tensor, "row query node"]:
    """True where a node of the reordered row, from `first` on, attends to another."""
    key, query = order[:, None, :], order[:, first:, None]
    return (key <= query) & (query < deleted_at.gather(1, order)[:, None, :])


def spine_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """SDPA, with a mask for the last queries only if it has rows for no more."""
    if attention_mask is not None and attention_mask.shape[2] != query.shape[2]:
        return _in_two(module, query, key, value, attention_mask, **options), None
    attend = _sdpa_as_it_is if torch.is_grad_enabled() else _sdpa
    return attend(module, query, key, value, attention_mask, **options), None


# Compiled by Inductor, cuDNN's attention over these slices gave wrong gradients, or read outside its memory (torch 2.11).
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_two(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any) -> Tensor:
    first = query.shape[2] - attention_mask.shape[2]
    seen = _sdpa(module, query[:, :, :first], key[:, :, :first], value[:, :, :first], None, **options)
    if first == query.shape[2]:
        return seen
    return torch.cat([seen, _sdpa(module, query[:, :, first:], key, value, attention_mask, **options)], dim=1)


def _sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Tensor:
    """As transformers has it, but not by cuDNN where its gradients may be NaN   (pytorch/pytorch#196678)."""
    has_half_a_tile = attention_mask is not None and key.shape[2] % CUDNN_TILE == CUDNN_TILE // 2
    if has_half_a_tile and query.is_cuda and torch.is_grad_enabled():
        with sdpa_kernel(NOT_CUDNN):
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]


#: Recomputed layers must take the compiled code they took before: all break off here, whether their rows are divided or not.
_sdpa_as_it_is = torch.compiler.disable(_sdpa)

AttentionInterface.register(SPINE, spine_attention)
AttentionMaskInterface.register(SPINE, sdpa_mask)
