"""Rotary position embeddings as one Triton kernel forward and one backward, instead of five torch kernels each."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Heads per program: they share their angles.
HEADS = 4


@triton.jit
@no_type_check
def _rotate_kernel(
    x, cos, sin, out, x_row, x_head, x_time, out_row, out_head, out_time, angle_row, angle_time, heads, times,
    HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: rotate the first half of the dimensions against the second, or back if `BACK`."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    row, time, at = token // times, token % times, tl.arange(0, WIDTH)[None, :]
    angle, is_angle = row * angle_row + time * angle_time + at, at < HALF
    cos_first = tl.load(cos + angle, mask=is_angle, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + angle + HALF, mask=is_angle, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angle, mask=is_angle, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + angle + HALF, mask=is_angle, other=0.0).to(tl.float32)
    if BACK:
        sin_first, sin_second = -sin_second, -sin_first
    is_there = is_angle & (head < heads)
    read = x + row * x_row + head * x_head + time * x_time + at
    first = tl.load(read, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(read + HALF, mask=is_there, other=0.0).to(tl.float32)
    written = out + row * out_row + head * out_head + time * out_time + at
    tl.store(written, (first * cos_first - second * sin_first).to(out.dtype.element_ty), mask=is_there)
    tl.store(written + HALF, (second * cos_second + first * sin_second).to(out.dtype.element_ty), mask=is_there)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    x, cos, sin = x if x.stride(3) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
    rows, heads, times, dim = x.shape
    out = torch.empty_like(x)
    grid = (rows * times, triton.cdiv(heads, HEADS))
    with torch.cuda.device_of(x):
        _rotate_kernel[grid](
            x, cos, sin, out, *x.stride()[:3], *out.stride()[:3], times * dim if len(cos) > 1 else 0, dim, heads, times,
            HALF=dim // 2, WIDTH=triton.next_power_of_2(dim // 2), HEADS=HEADS, BACK=back, num_warps=1,
        )  # fmt: skip
    return out


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(gradients[0], *ctx.saved_tensors, back=True), None, None


def can_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel fits: [row, head, time, dim] on a GPU, angles of shape [row or 1, time, dim] that are not learnt."""
    rows, _, times, dim = x.shape if x.dim() == 4 else (0, 0, 0, 0)
    is_angle = cos.shape == sin.shape and tuple(cos.shape) in ((rows, times, dim), (1, times, dim))
    return x.is_cuda and x.numel() > 0 and is_angle and not cos.requires_grad


def rotate(
    x: Float[Tensor, "row head time dim"], cos: Float[Tensor, "#row time dim"], sin: Float[Tensor, "#row time dim"]
) -> Float[Tensor, "row head time dim"]:
    """x · cos + (−x₂, x₁) · sin, where x₁ and x₂ are the halves of x. No gradient for the angles."""
    rotated: Tensor = _Rotation.apply(x, cos, sin)
    return rotated
