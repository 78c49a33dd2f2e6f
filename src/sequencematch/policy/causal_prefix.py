"""Attention over rows reordered so that most queries need no mask.

The *causal prefix* of a row is the deepest stack it ever holds. Fed first, each of its nodes attends to exactly the nodes before
it, since nothing below a node can be popped while the node is on the stack. Kernels are fastest at such causal attention without
a mask. The other nodes, deleted ones and further trajectories of a packed row, come after the prefix and have a mask:

    query   in the prefix   j ≤ i, no mask
            after it        j ≤ i < deleted_at[j], in the original order
"""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

#: The name of this attention implementation in transformers.
CAUSAL_PREFIX = "sequencematch_causal_prefix"
#: The prefix is cut to a multiple of a sixteenth of the row: few shapes, since kernels are planned for each.
PARTS = 16
#: cuDNN's gradients are wrong under a mask whose last tile of keys is half full, where a row's scores are very negative.
CUDNN_TILE = 128
#: cuDNN plans each new shape for tens of milliseconds. Below this number of keys another kernel takes no longer to attend.
MIN_CUDNN_KEYS = 512
NOT_CUDNN = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_prefix_order(deleted_at: Int[Tensor, "row node"]) -> tuple[Int[Tensor, "row node"], int] | None:
    """The order of nodes with the causal prefix first, and its length, which all rows share; None if below a quarter of a row."""
    nodes = deleted_at.shape[1]
    node = torch.arange(nodes, device=deleted_at.device).repeat(len(deleted_at), 1)
    dead = torch.searchsorted(deleted_at.sort(1).values, node, right=True)
    top = (node + 1 - dead).argmax(1, keepdim=True)  # where the stack is deepest
    in_prefix = (node <= top) & (top < deleted_at)
    rank = in_prefix.cumsum(1)
    step = max(1, nodes // PARTS)
    length = int(rank[:, -1].min()) // step * step
    if length < nodes / 4 or length < 2:
        return None
    is_later = ~(in_prefix & (rank <= length))
    return is_later.to(torch.uint8).argsort(dim=1, stable=True), length


def reordered_mask(
    deleted_at: Int[Tensor, "row node"], order: Int[Tensor, "row node"], first: int
) -> Bool[Tensor, "row query node"]:
    """True where a node of the reordered row, from place `first` on, attends to another."""
    key, query = order[:, None, :], order[:, first:, None]
    return (key <= query) & (query < deleted_at.gather(1, order)[:, None, :])


def causal_prefix_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """SDPA. A mask with fewer rows than queries is for the last queries; the queries before them are the causal prefix."""
    if attention_mask is not None and attention_mask.shape[2] != query.shape[2]:
        return _prefix_and_rest(module, query, key, value, attention_mask, **options), None
    attend = _uncompiled_sdpa if torch.is_grad_enabled() else _sdpa
    return attend(module, query, key, value, attention_mask, **options), None


# Under Inductor cuDNN's attention over these slices gave wrong gradients or read outside its memory (torch 2.11).
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _prefix_and_rest(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> Tensor:
    first = query.shape[2] - attention_mask.shape[2]
    seen = _sdpa(module, query[:, :, :first], key[:, :, :first], value[:, :, :first], None, **options)
    if first == query.shape[2]:
        return seen
    return torch.cat([seen, _sdpa(module, query[:, :, first:], key, value, attention_mask, **options)], dim=1)


def _sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Tensor:
    """SDPA as transformers calls it, without cuDNN in short rows and where its gradients may be NaN   (pytorch/pytorch#196678)."""
    keys = key.shape[2]
    avoids = attention_mask is not None and (keys < MIN_CUDNN_KEYS or keys % CUDNN_TILE == CUDNN_TILE // 2)
    if avoids and query.is_cuda and torch.is_grad_enabled():
        with sdpa_kernel(NOT_CUDNN):
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]


#: Not compiled: layers with and without a prefix must break the graph at the same place. Otherwise gradient checkpointing may
#: recompute one kind with the compiled code of the other.
_uncompiled_sdpa = torch.compiler.disable(_sdpa)

AttentionInterface.register(CAUSAL_PREFIX, causal_prefix_attention)
AttentionMaskInterface.register(CAUSAL_PREFIX, sdpa_mask)
