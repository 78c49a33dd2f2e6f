"""Tensors as one flat block of bytes, in which they travel to workers: from memory that may be shared or read-only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Tensors begin at multiples of this, so that they can be viewed in any dtype.
ALIGNMENT = 64


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in a block: dtype, shape and first byte of each, and the size of the block."""

    places: tuple[tuple[torch.dtype, tuple[int, ...], int], ...]
    size: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Layout":
        """One after another. The block has at least one byte, since an empty file can't be mapped into memory."""
        places, end = [], 0
        for tensor in tensors:
            places.append((tensor.dtype, tuple(tensor.shape), end))
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        return cls(tuple(places), max(end, 1))

    def views(self, block: Tensor) -> Iterator[Tensor]:
        """The tensors in a block, which share its memory."""
        for dtype, shape, start in self.places:
            count = torch.Size(shape).numel()
            yield block[start : start + count * dtype.itemsize].view(dtype).view(shape)


def pack(tensors: Sequence[Tensor], layout: Layout, block: Tensor | None) -> None:
    """Copy tensors into a block of bytes. Shards of FSDP2 are gathered: every process must call this, perhaps without a block."""
    places = [None] * len(tensors) if block is None else layout.views(block)
    for tensor, place in zip(tensors, places, strict=True):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if place is not None:
            place.copy_(whole.detach())


def unpack(block: Tensor, layout: Layout, tensors: Sequence[Tensor]) -> None:
    """Copy a block's tensors into others of the same shapes, which keep their addresses: captured CUDA graphs stay valid."""
    with torch.no_grad():
        for tensor, place in zip(tensors, layout.views(block), strict=True):
            tensor.copy_(place)
