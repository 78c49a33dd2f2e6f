"""When generation batches are due: a function of counters, so that batches can be begun before training needs them   (App. E)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Outlook:
    """What is known at the beginning of a step: rollouts made and drawn so far, and how many each later step draws.

    `first_step` is the first that draws, `last_step` the last one of the run; `batch` rollouts are made at a time, and each is
    drawn `reuse` times on average. A step draws `per_step` at most, so a batch is due at the predicted step or later.
    """

    step: int
    first_step: int
    last_step: int
    made: int
    drawn: int
    per_step: int
    batch: int
    reuse: float

    @property
    def lasts(self) -> int:
        """Steps that a batch lasts, rounded up."""
        return math.ceil(self.batch * self.reuse / self.per_step)

    def due(self, first: int) -> int:
        """The step that needs the batch that begins with rollout `first`: the first one that would draw more than reuse · first."""
        steps = math.floor((self.reuse * first - self.drawn) / self.per_step) if first else 0
        return max(self.step, self.first_step) + max(steps, 0)

    def upcoming(self, lead: int) -> Iterator[tuple[int, int]]:
        """The batches that will be due within `lead` steps, and in this run: the number of the first rollout, and the step."""
        first = self.made
        while (due := self.due(first)) <= min(self.step + lead, self.last_step):
            yield first, due
            first += self.batch
