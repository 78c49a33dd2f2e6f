"""`Sampling`: how actions are chosen and when a row ends. Torch is imported on use: `--help` reads the fields and is quick."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from sequencematch.policy.decoding.choice import Choice


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments, for editors and type checkers."""

    max_new_tokens: int
    max_actions: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    protect_prompt: bool
    ban_deleted: bool
    backspace_bias: float
    stop_tokens: Sequence[int]
    logits_processor: Any


@dataclass(frozen=True)
class Sampling:
    """How actions are chosen and when a row ends.

    `max_new_tokens` limits the net length, `max_actions` the number of actions: 4 · `max_new_tokens` + 1 by default.
    `temperature` 0 is greedy. A row's random numbers depend only on `seed`, the row's number and the action's number.
    `protect_prompt` keeps `<bkspc>` from deleting the prompt. `ban_deleted` keeps a token that was just deleted from being
    chosen again in the same state. `backspace_bias` is added to the logit of `<bkspc>`. A token of `stop_tokens` ends a row in
    place of `<eos>` and is not written; the row then counts as `truncated`, since its last action is not `<eos>`.
    """

    max_new_tokens: int = field(default=64, metadata={"help": "Longest completion in tokens, net of deletions."})
    max_actions: int | None = field(
        default=None, metadata={"help": "Most actions, deletions counted. Default: 4 max-new-tokens + 1."}
    )
    temperature: float = field(default=1.0, metadata={"help": "0 is greedy."})
    top_k: int | None = field(default=None, metadata={"help": "Choose among the k likeliest actions."})
    top_p: float | None = field(
        default=None, metadata={"help": "Choose among the likeliest actions that together have this probability."}
    )
    min_p: float | None = field(
        default=None,
        metadata={"help": "Choose among actions with at least this share of the likeliest one's probability."},
    )
    seed: int | None = field(default=None, metadata={"help": "The same seed gives the same actions."})
    protect_prompt: bool = field(default=False, metadata={"help": "Don't delete into the prompt."})
    ban_deleted: bool = field(default=False, metadata={"help": "Don't write a token again where it was just deleted."})
    backspace_bias: float = field(
        default=0.0, metadata={"help": "Added to the logit of <bkspc>: more deletes more, and -inf never deletes."}
    )
    stop_tokens: Sequence[int] = field(
        default=(), metadata={"help": "Token ids that end a row in place of <eos>, and are not written."}
    )
    logits_processor: Any = field(
        default=None,
        metadata={"help": "Called with each row's tokens and logits, before temperature, top-k and so on."},
    )

    def __new__(cls, *_: Any, **options: Any) -> "Sampling":
        """Refuse a name that is not a field, and say which field was likely meant."""
        names = [known.name for known in fields(cls)]
        for name in options:
            if name not in names:
                near = " or ".join(map(repr, difflib.get_close_matches(name, names, n=2)))
                raise TypeError(f"`{name}` is not a field of `Sampling`{f'; did you mean {near}?' if near else '.'}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"`max_new_tokens` must be at least 1: there would be nothing to write. Got {self.max_new_tokens}."
            )
        if self.max_actions is not None and self.max_actions < 1:
            raise ValueError(f"`max_actions` must be at least 1. Got {self.max_actions}.")
        object.__setattr__(self, "temperature", float(self.temperature))
        if not self.temperature >= 0:
            raise ValueError(f"`temperature` must be 0 (greedy) or positive. Got {self.temperature}.")
        if self.temperature == 0 and any(x is not None for x in (self.top_k, self.top_p, self.min_p, self.seed)):
            raise ValueError(
                "`top_k`, `top_p`, `min_p` and `seed` would be ignored at temperature 0, which is greedy. Leave them out."
            )

    @property
    def action_limit(self) -> int:
        """The most actions a row may take."""
        return self.max_actions if self.max_actions is not None else 4 * self.max_new_tokens + 1

    def choice(self) -> "Choice":
        """How logits are changed before an action is chosen.

        First `logits_processor`, row by row; then temperature, top-k, top-p and min-p, on all rows at once.
        """
        import torch
        from torch import Tensor
        from transformers import (
            LogitsProcessorList,
            MinPLogitsWarper,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        from sequencematch.policy.decoding.choice import Choice, row_by_row

        given, warpers = self.logits_processor, LogitsProcessorList()
        if self.temperature not in (0, 1):
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p is not None:
            warpers.append(MinPLogitsWarper(self.min_p))

        def warp(logits: Tensor) -> Tensor:
            return warpers(logits.new_empty(len(logits), 0, dtype=torch.long), logits)

        return Choice(
            self.temperature == 0,
            None if given is None else row_by_row(given),
            warp if warpers else None,
            self.ban_deleted,
            self.backspace_bias,
        )
