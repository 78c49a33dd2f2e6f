"""Triton kernels for one new token in each row over a cache of ragged lengths: attention, and writing keys and values.

Every row reads only the columns it has. torch's kernels read the whole cache; FlexAttention doesn't, but must be compiled for
each length.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

#: Minimum grid size; below it, split columns.
MIN_PROGRAMS = 128


@triton.jit
@no_type_check
def _ragged_kernel(
    query, keys, values, out, log_sum, column, scale, window,
    query_row, query_head, key_row, key_head, key_column, out_split, out_row, out_head, sum_split, sum_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, PRECISE: tl.constexpr, USES_DOT: tl.constexpr,
):  # fmt: skip
    """One row, one key head and its GROUP query heads, one of SPLITS parts of the columns."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(column + row).to(tl.int32) + 1
    first = tl.maximum(length - window, 0)
    part = tl.cdiv(tl.cdiv(length - first, COLUMNS), SPLITS) * COLUMNS
    begin = first + split * part
    end = tl.minimum(begin + part, length)
    of_group = tl.arange(0, HEADS)
    at = tl.arange(0, WIDTH)
    is_head = of_group < GROUP
    is_dim = at < DIM
    heads = head * GROUP + of_group
    asked = query + row * query_row + heads[:, None] * query_head + at[None, :]
    q = tl.load(asked, mask=is_head[:, None] & is_dim[None, :], other=0.0)
    key_start = keys + row * key_row + head * key_head
    value_start = values + row * key_row + head * key_head
    largest = tl.full([HEADS], float("-inf"), PRECISE)
    total = tl.zeros([HEADS], PRECISE)
    mean = tl.zeros([HEADS, WIDTH], PRECISE)
    for start in range(begin, end, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_seen = columns < end
        stored = columns[:, None] * key_column + at[None, :]
        is_there = is_seen[:, None] & is_dim[None, :]
        k = tl.load(key_start + stored, mask=is_there, other=0.0)
        v = tl.load(value_start + stored, mask=is_there, other=0.0)
        if USES_DOT:
            score = tl.dot(q, tl.trans(k))
        else:
            score = tl.sum(q[:, None, :].to(PRECISE) * k[None, :, :].to(PRECISE), 2)
        score = tl.where(is_seen[None, :], score * scale, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        shrink = tl.exp(largest - larger)
        weight = tl.exp(score - larger[:, None])
        total = total * shrink + tl.sum(weight, 1)
        if USES_DOT:
            seen = tl.dot(weight.to(v.dtype), v)
        else:
            seen = tl.sum(weight[:, :, None] * v[None, :, :].to(PRECISE), 1)
        mean = mean * shrink[:, None] + seen
        largest = larger
    mean = mean / tl.where(total > 0, total, 1)[:, None]  # a split without columns has weight 0
    written = out + split * out_split + row * out_row + heads[:, None] * out_head + at[None, :]
    tl.store(written, mean.to(out.dtype.element_ty), mask=is_head[:, None] & is_dim[None, :])
    if SPLITS > 1:
        tl.store(log_sum + split * sum_split + row * sum_row + heads, largest + tl.log(total), mask=is_head)


@triton.jit
@no_type_check
def _write_kernel(
    keys, values, new_keys, new_values, column, key_row, key_head, key_column, new_row, new_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The key and the value of one head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDTH)
    is_dim = at < DIM
    stored = row * key_row + head * key_head + tl.load(column + row) * key_column + at
    new = row * new_row + head * new_head + at
    tl.store(keys + stored, tl.load(new_keys + new, mask=is_dim), mask=is_dim)
    tl.store(values + stored, tl.load(new_values + new, mask=is_dim), mask=is_dim)


def write_columns(
    keys: Float[Tensor, "row head column dim"],
    values: Float[Tensor, "row head column dim"],
    new_keys: Float[Tensor, "row head 1 dim"],
    new_values: Float[Tensor, "row head 1 dim"],
    column: Int[Tensor, "row"],
) -> None:
    """Write one token of each row at its column, in place."""
    rows, heads, _, dim = new_keys.shape
    if new_values.stride() != new_keys.stride():
        new_values = new_values.contiguous()
        new_keys = new_keys.contiguous()
    assert keys.stride() == values.stride()
    assert keys.stride(3) == new_keys.stride(3) == 1
    _write_kernel[(rows, heads)](
        keys, values, new_keys, new_values, column, *keys.stride()[:3], *new_keys.stride()[:2],
        DIM=dim, WIDTH=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use for tiles: 80 % of 227 KiB on Hopper, of 99 KiB on a desktop GPU."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return int(0.8 * getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def ragged_attention(
    query: Float[Tensor, "row head 1 dim"],
    keys: Float[Tensor, "row key_head column dim"],
    values: Float[Tensor, "row key_head column dim"],
    column: Int[Tensor, "row"],
    scale: float,
    window: int | None = None,
) -> Float[Tensor, "row head 1 dim"]:
    """softmax(scale · q·kᵀ) v over columns j ≤ `column` of each row, or the last `window` of them."""
    rows, heads, _, dim = query.shape
    key_heads = keys.shape[1]
    group = heads // key_heads
    splits = min(16, triton.next_power_of_2(triton.cdiv(MIN_PROGRAMS, rows * key_heads)))
    uses_dot = query.dtype in (torch.bfloat16, torch.float16)
    precise = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty(splits, rows, heads, dim, dtype=query.dtype if splits == 1 else precise, device=query.device)
    log_sum = torch.empty(splits, rows, heads, dtype=precise, device=query.device)
    width = triton.next_power_of_2(max(dim, 16))
    columns = (64 if width <= 128 else 32) if uses_dot else 16
    tile = 2 * columns * width * query.element_size()  # of keys and values
    assert keys.stride() == values.stride()
    assert keys.stride(3) == query.stride(3) == 1
    _ragged_kernel[(rows, key_heads, splits)](
        query, keys, values, out, log_sum, column, scale, keys.shape[2] if window is None else window,
        query.stride(0), query.stride(1), *keys.stride()[:3], *out.stride()[:3], *log_sum.stride()[:2],
        GROUP=group, HEADS=max(16 if uses_dot else 1, triton.next_power_of_2(group)), DIM=dim,
        WIDTH=width, COLUMNS=columns, SPLITS=splits,
        PRECISE=tl.float64 if precise == torch.float64 else tl.float32, USES_DOT=uses_dot, num_warps=4,
        num_stages=3 if 3 * tile <= _shared_memory(query.device) else 2,
    )  # fmt: skip
    if splits > 1:
        return (out * log_sum.softmax(0)[..., None]).sum(0).to(query.dtype)[:, :, None]
    return out[0][:, :, None]
