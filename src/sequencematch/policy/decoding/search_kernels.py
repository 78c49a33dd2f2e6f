"""Triton kernels for a step of a search: which actions are open in every row, and what a row remembers afterwards.

They do what `keep_open` and `DeletedTokens.update` in search.py do, in two kernels instead of about seventy: on a GPU a decoding
step of a small model is bound by the number of its kernels.
"""

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sequencematch.policy.decoding.search import REMEMBERED, DeletedTokens

#: The most tokens of a row that a program reads at a time.
BLOCK = 16384


@triton.jit
@no_type_check
def _open_kernel(
    logits, log_min_p, tokens, count, size, prompt, floor, taken, acts, ends, stays,
    logits_row, tokens_row, tokens_state, count_row, actions, bkspc, eos, num_ends, max_new_tokens, max_actions,
    REMEMBERED: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. The names are those of `search.keep_open` and of `Decoder._search`."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(acts + row) == 0:  # in most steps nearly all rows have acted in the first of two rounds
        return
    start = logits + row * logits_row
    state = tl.load(size + row)
    room = max_new_tokens - (state - tl.load(prompt + row))
    may = (state > tl.load(floor + row)) & (max_actions - tl.load(taken + row) >= room + 3)
    known = tl.load(count + row * count_row + state)
    is_full = known >= REMEMBERED
    only_ends = (room <= 0) | (may & is_full)
    nothing = float("-inf")
    own = tl.load(start + bkspc)
    at = tl.arange(0, BLOCK)
    likeliest = tl.full([BLOCK], nothing, own.dtype)
    for first in range(0, actions, BLOCK):
        token = first + at
        likeliest = tl.maximum(
            likeliest, tl.load(start + token, mask=(token < actions) & (token != bkspc), other=nothing)
        )
    least = tl.where(may, tl.max(likeliest, 0) + tl.load(log_min_p), nothing)
    place = tl.arange(0, REMEMBERED)
    is_known = place < known
    deleted = tl.load(tokens + row * tokens_row + state * tokens_state + place).to(tl.int64)
    before = tl.load(start + deleted, mask=is_known, other=nothing)
    tl.debug_barrier()  # all of `before` is read: several places may name one token
    tl.store(start + deleted, tl.full([REMEMBERED], nothing, own.dtype), mask=is_known)
    tl.store(start + bkspc, nothing)
    tl.debug_barrier()
    of_ends = tl.arange(0, ENDS)
    end = tl.load(ends + of_ends, mask=of_ends < num_ends, other=0)
    at_ends = tl.load(start + end, mask=of_ends < num_ends, other=nothing)
    open_ends = tl.where(at_ends < least, nothing, at_ends)
    tl.debug_barrier()
    threshold = tl.where(only_ends, float("inf"), least)
    likeliest = tl.full([BLOCK], nothing, own.dtype)
    for first in range(0, actions, BLOCK):
        token = first + at
        logit = tl.load(start + token, mask=token < actions, other=nothing)
        kept = tl.where(logit < threshold, nothing, logit)
        tl.store(start + token, kept, mask=token < actions)
        likeliest = tl.maximum(likeliest, kept)
    largest = tl.maximum(tl.max(likeliest, 0), tl.where(only_ends, tl.max(open_ends, 0), nothing))
    tl.debug_barrier()
    if only_ends:
        tl.store(start + end, open_ends, mask=of_ends < num_ends)
    has_none = largest == nothing
    is_stuck = has_none & (may == 0)
    tl.store(start + bkspc, tl.where(may, tl.where(has_none, 0.0, own), nothing))
    tl.debug_barrier()
    if is_stuck:
        tl.store(start + deleted, before, mask=is_known)
        tl.debug_barrier()
        if tl.max(before, 0) == nothing:
            tl.store(start + eos, 0.0)
    tl.store(stays + row, (is_stuck | is_full).to(tl.int8))


@triton.jit
@no_type_check
def _remember_kernel(
    tokens, count, floor, stack, size, stays, pops, pushes,
    tokens_row, tokens_state, count_row, stack_row, rows,
    REMEMBERED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """All rows of a block. A row that deletes remembers its top; one that writes starts a new state."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    state = tl.load(size + row, mask=is_row, other=1)
    deletes = is_row & (tl.load(pops + row, mask=is_row, other=0) != 0)
    writes = is_row & (tl.load(pushes + row, mask=is_row, other=0) != 0)
    below = row * count_row + state - 1
    known = tl.load(count + below, mask=deletes, other=0)
    top = tl.load(stack + row * stack_row + state - 1, mask=deletes, other=0)
    remembered = tokens + row * tokens_row + (state - 1) * tokens_state + known % REMEMBERED
    tl.store(remembered, top.to(tl.int32), mask=deletes)
    tl.store(count + below, known + 1, mask=deletes)
    tl.store(count + row * count_row + state + 1, tl.zeros_like(state), mask=writes)
    lowest = tl.load(floor + row, mask=is_row, other=0)
    rises = writes & (state <= lowest) & (tl.load(stays + row, mask=is_row, other=0) != 0)
    tl.store(floor + row, lowest + 1, mask=rises)


def keep_open(
    logits: Float[Tensor, "row action"],
    deleted: DeletedTokens,
    size: Int[Tensor, "row"],
    prompt: Int[Tensor, "row"],
    floor: Int[Tensor, "row"],
    taken: Int[Tensor, "row"],
    acts: Bool[Tensor, "row"],
    *,
    min_p: float,
    bkspc: int,
    ends: Int[Tensor, "end"],
    eos: int,
    max_new_tokens: int,
    max_actions: int,
) -> Bool[Tensor, "row"]:
    """As `Decoder._search`, for all slots in order: returns the rows in which nothing is left to try, or to remember.

    Rows that do not act are left as they are, and what is returned for them is arbitrary.
    """
    log_min_p = torch.full((), math.log(min_p), dtype=logits.dtype, device=logits.device)
    assert logits.stride(1) == deleted.tokens.stride(2) == deleted.count.stride(1) == 1
    stays = torch.empty_like(size, dtype=torch.bool)
    _open_kernel[(len(logits),)](
        logits, log_min_p, deleted.tokens, deleted.count, size, prompt, floor, taken, acts.view(torch.int8), ends,
        stays.view(torch.int8),
        logits.stride(0), *deleted.tokens.stride()[:2], deleted.count.stride(0), logits.shape[1], bkspc, eos, len(ends),
        max_new_tokens, max_actions,
        REMEMBERED=REMEMBERED, ENDS=triton.next_power_of_2(len(ends)),
        BLOCK=min(BLOCK, triton.next_power_of_2(logits.shape[1])), num_warps=16,
    )  # fmt: skip
    return stays


def remember(
    deleted: DeletedTokens,
    floor: Int[Tensor, "row"],
    stack: Int[Tensor, "row column"],
    size: Int[Tensor, "row"],
    stays: Bool[Tensor, "row"],
    pops: Bool[Tensor, "row"],
    pushes: Bool[Tensor, "row"],
) -> None:
    """As `Decoder._remember`, after an action in states of `size` tokens of `stack`."""
    rows = len(size)
    _remember_kernel[(triton.cdiv(rows, 128),)](
        deleted.tokens, deleted.count, floor, stack, size, stays.view(torch.int8), pops.view(torch.int8),
        pushes.view(torch.int8), *deleted.tokens.stride()[:2], deleted.count.stride(0), stack.stride(0), rows,
        REMEMBERED=REMEMBERED, ROWS=128, num_warps=4,
    )  # fmt: skip
