"""`SlotDecoder` on a GPU: a step is a CUDA graph, one for each combination of features that the running rows use."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sequencematch.policy.changes import lock_of
from sequencematch.policy.decoding.cuda_graphs import GraphDecoder
from sequencematch.policy.decoding.decoder import Decoder
from sequencematch.policy.decoding.slots import SlotDecoder, Uses

#: Steps between two reads by the host: fewer are a shorter wait for each token, more are less work for the host.
SERVED_STEPS = 4


class GraphSlotDecoder(SlotDecoder, GraphDecoder):
    """Rows with settings of their own, on captured steps.

    Temperature, bias and limits are tensors that every graph reads. Sorting (top-k, top-p, min-p), the memory of deleted
    tokens, search and alternatives cost time in every row, so a graph has them only if a running row uses them. A new
    combination is captured when it first occurs.
    """

    graphs: dict[Uses, torch.cuda.CUDAGraph]
    reads_at_once = False

    def fill(
        self, slots: Sequence[int], rows: Sequence[int], prompts: Sequence[Sequence[int]], uniform: Sequence[Tensor]
    ) -> None:
        """Start rows in free slots; capture the step before the first."""
        with torch.cuda.device(self.device), lock_of(self.model):
            super().fill(slots, rows, prompts, uniform)
        started = [(slot, self._settings(slot), len(prompt)) for slot, prompt in zip(slots, prompts, strict=True)]
        left = {slot: min(s.prompt + s.max_new_tokens - size + 1, s.max_actions) for slot, s, size in started}
        self.due = {**self.due, **left}
        if self.graph is not None and not hasattr(self, "graphs"):
            self.graphs = {self.uses: self.graph}

    def advance(self) -> None:
        """Enqueue some steps without waiting for the device."""
        with torch.cuda.device(self.device), lock_of(self.model):
            if self.is_uncaptured:
                SlotDecoder.advance(self)
                return
            if self.uses not in self.graphs:
                self._try_to_capture()  # warming up takes two steps of the running rows
                if self.graph is None or self.is_uncaptured:
                    return
                self.graphs[self.uses] = self.graph
            steps = self._steps()
            for _ in range(steps):
                self.graphs[self.uses].replay()
        self._count(steps)

    def _steps(self) -> int:
        """Steps until the next read; they are read at once if the last row is to end with them, so that none runs for nothing."""
        left = self._left()
        last = max(left, default=0)
        # Whether a row has ended is known one read later. A row that was to end before that has deleted.
        deletes = any(steps <= -SERVED_STEPS for steps in left)
        self.reads_at_once = not deletes and 0 < last <= SERVED_STEPS
        return last if self.reads_at_once else SERVED_STEPS

    def push(self) -> None:
        """Over all slots: the shapes of a graph are fixed."""
        if self.is_uncaptured:
            SlotDecoder.push(self)
        else:
            Decoder.push(self)
