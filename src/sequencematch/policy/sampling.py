"""`Sampling`: how actions are chosen and when a row ends. Torch is imported on use: `--help` reads the fields and is quick."""

import difflib
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from sequencematch.policy.decoding.choice import Choice


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments, for editors and type checkers."""

    max_new_tokens: int
    min_new_tokens: int
    max_actions: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    protect_prompt: bool
    hold_back: int | None
    self_loops: bool
    ban_deleted: bool
    backspace_bias: float
    search: bool
    stop_tokens: Sequence[int]
    logits_processor: Any


#: Fields that may be None.
_OPTIONAL = frozenset({"max_actions", "temperature", "top_k", "top_p", "min_p", "seed", "hold_back"})
#: Fields with real numbers: what they must be, and the check. Logits divided by a smaller temperature would overflow.
_NUMBERS: Sequence[tuple[str, str, Callable[[float], bool]]] = (
    ("temperature", "0 (greedy), or a number of at least 1e-6", lambda x: x == 0 or 1e-6 <= x < math.inf),
    ("top_p", "a share above 0 and at most 1", lambda x: 0 < x <= 1),
    ("min_p", "a share in [0, 1]", lambda x: 0 <= x <= 1),
    ("backspace_bias", "a number, or -inf never to delete", lambda x: x < math.inf),
)


@dataclass(frozen=True)
class Sampling:
    """How actions are chosen and when a row ends.

    `max_new_tokens` limits the net length, `max_actions` the number of actions: 4 · `max_new_tokens` + 1 by default. Before
    `min_new_tokens` a row can't end, unless it has taken all its actions. `temperature` is 1 by default; 0 is greedy. A row's
    random numbers depend only on `seed`, the row's number and the action's number. `backspace_bias` is added to the logit of
    `<bkspc>`. `ban_deleted` keeps a token from being chosen again in a state where it was deleted, as long as that state is on
    the stack; of each state the last 32 deleted tokens are remembered.

    `search` is a depth-first search for an answer. In each state a row tries, one after another, the tokens whose probability
    is at least `min_p` (0.05 by default) of the likeliest token's, or deletes if `<bkspc>` is likelier; it must delete when it
    has tried them all, and at full length without `<eos>`. It is greedy by default; at a temperature it tries tokens at
    random, without replacement. It never deletes the prompt. Right after the prompt every token may be tried, but for 32 at most.
    It stops deleting while it still has the actions to write an answer: 32 · `max_new_tokens` + 1 actions by default.

    `protect_prompt` keeps `<bkspc>` from deleting the prompt. With `hold_back` = k a token with k more above it is never
    deleted, so a stream can send it: its text is append-only, k tokens late. Where nothing may be deleted, `<bkspc>` is not
    offered; `self_loops` offers it, as in the paper's dynamics, and it changes nothing.

    A token of `stop_tokens` ends a row in place of `<eos>` and is not written; the row then counts as `truncated`, since its
    last action is not `<eos>`.
    """

    max_new_tokens: int = field(default=64, metadata={"help": "Longest completion in tokens, net of deletions."})
    min_new_tokens: int = field(default=0, metadata={"help": "Shortest completion in tokens, net of deletions."})
    max_actions: int | None = field(
        default=None,
        metadata={"help": "Most actions, deletions counted. Default: 4 * max-new-tokens + 1, and 32 * … with search."},
    )
    temperature: float | None = field(default=None, metadata={"help": "0 is greedy. Default: 1, and 0 with search."})
    top_k: int | None = field(default=None, metadata={"help": "Choose among the k likeliest actions."})
    top_p: float | None = field(
        default=None, metadata={"help": "Choose among the likeliest actions that together have this probability."}
    )
    min_p: float | None = field(
        default=None,
        metadata={
            "help": "Choose among actions with at least this share of the likeliest one's probability. Default with search: 0.05."
        },
    )
    seed: int | None = field(default=None, metadata={"help": "The same seed gives the same actions."})
    protect_prompt: bool = field(default=False, metadata={"help": "Don't delete into the prompt."})
    hold_back: int | None = field(
        default=None, metadata={"help": "Don't delete a token with this many above it. Default: no such limit."}
    )
    self_loops: bool = field(
        default=False, metadata={"help": "Offer <bkspc> where nothing may be deleted, as in training rollouts."}
    )
    ban_deleted: bool = field(
        default=False, metadata={"help": "Don't write a token again in a state where it was deleted."}
    )
    backspace_bias: float = field(
        default=0.0, metadata={"help": "Added to the logit of <bkspc>: more deletes more, and -inf never deletes."}
    )
    search: bool = field(
        default=False,
        metadata={
            "help": "Try one token after another in each state; delete when none is left. The prompt is protected."
        },
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
        if self.temperature is None:
            object.__setattr__(self, "temperature", 0.0 if self.search else 1.0)
        for name, least in (
            ("max_new_tokens", 1),
            ("min_new_tokens", 0),
            ("max_actions", 1),
            ("hold_back", 0),
            ("top_k", 1),
            ("seed", None),
        ):
            self._set_whole(name, least)
        for name, expected, holds in _NUMBERS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, numbers.Real) or isinstance(value, bool) or not holds(float(value)):
                raise ValueError(f"`{name}` must be {expected}. Got {value!r}.")
            object.__setattr__(self, name, float(value))
        object.__setattr__(self, "stop_tokens", tuple(map(operator.index, self.stop_tokens)))
        ignored = [name for name in ("top_k", "top_p", "min_p", "seed") if getattr(self, name) is not None]
        if self.search:
            self._check_search()
            ignored = [name for name in ignored if name != "min_p"]
        if self.greedy and ignored:
            names = " and ".join(f"`{name}`" for name in ignored)
            raise ValueError(f"{names} would be ignored at temperature 0, which is greedy. Leave out what is ignored.")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"`min_new_tokens` must not exceed `max_new_tokens`. Got {self.min_new_tokens} and {self.max_new_tokens}."
            )
        if self.self_loops and self.hold_back is not None:
            raise ValueError("`self_loops` must be off with `hold_back`, whose floor moves. Leave one of them out.")

    def _check_search(self) -> None:
        for name in ("ban_deleted", "self_loops"):
            if getattr(self, name):
                raise ValueError(f"`{name}` must be left out with `search`, which never repeats a deleted token.")
        if self.hold_back is not None:
            raise ValueError("`hold_back` must be left out with `search`, which deletes back to the prompt.")
        if self.min_p == 0:
            raise ValueError("`min_p` must be above 0 with `search`, which would try every token. Got 0.")
        if self.backspace_bias == -math.inf:
            raise ValueError("`backspace_bias` must not be -inf with `search`, which has to delete.")
        if self.max_actions is not None and self.max_actions < self.max_new_tokens + 3:
            raise ValueError(
                f"`max_actions` must be at least `max_new_tokens` + 3 with `search`, or there is no room for a deletion. Got "
                f"{self.max_actions} and {self.max_new_tokens}."
            )
        object.__setattr__(self, "protect_prompt", True)

    def _set_whole(self, name: str, least: int | None) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        try:
            found = operator.index(value)
        except TypeError:
            found = None
        if found is None or isinstance(value, bool) or (least is not None and found < least):
            at_least = "" if least is None else f" of at least {least}"
            raise ValueError(f"`{name}` must be a whole number{at_least}. Got {value!r}.")
        object.__setattr__(self, name, found)

    @property
    def action_limit(self) -> int:
        """The most actions a row may take."""
        from sequencematch.policy.decoding.search import action_limit

        return self.max_actions if self.max_actions is not None else action_limit(self.max_new_tokens, self.search)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest action is chosen."""
        return self.temperature == 0

    def choice(self) -> "Choice":
        """How logits are changed before an action is chosen.

        First `logits_processor`, row by row; then temperature, top-k, top-p and min-p, on all rows at once; then `search`.
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
        from sequencematch.policy.decoding.search import MIN_P

        given, warpers = self.logits_processor, LogitsProcessorList()
        if self.temperature not in (0, 1):
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p is not None and not self.search:
            warpers.append(MinPLogitsWarper(self.min_p))

        def warp(logits: Tensor) -> Tensor:
            return warpers(logits.new_empty(len(logits), 0, dtype=torch.long), logits)

        return Choice(
            self.greedy,
            None if given is None else row_by_row(given),
            warp if warpers else None,
            self.ban_deleted,
            self.backspace_bias,
            (MIN_P if self.min_p is None else self.min_p) if self.search else None,
        )
