"""Rotary position embeddings of single tokens as one Triton kernel instead of five of torch's."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor


@triton.jit
@no_type_check
def _rotate_kernel(
    x, cos, sin, out, x_row, x_head, angle_row, heads, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One head of one row: its first half and its second, turned against each other."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDTH)
    half: tl.constexpr = DIM // 2
    is_there = at < half
    start = x + row * x_row + head * x_head
    first = tl.load(start + at, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(start + half + at, mask=is_there, other=0.0).to(tl.float32)
    angle = row * angle_row + at
    cos_first = tl.load(cos + angle, mask=is_there, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angle, mask=is_there, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + half + angle, mask=is_there, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + half + angle, mask=is_there, other=0.0).to(tl.float32)
    written = out + (row * heads + head) * DIM + at
    tl.store(written, (first * cos_first - second * sin_first).to(out.dtype.element_ty), mask=is_there)
    tl.store(written + half, (second * cos_second + first * sin_second).to(out.dtype.element_ty), mask=is_there)


def rotate(
    x: Float[Tensor, "row head 1 dim"], cos: Float[Tensor, "row 1 dim"], sin: Float[Tensor, "row 1 dim"]
) -> Float[Tensor, "row head 1 dim"]:
    """x · cos + (−x₂, x₁) · sin, with x₁ and x₂ the halves of x."""
    rows, heads, _, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert x.stride(3) == cos.stride(2) == sin.stride(2) == 1
    assert cos.stride(0) == sin.stride(0)
    _rotate_kernel[(rows, heads)](
        x, cos, sin, out, x.stride(0), x.stride(1), cos.stride(0) if len(cos) > 1 else 0, heads,
        DIM=dim, WIDTH=triton.next_power_of_2(dim // 2), num_warps=1,
    )  # fmt: skip
    return out
