"""Rows with settings of their own in one batch: a server's requests (§4.1).

Settings are tensors with an entry per slot, so one step serves all of them and a CUDA graph can replay it. A row's actions depend
on its own settings only; batch composition affects results only through rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sequencematch.policy.decoding.choice import Choice, choose
from sequencematch.policy.decoding.decoder import Decoder, Limits
from sequencematch.policy.decoding.search import MIN_P, DeletedTokens
from sequencematch.policy.sampling import Sampling

#: The most alternatives that are recorded for an action.
ALTERNATIVES = 20
#: The last actions of each row whose alternatives are kept: more than a row takes between two reads.
RING = 64
#: Stands for "no limit" in a tensor of whole numbers.
UNLIMITED = 2**40


@dataclass(frozen=True)
class RowSettings:
    """The settings of one row. Names as in `Sampling`; `prompt` tokens come before what the row wrote or was given."""

    prompt: int
    max_new_tokens: int
    max_actions: int
    min_new_tokens: int = 0
    greedy: bool = False
    temperature: float = 1.0  # 1 if greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    backspace_bias: float = 0.0
    ban_deleted: bool = False
    search_min_p: float | None = None
    protect_prompt: bool = False
    hold_back: int | None = None
    process: Callable[[Tensor, Tensor], Tensor] | None = None
    alternatives: int = 0

    @property
    def warps(self) -> bool:
        """Whether unlikely actions are left out, which takes a sort of the vocabulary."""
        return (self.top_k, self.top_p, self.min_p) != (None, None, None)


def row_settings(sampling: Sampling, prompt: int, alternatives: int = 0) -> RowSettings:
    """The settings of a row with a prompt of `prompt` tokens."""
    if sampling.self_loops or sampling.stop_tokens:
        name = "self_loops" if sampling.self_loops else "stop_tokens"
        raise ValueError(f"`{name}` must be left out: rows that share a batch with others don't have it.")
    if not 0 <= alternatives <= ALTERNATIVES:
        raise ValueError(f"`alternatives` must be from 0 to {ALTERNATIVES}. Got {alternatives}.")
    search_min_p = (MIN_P if sampling.min_p is None else sampling.min_p) if sampling.search else None
    assert sampling.temperature is not None
    return RowSettings(
        prompt=prompt,
        max_new_tokens=sampling.max_new_tokens,
        max_actions=sampling.action_limit,
        min_new_tokens=sampling.min_new_tokens,
        greedy=sampling.greedy,
        temperature=sampling.temperature or 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=None if sampling.search else sampling.min_p,
        backspace_bias=sampling.backspace_bias,
        ban_deleted=sampling.ban_deleted,
        search_min_p=search_min_p,
        protect_prompt=sampling.protect_prompt,
        hold_back=sampling.hold_back,
        process=sampling.logits_processor,
        alternatives=alternatives,
    )


#: What a step reads of the settings, as tensors with an entry per slot.
_WHOLE: Mapping[str, Callable[[RowSettings], int]] = MappingProxyType(
    {
        "prompt": lambda s: s.prompt,
        "max_new_tokens": lambda s: s.max_new_tokens,
        "max_actions": lambda s: s.max_actions,
        "min_new_tokens": lambda s: s.min_new_tokens,
        "hold_back": lambda s: UNLIMITED if s.hold_back is None else s.hold_back,
        "top_k": lambda s: UNLIMITED if s.top_k is None else s.top_k,
        "greedy": lambda s: s.greedy,
        "ban_deleted": lambda s: s.ban_deleted,
        "search": lambda s: s.search_min_p is not None,
        "protect_prompt": lambda s: s.protect_prompt,
    }
)
_REAL: Mapping[str, Callable[[RowSettings], float]] = MappingProxyType(
    {
        "temperature": lambda s: s.temperature,
        "top_p": lambda s: 1.0 if s.top_p is None else s.top_p,
        "min_p": lambda s: 0.0 if s.min_p is None else s.min_p,
        "backspace_bias": lambda s: s.backspace_bias,
        "search_min_p": lambda s: 1.0 if s.search_min_p is None else s.search_min_p,
    }
)


class Uses(NamedTuple):
    """What the rows of a batch need besides a temperature and a bias. Each combination is a CUDA graph of its own."""

    warps: bool = False
    bans: bool = False
    searches: bool = False
    alternatives: bool = False


class Snapshot(NamedTuple):
    """What rows did since the last snapshot: how many actions, and their records, [slot, action]."""

    rows: list[int | None]
    running: Tensor
    new: Tensor  # how many actions
    chosen: Tensor
    numbers: (
        Tensor  # [4, slot, action]: log-probability when chosen, own log-probability, V, own log-probability of <bkspc>
    )
    alternatives: tuple[Tensor, Tensor] | None  # actions and their own log-probabilities, [slot, action, alternative]
    copied: Any  # a CUDA event, or None

    def wait(self) -> None:
        """Wait until the copies to the host are done."""
        if self.copied is not None:
            self.copied.synchronize()


def warp_rows(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Temperature, top-k, top-p and min-p, in this order, with an entry per row: what transformers' warpers do, row by row.

    A row with `top_k` of the vocabulary's size or more, `top_p` 1 and `min_p` 0 is only divided by its temperature.
    """
    dtype = logits.dtype
    logits = logits / temperature.to(dtype)[:, None]
    ordered, places = logits.sort(-1)
    least = ordered.gather(1, (logits.shape[1] - top_k).clamp(min=0)[:, None])
    logits, ordered = (values.masked_fill(values < least, -torch.inf) for values in (logits, ordered))
    upto = ordered.softmax(-1).cumsum(-1)
    is_rare = (upto <= (1 - top_p).to(dtype)[:, None]) & (top_p < 1)[:, None]
    is_rare[:, -1:] = torch.zeros_like(is_rare[:, -1:])
    logits = logits.masked_fill(is_rare.scatter(1, places, is_rare), -torch.inf)
    probability = logits.softmax(-1)
    return logits.masked_fill(probability < min_p.to(dtype)[:, None] * probability.amax(-1, keepdim=True), -torch.inf)


