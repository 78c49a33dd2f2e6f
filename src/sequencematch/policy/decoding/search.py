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

    def close(self, logits: Tensor, slot: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Set the logits of the tokens that were deleted in each row's state to -inf, in place.

        Returns these tokens and the logits that they had, [row, `REMEMBERED`]; the logit is -inf in places without a token.
        """
        tokens = self.tokens[slot, size].long()
        is_known = torch.arange(REMEMBERED, device=logits.device) < self.count[slot, size][:, None]
        before = logits.gather(1, tokens).masked_fill_(~is_known, -torch.inf)
        # The smallest of the logit and ±inf: several entries may name one token.
        limits = torch.full_like(before, torch.inf).masked_fill_(is_known, -torch.inf)
        logits.scatter_reduce_(1, tokens, limits, reduce="amin")
        return tokens, before

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
    min_p: float | Tensor,
    bkspc: int,
    ends: Tensor,
    eos: int,
    may_delete: Tensor,
    only_ends: Tensor,
) -> Tensor:
    """Set the logits of the actions that a search does not take to -inf, in place. Returns which rows have nothing left to try.

    A token is open if it was not deleted in the state and, in a row that `may_delete`, its probability is at least `min_p` of the
    likeliest token's; with `only_ends`, if it is one of `ends` as well. A row that `may_delete` chooses among the open tokens
    and `<bkspc>`, and must delete if no token is open. Any other row chooses among the open tokens. If it has none, the tokens
    that were deleted are offered again; if there are none of these either, the row ends.
    """
    own = logits[:, bkspc].clone()
    logits[:, bkspc] = -torch.inf
    log_min_p = min_p.log() if isinstance(min_p, Tensor) else math.log(min_p)
    least = torch.where(may_delete, logits.amax(1) + log_min_p, -torch.inf)  # of all tokens, also of those deleted
    tokens, before = deleted.close(logits, slot, size)
    at_ends = logits[:, ends]
    logits.masked_fill_(logits < torch.where(only_ends, torch.inf, least)[:, None], -torch.inf)
    open_ends = at_ends.masked_fill(at_ends < least[:, None], -torch.inf)
    logits[:, ends] = torch.where(only_ends[:, None], open_ends, logits[:, ends])
    has_none = logits.amax(1) == -torch.inf
    logits[:, bkspc] = torch.where(may_delete, torch.where(has_none, 0, own), -torch.inf)
    is_stuck = has_none & ~may_delete
    logits.scatter_reduce_(1, tokens, before.masked_fill(~is_stuck[:, None], -torch.inf), reduce="amax")
    logits[:, eos] = torch.where(is_stuck & (before.amax(1) == -torch.inf), 0, logits[:, eos])
    return is_stuck
