"""Hidden states → action logits and values, without ever holding [position, vocabulary] (Eq. 4 needs ℓ(a|s) and V(s) alone)."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

#: How many logits are in memory at a time: 128 MiB in float32.
CHUNK_ELEMENTS = 2**25


@dataclass(frozen=True)
class Unembedding:
    """A model's output layer: ℓ(x|s) = cap · tanh(scale · (h·w_x + b_x) / cap), the cap and the bias being rare.

    `scale` is Cohere's and Granite's, `softcap` Gemma 2's.
    """

    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, "vocab"] | None = None
    scale: float = 1.0
    softcap: float | None = None

    def transform(self, raw: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Scale and cap h·w + b."""
        scaled = raw * self.scale if self.scale != 1 else raw
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)

    def slope(self, logit: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"] | float:
        """∂ transform / ∂ raw, from the transformed logit."""
        return self.scale if self.softcap is None else self.scale * (1 - (logit / self.softcap) ** 2)

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """All logits, dense, in float32 or better."""
        raw = torch.nn.functional.linear(hidden, self.weight, self.bias)
        return self.transform(raw.to(torch.promote_types(raw.dtype, torch.float32)))


def action_logits_and_values(
    hidden: Float[Tensor, "node hidden"],
    unembedding: Unembedding,
    visit: Int[Tensor, "visit"],
    action: Int[Tensor, "visit"],
) -> tuple[Float[Tensor, "visit"], Float[Tensor, "node"]]:
    """ℓ(a|s) of each visit, at the node `visit` with token `action`, and V(s) = log Σ_x exp ℓ(x|s) of each node   (Eq. 4).

    For upstream gradients g_ℓ and g_V, ∂/∂logits = g_V · softmax + g_ℓ · onehot. Logits are made in chunks of nodes and
    dropped. Where the unembedding is trained they are made again in the backward pass; where it is frozen, ∂V/∂h =
    softmax · W is kept instead, one vector per node, and nothing is computed twice.
    """
    weight, bias = unembedding.weight, unembedding.bias
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return _ChunkedHead.apply(hidden, weight.to(hidden.dtype), bias, visit, action, unembedding)


class _ChunkedHead(torch.autograd.Function):
    """The two outputs of `action_logits_and_values`, with logits recomputed or their gradient kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        visit: Tensor,
        action: Tensor,
        unembedding: Unembedding,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        keeps_slope = ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:3])
        value = torch.empty(len(hidden), dtype=precise, device=hidden.device)
        value_slope = torch.empty_like(hidden) if keeps_slope else None
        for rows in _chunks(len(hidden), len(weight)):
            logits = unembedding.transform(_linear(hidden[rows], weight, bias, precise))
            slope = unembedding.slope(logits) if keeps_slope else 1.0
            # log Σ exp by hand: in place, and with e^(ℓ − max) at hand for the slope.
            largest = logits.amax(1, keepdim=True)
            total = logits.sub_(largest).exp_().sum(1, keepdim=True)
            value[rows] = (largest + total.log()).squeeze(1)
            if value_slope is not None:
                value_slope[rows] = (_scaled(logits, slope).to(weight.dtype) @ weight) / total
        raw = (hidden[visit].to(precise) * weight[action]).sum(1)
        chosen = unembedding.transform(raw if bias is None else raw + bias[action])
        ctx.unembedding = unembedding
        ctx.save_for_backward(hidden, weight, bias, visit, action, value, chosen, value_slope)
        return chosen, value

    @staticmethod
    def backward(ctx: Any, chosen_grad: Tensor, value_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, visit, action, value, chosen, value_slope = ctx.saved_tensors
        unembedding, precise = ctx.unembedding, value.dtype
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden, dtype=precise) if needs_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=precise) if needs_weight else None
        bias_grad = torch.zeros_like(bias, dtype=precise) if needs_bias else None
        if value_slope is not None:
            hidden_grad = value_slope * value_grad[:, None]
        else:
            for rows in _chunks(len(hidden), len(weight)):
                logits = unembedding.transform(_linear(hidden[rows], weight, bias, precise))
                slope = unembedding.slope(logits)
                softmax = _scaled(logits.sub_(value[rows, None]).exp_(), slope).to(weight.dtype)
                upstream = value_grad[rows, None]
                if hidden_grad is not None:
                    hidden_grad[rows] = (softmax @ weight) * upstream
                if weight_grad is not None:
                    scaled = (hidden[rows] * upstream).to(weight.dtype)
                    if weight_grad.dtype == scaled.dtype:
                        weight_grad.addmm_(softmax.T, scaled)  # without a temporary as large as the weight
                    else:
                        weight_grad += softmax.T @ scaled
                if bias_grad is not None:
                    bias_grad += (softmax * upstream).sum(0)
        raw_grad = chosen_grad * unembedding.slope(chosen)
        if hidden_grad is not None:
            hidden_grad = hidden_grad.to(precise).index_add(0, visit, raw_grad[:, None] * weight[action])
        if weight_grad is not None:
            weight_grad.index_add_(0, action, raw_grad[:, None] * hidden[visit])
        if bias_grad is not None:
            bias_grad.index_add_(0, action, raw_grad)
        return (
            None if hidden_grad is None else hidden_grad.to(hidden.dtype),
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            None,
            None,
            None,
        )


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    raw = (hidden @ weight.T).to(dtype)
    return raw if bias is None else raw + bias


def _scaled(softmax: Tensor, slope: Tensor | float) -> Tensor:
    """softmax · ∂ℓ/∂raw, in place; nothing to do for a plain unembedding."""
    return softmax if isinstance(slope, float) and slope == 1 else softmax.mul_(slope)


def _chunks(rows: int, vocab: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocab)
    return [slice(start, start + size) for start in range(0, rows, size)]