class SlotDecoder(Decoder):
    """`Decoder` whose rows have settings of their own. Rows start in the lowest free slots: empty ones above cost nothing."""

    #: Whether to read a snapshot before the next steps, not while they run.
    reads_at_once = True

    def __init__(
        self,
        model: Any,
        head: Callable[[Tensor], Tensor],
        *,
        eos: int,
        ends: frozenset[int],
        bkspc: int,
        slots: int,
        depth: int,
        max_actions: int,
    ) -> None:
        """Slots for rows of up to `depth` tokens, prompt included, and up to `max_actions` actions."""
        limits = Limits(eos, ends, bkspc, max_new_tokens=1, max_actions=max_actions)
        super().__init__(model, head, limits, Choice(), slots=slots, longest_prompt=depth - 1)
        self.bkspc = bkspc
        self.deleted: DeletedTokens = DeletedTokens(slots, self.depth, self.device)
        self.settings: list[RowSettings | None] = [None] * slots
        self.failures: dict[int, Exception] = {}  # slot → the error of its logits processor
        self.uses = Uses()
        self.whole = torch.ones(len(_WHOLE), slots, dtype=torch.long, device=self.device)
        self.real = torch.ones(len(_REAL), slots, dtype=torch.float64, device=self.device)
        self.seen = torch.zeros_like(self.taken)
        self.own_log_probs, self.bkspc_log_probs = torch.zeros_like(self.log_probs), torch.zeros_like(self.log_probs)
        kept = (slots, RING + 1, min(ALTERNATIVES, bkspc + 1))
        self.likely = torch.zeros(kept, dtype=torch.long, device=self.device)
        self.likely_log_probs = torch.zeros(kept, dtype=torch.float64, device=self.device)

    def start(
        self,
        slots: Sequence[int],
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        settings: Sequence[RowSettings],
        uniform: Sequence[Tensor],
    ) -> None:
        """Start rows in free slots. `tokens` are the prompt and what is written behind it; `uniform` has a number per action."""
        for slot, chosen in zip(slots, settings, strict=True):
            self.settings[slot] = chosen
            self.failures.pop(slot, None)
        self._find_uses()
        self.fill(slots, rows, tokens, uniform)

    @torch.no_grad()
    def fill(
        self, slots: Sequence[int], rows: Sequence[int], prompts: Sequence[Sequence[int]], uniform: Sequence[Tensor]
    ) -> None:
        """Start rows whose settings are set."""
        super().fill(slots, rows, prompts, uniform)
        slot, chosen = torch.tensor(slots, device=self.device), [self._settings(slot) for slot in slots]
        for target, columns in ((self.whole, _WHOLE), (self.real, _REAL)):
            values = torch.tensor([[column(s) for s in chosen] for column in columns.values()], dtype=target.dtype)
            target[:, slot] = values.to(self.device)
        self.prompt[slot] = self._whole("prompt")[slot]
        self.floor[slot] = torch.where(self._whole("protect_prompt")[slot] > 0, self.prompt[slot], 1)
        self._raise_floor(slot)
        self.seen[slot] = 0

    def _keep_uniforms(self, slots: Sequence[int], uniform: Sequence[Tensor]) -> None:
        """A row that takes fewer actions than others has fewer random numbers, and a greedy one has none."""
        for slot, drawn in zip(slots, uniform, strict=True):
            self.uniform[slot, : len(drawn)] = drawn.to(self.device)

    def free_slot(self, slot: int) -> None:
        """End a slot's row, if it is still running, and make the slot free."""
        self.is_running[slot] = self.has_pushed[slot] = False
        self.numbers[slot] = self.settings[slot] = None
        self._find_uses()

    def wipe(self, slot: int) -> None:
        """Clear what a row has left in the cache: masked columns with NaN would spoil the next row of the slot."""
        for layer in self.cache.stored.values():
            for stored in layer:
                stored[slot] = 0
        self.hidden[slot] = 0

    @property
    def occupied(self) -> int:
        """Slots up to the last one with a row."""
        return max((slot + 1 for slot, number in enumerate(self.numbers) if number is not None), default=0)

    def advance(self) -> None:
        """One round: rows that have not pushed choose; if there is none, all push before."""
        slot = self.slot[: self.occupied]
        choosing = slot[self.is_running[slot] & ~self.has_pushed[slot]]
        if not len(choosing):
            self.push()
            choosing = slot[self.is_running[slot]]
        if len(choosing):
            self.act(choosing)

    @torch.no_grad()
    def push(self) -> None:
        """One forward pass over the slots in use."""
        slot = self.slot[: self.occupied]
        size, is_running = self.size[slot], self.is_running[slot]
        column = torch.where(self.has_pushed[slot], size - 1, torch.where(is_running, size, 0))
        hidden = self._attend(self.tokens[slot, column][:, None], column)
        self.hidden[slot, column] = hidden[:, 0]
        self.has_pushed.fill_(False)

    def snapshot(self) -> Snapshot:
        """The actions since the last call. On a GPU nothing is waited for: copies to the host are under way."""
        slots = self.slot[: self.occupied]
        taken, seen = self.taken[slots], self.seen[slots]
        count = taken - seen
        width = RING // 2 if self.device.type == "cuda" else int(count.max()) if len(slots) else 0
        at = seen[:, None] + torch.arange(width, device=self.device)
        inside = at.clamp(max=self.actions)
        records = (self.log_probs, self.own_log_probs, self.values, self.bkspc_log_probs)
        alternatives = None
        if self.uses.alternatives:
            place = slots[:, None], at % RING
            alternatives = self._to_host(self.likely[place]), self._to_host(self.likely_log_probs[place])
        self.seen[slots] = taken
        found = (
            self.numbers[: len(slots)],
            self._to_host(self.is_running[slots]),
            self._to_host(count),
            self._to_host(self.chosen[slots].gather(1, inside)),
            self._to_host(torch.stack([record[slots].gather(1, inside) for record in records])),
            alternatives,
        )
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self.device))
        return Snapshot(*found, copied)

    def _to_host(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True)

    def _find_uses(self) -> None:
        known = [s for s in self.settings if s is not None]
        self.uses = Uses(
            any(s.warps for s in known),
            any(s.ban_deleted for s in known),
            any(s.search_min_p is not None for s in known),
            any(s.alternatives for s in known),
        )

    def _settings(self, slot: int) -> RowSettings:
        found = self.settings[slot]
        assert found is not None
        return found

    def _whole(self, name: str) -> Tensor:
        return self.whole[list(_WHOLE).index(name)]

    def _real(self, name: str) -> Tensor:
        return self.real[list(_REAL).index(name)]

    def _most(self, these: Any) -> tuple[Tensor, Tensor]:
        return self._whole("max_new_tokens")[these], self._whole("max_actions")[these]

    def _raise_floor(self, these: Any) -> None:
        deepest = self.size[these] - self._whole("hold_back")[these]
        self.floor[these] = torch.maximum(self.floor[these], deepest)

    def _remember(self, slot: Tensor, stays: Tensor | None, pops: Tensor, pushes: Tensor) -> None:
        if self.uses.bans or self.uses.searches:
            super()._remember(slot, stays, pops, pushes)

    def _choose(
        self, logits: Tensor, slot: Tensor, size: Tensor, taken: Tensor, acts: Tensor, at_floor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `Decoder` does, in the same order, with the settings of each row. Also records what the model itself says."""
        these = slice(None) if slot is self.slot else slot  # a view if all rows are meant
        value, bkspc = logits.logsumexp(-1), self.bkspc
        own_bkspc = logits[:, bkspc] - value
        at = torch.where(acts, taken, self.actions)
        if self.uses.alternatives:
            likely, place = logits.topk(self.likely.shape[-1]), torch.where(acts, taken % RING, RING)
            self.likely[slot, place] = likely.indices
            self.likely_log_probs[slot, place] = (likely.values - value[:, None]).double()
        own = logits  # but for actions that can't be chosen, and for <bkspc>
        own[:, bkspc] += self._real("backspace_bias")[these].to(own.dtype)
        own[:, bkspc].masked_fill_(at_floor, -torch.inf)
        too_early = size - self.prompt[these] < self._whole("min_new_tokens")[these]
        own[:, self.all_ends] = own[:, self.all_ends].masked_fill(too_early[:, None], -torch.inf)
        if self.uses.bans:
            closed = own.clone()
            self.deleted.close(closed, slot, size)
            logits = torch.where(self._whole("ban_deleted")[these][:, None] > 0, closed, own)
        logits = self._process(logits, slot)
        temperature = self._real("temperature")[these]
        if self.uses.warps:
            shares = (self._real(name)[these] for name in ("top_p", "min_p"))
            logits = warp_rows(logits, temperature, self._whole("top_k")[these], *shares)
        else:
            logits = logits / temperature.to(logits.dtype)[:, None]
        stays = None
        if self.uses.searches:
            searches, opened = self._whole("search")[these] > 0, logits.clone()
            stays = self._search(opened, self._real("search_min_p")[these].to(logits.dtype), slot, acts) & searches
            logits = torch.where(searches[:, None], opened, logits)
        drawn, normaliser = choose(logits, self.uniform[slot, taken])
        action = torch.where(self._whole("greedy")[these] > 0, logits.argmax(-1), drawn)
        chosen = action[:, None]
        log_prob = logits.gather(1, chosen).squeeze(1) - normaliser
        own_log_prob = torch.where(action == bkspc, own_bkspc, own.gather(1, chosen).squeeze(1) - value)
        self.own_log_probs[slot, at] = own_log_prob.double()
        self.bkspc_log_probs[slot, at] = own_bkspc.double()
        return action, log_prob, value, stays

    def _process(self, logits: Tensor, slot: Tensor) -> Tensor:
        """Logits after each row's own processor, which no captured step has. An error of a processor concerns its row alone."""
        if not any(s is not None and s.process is not None for s in self.settings):
            return logits
        rows = []
        for place, state, row in zip(slot.tolist(), self._states(slot), logits, strict=True):
            chosen, changed = self.settings[place], row[None]
            if chosen is not None and chosen.process is not None and place not in self.failures:
                try:
                    changed = chosen.process(torch.tensor([state], device=self.device), changed.clone())
                    if changed.shape != (1, len(row)):
                        raise ValueError(
                            f"`logits_processor` must return one logit per action, [1, {len(row)}]. "
                            f"Got {list(changed.shape)}."
                        )
                except Exception as error:  # whatever a caller's function raises ends the caller's row
                    self.failures[place], changed = error, row[None]
            rows.append(changed.to(row))
        return torch.cat(rows)
