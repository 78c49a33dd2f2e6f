"""Hidden states → ℓ(a|s) and V(s), all that Eq. 4 needs, in slabs of the vocabulary instead of dense logits."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

#: Logits in memory at a time: 128 MiB in float32.
SLAB_ELEMENTS = 2**25
#: Most exponentials kept for the backward pass of a trained unembedding: 1 GiB in float32.
KEPT_ELEMENTS = 2**28


@dataclass(frozen=True)
class Unembedding:
    """A model's output layer: ℓ(x|s) = cap · tanh(scale · (h·w_x + b_x) / cap).

    Few models have a bias, a scale (Cohere, Granite) or a cap (Gemma 2).
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

    For upstream gradients g_ℓ and g_V, ∂/∂logits = g_V · softmax + g_ℓ · onehot. Logits are computed in slabs of the vocabulary.
    A frozen unembedding keeps ∂V/∂h = softmax · W, one vector per node, and no logits. A trained one keeps exponentials, up to
    `KEPT_ELEMENTS`; beyond that the backward pass computes them again.
    """
    weight, bias = unembedding.weight, unembedding.bias
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        has_backward = torch.is_grad_enabled()  # always off inside `forward`
        return _SlabHead.apply(hidden, weight.to(hidden.dtype), bias, visit, action, unembedding, has_backward)


class _SlabHead(torch.autograd.Function):
    """The two outputs of `action_logits_and_values`, with exponentials kept or recomputed, or ∂V/∂h kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        visit: Tensor,
        action: Tensor,
        unembedding: Unembedding,
        has_backward: bool,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        is_trained = has_backward and any(ctx.needs_input_grad[1:3])
        keeps_slope = has_backward and ctx.needs_input_grad[0] and not is_trained
        keeps_weights = is_trained and unembedding.softcap is None and len(hidden) * len(weight) <= KEPT_ELEMENTS
        kept = []
        largest = torch.full((len(hidden), 1), -torch.inf, dtype=precise, device=hidden.device)
        total = torch.zeros_like(largest)
        value_slope = torch.zeros_like(hidden, dtype=precise) if keeps_slope else None
        for tokens in _slabs(hidden, weight):
            logits = _logits(hidden, weight, bias, tokens, unembedding)
            slope = unembedding.slope(logits) if keeps_slope else 1.0
            # log Σ exp with a running maximum: a larger logit rescales the sum so far.
            larger = torch.maximum(largest, logits.amax(1, keepdim=True))
            shrink = (largest - larger).exp()
            weights = logits.sub_(larger).exp_()
            total = total * shrink + weights.sum(1, keepdim=True)
            if value_slope is not None:
                _add_product(value_slope.mul_(shrink), _scaled(weights, slope).to(weight.dtype), weight[tokens])
            if keeps_weights:
                kept.append((weights.to(weight.dtype), larger))
            largest = larger
        value = (largest + total.log()).squeeze(1)
        if value_slope is not None:
            value_slope = value_slope.div_(total).to(hidden.dtype)
        raw = (hidden[visit].to(precise) * weight[action]).sum(1)
        chosen = unembedding.transform(raw if bias is None else raw + bias[action])
        ctx.unembedding, ctx.kept = unembedding, kept
        ctx.save_for_backward(hidden, weight, bias, visit, action, value, chosen, value_slope)
        return chosen, value

    @staticmethod
    def backward(ctx: Any, chosen_grad: Tensor, value_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, visit, action, value, chosen, value_slope = ctx.saved_tensors
        unembedding, precise = ctx.unembedding, value.dtype
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        raw_grad = chosen_grad * unembedding.slope(chosen)
        if value_slope is not None:
            hidden_grad = (value_slope * value_grad[:, None]).index_add_(0, visit, raw_grad[:, None] * weight[action])
            return hidden_grad.to(hidden.dtype), *[None] * 6
        hidden_grad = torch.zeros_like(hidden, dtype=precise) if needs_hidden else None
        weight_grad = torch.empty_like(weight) if needs_weight else None
        bias_grad = torch.empty_like(bias) if needs_bias else None
        kept, ctx.kept = ctx.kept, []  # overwritten below; a second backward pass recomputes them
        for number, tokens in enumerate(_slabs(hidden, weight)):
            if kept:
                weights, largest = kept[number]
                factor = (largest - value[:, None]).exp() * value_grad[:, None] * unembedding.scale
                logits_grad = weights.mul_(factor) if weights.dtype == precise else weights * factor
            else:
                logits = _logits(hidden, weight, bias, tokens, unembedding)
                slope = unembedding.slope(logits)
                logits_grad = _scaled(logits.sub_(value[:, None]).exp_(), slope).mul_(value_grad[:, None])
            column = action - tokens.start
            inside = (column >= 0) & (column < logits_grad.shape[1])
            place = torch.where(inside, visit * logits_grad.shape[1] + column, 0)
            logits_grad.view(-1).index_add_(0, place, torch.where(inside, raw_grad, 0))
            if bias_grad is not None:
                bias_grad[tokens] = logits_grad.sum(0)
            logits_grad = logits_grad.to(weight.dtype)
            if hidden_grad is not None:
                _add_product(hidden_grad, logits_grad, weight[tokens])
            if weight_grad is not None:
                torch.mm(logits_grad.T, hidden, out=weight_grad[tokens])
        hidden_grad = None if hidden_grad is None else hidden_grad.to(hidden.dtype)
        return hidden_grad, weight_grad, bias_grad, *[None] * 4


def _slabs(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Slices of the vocabulary, of `SLAB_ELEMENTS` logits each over all nodes.

    Sizes are multiples of eight: unaligned matrix products run several times slower on a GPU.
    """
    size = max(1, SLAB_ELEMENTS // len(hidden) // 8) * 8
    return [slice(start, min(start + size, len(weight))) for start in range(0, len(weight), size)]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: slice, unembedding: Unembedding
) -> Float[Tensor, "node token"]:
    """The logits of a slab in float32 or better; a GPU's matrix product writes float32 directly."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.is_cuda and hidden.dtype != dtype:
        raw = torch.mm(hidden, weight[tokens].T, out_dtype=dtype)
    else:
        raw = (hidden @ weight[tokens].T).to(dtype)
    return unembedding.transform(raw if bias is None else raw + bias[tokens])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right, without a temporary where the dtypes agree."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _scaled(softmax: Tensor, slope: Tensor | float) -> Tensor:
    """softmax · ∂ℓ/∂raw, in place; nothing to do for a plain unembedding."""
    return softmax if isinstance(slope, float) and slope == 1 else softmax.mul_(slope)
