"""Rows for an engine to decode, and what it tells about them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sequencematch.policy.decoding.choice import uniforms
from sequencematch.policy.sampling import Sampling


class QueueFullError(Exception):
    """No room for more waiting rows."""


class ClosedError(Exception):
    """The engine takes no new rows: it is shutting down, or has failed."""


class RowFailedError(Exception):
    """A row can't go on: NaN logits, or an error in its logits processor."""


class Actions(NamedTuple):
    """Actions of a row in order, each with what the model said: log p(a|s), V(s), log p(<bkspc>|s), likeliest actions.

    Probabilities are the model's own, before temperature, bias, search and so on.
    """

    chosen: list[int]
    log_probs: list[float]
    values: list[float]
    bkspc_log_probs: list[float]
    alternatives: list[list[tuple[int, float]]]  # empty without alternatives


class Update(NamedTuple):
    """News of a row: more actions, whether it has ended, and the error that ended it."""

    actions: Actions
    ended: bool = False
    error: Exception | None = None


NOTHING = Actions([], [], [], [], [])


@dataclass(eq=False)
class Job:
    """One row to decode. `deliver` is called by the engine's thread with each `Update` and must return at once.

    `prefix` holds tokens that are already written behind the prompt and may be deleted. `row` picks the random numbers, as the
    row's number in `policy.generate` does.
    """

    prompt: Sequence[int]
    sampling: Sampling
    deliver: Callable[[Update], None]
    prefix: Sequence[int] = ()
    row: int = 0
    alternatives: int = 0
    timeout_s: float | None = None
    deadline: float | None = field(default=None, init=False)
    slot: int | None = field(default=None, init=False)
    is_over: bool = field(default=False, init=False)


@dataclass
class Counts:
    """What an engine has done so far."""

    actions: int = 0
    deletions: int = 0
    forward_passes: int = 0
    rejected: int = 0
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("done", "cancelled", "timeout", "error"), 0))


def random_numbers(job: Job) -> Tensor:
    """One for each action; none if the row is greedy."""
    sampling = job.sampling
    if sampling.greedy:
        return torch.empty(0, dtype=torch.float64)
    assert sampling.seed is not None
    return uniforms(sampling.seed, job.row, sampling.action_limit)
