"""The parameters that let a language model delete: one output row for `<bkspc>`, and the offset head (§6, App. E)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

#: Hidden size of the offset head   (App. E).
OFFSET_HIDDEN = 8


class Backspace(nn.Module):
    """The `<bkspc>` row of the unembedding, and a scalar offset of all logits of a state   (§6, App. E).

    `<bkspc>` is never an input, so it needs one output row and no change of the vocabulary: adapters, tied and quantised
    weights stay valid. The row starts as the mean of the unembedding's rows. By Jensen's inequality exp(h·w̄) is at most
    the mean of exp(h·w_x), so an untrained policy deletes with probability below 1/|X| in every state.

    The offset head is a two-layer GELU MLP on the hidden vector and the position. It shifts V and no probability, so sampling
    leaves it out. Its last layer starts at zero.
    """

    def __init__(self, hidden_size: int, max_positions: int) -> None:
        """A zero row and an offset of zero; positions are scaled by `max_positions`."""
        super().__init__()
        self.max_positions = max_positions
        self.row = nn.Parameter(torch.zeros(hidden_size))
        self.offset_in = nn.Linear(hidden_size + 1, OFFSET_HIDDEN)
        self.offset_out = nn.Linear(OFFSET_HIDDEN, 1)
        nn.init.zeros_(self.offset_out.weight)
        nn.init.zeros_(self.offset_out.bias)

    def offset_parameters(self) -> list[nn.Parameter]:
        """The parameters of the offset head: all except the row."""
        return [*self.offset_in.parameters(), *self.offset_out.parameters()]

    def reset_row(self, rows: Float[Tensor, "vocab hidden"]) -> None:
        """Start the row as the mean of `rows`."""
        with torch.no_grad():
            self.row.copy_(rows.float().mean(0))

    def raw_logit(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch"]:
        """h·w of the row, before the unembedding's scale and cap."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return (hidden.to(dtype) * self.row.to(dtype)).sum(-1)

    def offset(
        self, hidden: Float[Tensor, "*batch hidden"], position_ids: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """The scalar added to all logits of a state."""
        dtype = self.offset_in.weight.dtype
        position = position_ids.to(dtype) / self.max_positions
        features = torch.cat([hidden.to(dtype), position[..., None]], dim=-1)
        with torch.autocast(hidden.device.type, enabled=False):  # V is float32 whatever the model's dtype
            return self.offset_out(nn.functional.gelu(self.offset_in(features))).squeeze(-1)
