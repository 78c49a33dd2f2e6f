"""A stack of keys and values for each row: a push writes over what was popped (§4.1).

Column j of a row holds the j-th token of its state. A deletion moves the row's top and nothing else: the cache has no holes and is
no longer than the longest state. Needs torch and transformers alone: `Policy.export` writes this file beside a checkpoint.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache


def _in_attention_dtype(states: Tensor) -> Tensor:
    """Cast to autocast's dtype: rotary embeddings leave keys in float32."""
    device = states.device.type
    is_cast = states.dtype == torch.float32 and torch.is_autocast_enabled(device)
    return states.to(torch.get_autocast_dtype(device)) if is_cast else states


class StackCache(Cache):
    """Keys and values of each layer, [row, head, column, dim]; a row's column j belongs to the j-th token of its state."""

    def __init__(self, rows: int, columns: int) -> None:
        """An empty cache. A layer's memory is allocated at its first write."""
        super().__init__(layers=[])
        self.rows, self.columns = rows, columns
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.row = self.column = torch.empty(0)
        self.width = 0

    def point(self, row: Tensor, column: Tensor, width: int) -> None:
        """Set where the next pass writes: one new token of each row at `column`, or prompts from column 0 if `column` is 2-D.

        A single token attends to the first `width` columns, a prompt to itself.
        """
        self.row, self.column, self.width = row, column, width

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write new keys and values in place; return the keys and values that the new tokens attend to."""
        states = (_in_attention_dtype(key_states), _in_attention_dtype(value_states))
        if layer_idx not in self.stored:
            sizes = [(self.rows, s.shape[1], self.columns, s.shape[3]) for s in states]
            self.stored[layer_idx] = (states[0].new_zeros(sizes[0]), states[1].new_zeros(sizes[1]))
        stored = self.stored[layer_idx]
        if self.column.ndim == 2:
            for whole, new in zip(stored, states, strict=True):
                whole[self.row, :, : new.shape[2]] = new
            return states
        self.write(stored, states)
        rows = len(self.row)  # the first ones
        return stored[0][:rows, :, : self.width], stored[1][:rows, :, : self.width]

    def write(self, stored: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
        """Write one token of each row at its column."""
        for whole, part in zip(stored, new, strict=True):
            whole[self.row, :, self.column] = part[:, :, 0]

    def select(self, kept: Tensor) -> None:
        """Keep the rows `kept` and free the others."""
        self.rows = len(kept)
        for layer, (keys, values) in self.stored.items():  # layer by layer: two copies of all would not fit
            self.stored[layer] = keys[kept], values[kept]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Columns before those that the next pass writes."""
        return 0 if self.column.ndim == 2 else self.width - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the next pass's first query: `get_seq_length`."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """A mask's number of columns, and the index of its first."""
        return self.get_seq_length(layer_idx) + query_length, 0
