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

    def close(self, logits: Tensor, slot: Tensor, size: Tensor) -> None:
        """Set the logits of the tokens that were deleted in each row's state to -inf, in place."""
        is_known = torch.arange(REMEMBERED, device=logits.device) < self.count[slot, size][:, None]
        # The smallest of the logit and ±inf: several entries may name one token.
        limits = torch.full_like(is_known, torch.inf, dtype=logits.dtype).masked_fill_(is_known, -torch.inf)
        logits.scatter_reduce_(1, self.tokens[slot, size].long(), limits, reduce="amin")

    def update(self, slot: Tensor, size: Tensor, top: Tensor, pops: Tensor, pushes: Tensor) -> None:
        """After an action in states of `size` tokens: remember `top` where it was deleted; a new state starts with none."""
        below = torch.where(pops, size - 1, 0)
        count = self.count[slot, below]
        self.tokens[slot, below, count % REMEMBERED] = top.to(self.tokens.dtype)
        self.count[slot, below] = count + 1
        # A tensor of zeros: a number would be copied from the host, which a CUDA graph can't do.
        self.count[slot, torch.where(pushes, size + 1, 0)] = torch.zeros_like(size)


def keep_open(
    logits: Tensor,
    deleted: DeletedTokens,
    slot: Tensor,
    size: Tensor,
    *,
    min_p: float,
    bkspc: int,
    ends: Tensor,
    eos: int,
    may_delete: Tensor,
    is_leaf: Tensor,
) -> None:
    """Set the logits of the actions that a search does not take to -inf, in place.

    A token is open if it was not deleted in the state and its probability is at least `min_p` of the likeliest token's; where
    `is_leaf`, only a token of `ends` can be open. A row that `may_delete` chooses among the open tokens and `<bkspc>`, and must
    delete if no token is open. Any other row chooses among all tokens that were not deleted, and ends if there are none.
    """
    own = logits[:, bkspc].clone()
    logits[:, bkspc] = -torch.inf
    least = logits.amax(1) + math.log(min_p)  # of all tokens, also of those deleted
    deleted.close(logits, slot, size)
    at_ends = logits[:, ends]
    bound = torch.where(may_delete, torch.where(is_leaf, torch.inf, least), -torch.inf)
    logits.masked_fill_(logits < bound[:, None], -torch.inf)
    open_ends = at_ends.masked_fill(at_ends < least[:, None], -torch.inf)
    logits[:, ends] = torch.where((may_delete & is_leaf)[:, None], open_ends, logits[:, ends])
    has_none = logits.amax(1) == -torch.inf
    logits[:, bkspc] = torch.where(may_delete, torch.where(has_none, 0, own), -torch.inf)
    logits[:, eos] = torch.where(has_none & ~may_delete, 0, logits[:, eos])
