"""How an action is chosen from logits: greedily, or by inverse-CDF sampling with a row's own random numbers.

Needs torch and numpy alone: `Policy.export` writes this file beside a checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

#: (tokens of each row's state, logits of its actions) → the logits to choose from.
Process = Callable[[list[list[int]], Tensor], Tensor]
#: Logits → the logits to choose from, whatever the state.
Warp = Callable[[Tensor], Tensor]
#: Tokens per block in two-level inverse-CDF sampling.
SAMPLING_BLOCK = 256


@dataclass(frozen=True)
class Choice:
    """Greedy or random choice, after changes to the logits: `backspace_bias`, `ban_deleted`, `process`, `warp`, in this order.

    `search_min_p` is the `min_p` of a search, which comes last and leaves the actions that are open; None without a search.
    """

    greedy: bool = False
    process: Process | None = None
    warp: Warp | None = None
    ban_deleted: bool = False
    backspace_bias: float = 0.0
    search_min_p: float | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether actions are chosen from other logits than the model's."""
        return bool(self.process or self.warp or self.ban_deleted or self.backspace_bias or self.search_min_p)


def row_by_row(processor: Callable[[Tensor, Tensor], Tensor]) -> Process:
    """A logits processor of transformers, called with one row's live tokens at a time: rows differ in length."""

    def process(states: list[list[int]], logits: Tensor) -> Tensor:
        rows = zip(states, logits, strict=True)
        return torch.cat([processor(torch.tensor([state], device=logits.device), row[None]) for state, row in rows])

    return process


def logit_scale_and_cap(config: Any) -> tuple[float, float | None]:
    """The scale and the cap of a model's logits after its output layer: Cohere and Granite scale them, Gemma 2 caps them."""
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return float(scale), getattr(config, "final_logit_softcapping", None)


def uniforms(seed: int, row: int, count: int) -> Tensor:
    """The random numbers of a row, one for each action: a function of seed and row, not of the batch.

    Philox has a stream for every 128-bit key; torch's generator keeps 32 bits of its seed on a CPU.
    """
    stream = numpy.random.Philox(key=row << 64 | seed % 2**64)
    return torch.from_numpy(numpy.random.Generator(stream).random(count))


def choose(logits: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """An action for each row, and log Σ exp logits.

    Greedy without random numbers, else by inverting the cumulative distribution. Sums are in float64: first over blocks of
    the vocabulary, then inside the block that holds the random number.
    """
    if uniform is None:
        return logits.argmax(-1), logits.logsumexp(-1)
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).exp_()
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % SAMPLING_BLOCK)).unflatten(
        1, (-1, SAMPLING_BLOCK)
    )
    upto = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = upto[:, -1:]
    target = uniform[:, None] * total
    block = torch.searchsorted(upto, target, right=True).clamp_(max=upto.shape[1] - 1)
    before = torch.where(block > 0, upto.gather(1, (block - 1).clamp_(min=0)), 0)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, SAMPLING_BLOCK)).squeeze(1).to(torch.float64).cumsum(-1)
    # Rounding may put the number after the block's last token of positive probability: stay at that token.
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    place = block * SAMPLING_BLOCK + torch.minimum(torch.searchsorted(inside, target - before, right=True), last)
    action = place.squeeze(1).clamp_(max=logits.shape[-1] - 1)  # NaN lands past the end, and is reported later
    return action, (largest + total.log()).squeeze(1)


def check(log_probs: Tensor, values: Tensor) -> None:
    """Refuse actions that were chosen from NaN logits, or where every action had probability 0."""
    if bool(values.isnan().any()):
        raise ValueError("The model's logits are NaN: nothing can be chosen from them. Check its weights and dtype.")
    if bool(log_probs.isnan().any()):
        raise ValueError(
            "`logits_processor` must leave an action possible: nothing can be chosen from NaN or -inf alone."
        )
