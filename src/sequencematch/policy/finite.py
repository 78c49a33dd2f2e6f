"""NaN and infinity in weights, found before anything is saved."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def non_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the tensors that hold NaN or infinity; of a sharded tensor only this process's part is read.

    `aminmax` propagates NaN and makes no copy of the tensor, unlike `isfinite`.
    """
    found: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        part = tensor.detach()
        part = part.to_local() if hasattr(part, "to_local") else part
        if part.is_floating_point() and part.numel():
            part = part.half() if part.element_size() == 1 else part  # float8 has no `aminmax`
            found.append((name, torch.stack(torch.aminmax(part)).isfinite().all()))
    return [name for name, is_finite in found if not is_finite]


def named(names: Sequence[str]) -> str:
    """A few of the names, for an error."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def refuse_non_finite(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse to save weights that hold NaN or infinity."""
    if wrong := non_finite(tensors):
        raise ValueError(
            f"`policy` must have finite weights to be saved. Got NaN or infinity in {named(wrong)}. Go back to an earlier "
            f"checkpoint."
        )
