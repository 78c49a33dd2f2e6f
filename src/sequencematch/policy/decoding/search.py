"""Depth-first search in place: a row tries one token after another in a state, and deletes when none is left to try.

A token that was deleted in a state is closed there while that state is on the stack, so a row pushes each edge of the tree of
prefixes at most once. Needs torch alone: `Policy.export` writes this file beside a checkpoint.
"""

import math

import torch
from torch import Tensor

#: Deleted tokens that are remembered for each state. A search tries no more tokens than this in a state.
REMEMBERED = 32
#: Default of `min_p` in a search: a token is tried if its probability is at least this share of the likeliest token's.
MIN_P = 0.05


def action_limit(max_new_tokens: int, search: bool) -> int:
    """The most actions of a row, unless the caller says otherwise. A search needs room for its dead ends."""
    return (32 if search else 4) * max_new_tokens + 1


class DeletedTokens:
    """The tokens that were deleted in each state on the stack of each row: the latest `REMEMBERED` of a state.

    `tokens` is [slot, size of the state, place], `count` [slot, size of the state]. No state has size 0: writes to be ignored
    go there.
    """

    def __init__(self, slots: int, largest: int, device: torch.device) -> None:
        """No token deleted yet, in states of up to `largest` tokens."""
        self.tokens = torch.zeros(slots, largest + 1, REMEMBERED, dtype=torch.int32, device=device)
        self.count = torch.zeros(slots, largest + 1, dtype=torch.long, device=device)

    def select(self, kept: Tensor) -> None:
        """Keep the slots `kept`."""
        self.tokens, self.count = self.tokens[kept], self.count[kept]

    def is_full(self, slot: Tensor, size: Tensor) -> Tensor:
        """Whether no further token can be remembered in the state."""
        return self.count[slot, size] >= REMEMBERED

    def close(self, logits: Tensor, slot: Tensor, size: Tensor) -> Tensor:
        """The logits of each row's state, -inf for the tokens that were deleted in it."""
        is_known = torch.arange(REMEMBERED, device=logits.device) < self.count[slot, size][:, None]
        # The smallest of the logit and ±inf: several entries may name one token.
        limits = torch.full_like(is_known, torch.inf, dtype=logits.dtype).masked_fill_(is_known, -torch.inf)
        return logits.scatter_reduce(1, self.tokens[slot, size].long(), limits, reduce="amin")

    def update(self, slot: Tensor, size: Tensor, top: Tensor, pops: Tensor, pushes: Tensor) -> None:
        """After an action in states of `size` tokens: remember `top` where it was deleted; a new state starts with none."""
        below = torch.where(pops, size - 1, 0)
        count = self.count[slot, below]
        self.tokens[slot, below, count % REMEMBERED] = top.to(self.tokens.dtype)
        self.count[slot, below] = count + 1
        # A tensor of zeros: a number would be copied from the host, which a CUDA graph can't do.
        self.count[slot, torch.where(pushes, size + 1, 0)] = torch.zeros_like(size)


def open_actions(
    logits: Tensor,
    closed: Tensor,
    *,
    min_p: float,
    bkspc: int,
    ends: Tensor,
    eos: int,
    may_delete: Tensor,
    is_leaf: Tensor,
) -> Tensor:
    """The logits of each row with -inf for the actions that a search does not take.

    `closed` are the logits with -inf for tokens that were deleted in the state. A token is open if it is not closed and its
    probability is at least `min_p` of the likeliest token's; where `is_leaf`, only a token of `ends` is open. A row that
    `may_delete` chooses among the open tokens and `<bkspc>`, and must delete if no token is open. Any other row chooses among
    all tokens that are not closed, and ends if there are none.
    """
    tokens, children = logits.clone(), closed.clone()
    tokens[:, bkspc] = children[:, bkspc] = -torch.inf
    is_open = (children >= tokens.amax(1, keepdim=True) + math.log(min_p)) & (children > -torch.inf)
    is_end = torch.zeros_like(is_open[0]).index_fill(0, ends, True)
    is_open &= is_end | ~is_leaf[:, None]
    offered = children.masked_fill(may_delete[:, None] & ~is_open, -torch.inf)
    offered[:, bkspc] = torch.where(may_delete, torch.where(is_open.any(1), logits[:, bkspc], 0), -torch.inf)
    offered[:, eos] = torch.where(offered.amax(1) == -torch.inf, 0, offered[:, eos])
    return offered
