"""Decoding that can delete: a stack of keys and values for each row, in which a push writes over what was popped (§4.1).

Needs torch, transformers and its numpy: `Policy.export` writes this file beside a checkpoint, which then backtracks by itself.
Column j of a row's cache holds the j-th token of its state, so that a deletion moves the row's top and nothing else: no holes,
and a cache no longer than the longest state. Every forward pass pushes one token in every running row. A row that chooses
`<bkspc>` needs none: it goes back to the hidden vector it had one token earlier and chooses again at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy
import torch
from torch import Tensor
from transformers import Cache, LogitsProcessorList, SuppressTokensLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

#: (tokens of each row's state, logits of its actions) → the logits to choose from.
Process = Callable[[list[list[int]], Tensor], Tensor]
#: The same, whatever the state.
Warp = Callable[[Tensor], Tensor]
#: Into how many tokens a vocabulary is divided to find the one that a random number falls on.
BLOCK = 256


@dataclass(frozen=True)
class Limits:
    """When a row ends, and whether it may delete its prompt."""

    eos: int
    bkspc: int | None
    max_new_tokens: int
    max_actions: int
    protect_prompt: bool = False
    stop_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Choice:
    """How an action is chosen: greedily or by random numbers, from logits with `<bkspc>` made likelier, processed, warped."""

    greedy: bool = False
    process: Process | None = None
    warp: Warp | None = None
    ban_deleted: bool = False
    backspace_bias: float = 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether what is chosen from is not what the model gave."""
        return bool(self.process or self.warp or self.ban_deleted or self.backspace_bias)


@dataclass(frozen=True)
class Chosen:
    """One action of one row: what was chosen, what was executed, and the state's tokens after it."""

    row: int
    chosen: int
    executed: int
    log_prob: float
    value: float
    tokens: tuple[int, ...]


def windows(config: Any) -> dict[str, int | None]:
    """Each kind of attention layer the model has, with its sliding window in tokens, or None for all.

    The window is counted in the model's own positions, the depth of the stack: a deleted token takes up no room in it.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        uses_window = window is not None and getattr(config, "use_sliding_window", True)
        return {"all": window if uses_window else None}
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}, which can't leave out deleted tokens. "
            f"Use a model whose layers all attend (full_attention or sliding_attention)."
        )
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def cache_mask(config: Any, keep: Tensor, key_position: Tensor, query_position: Tensor, dtype: torch.dtype) -> Any:
    """The 4-D mask of new nodes over cache columns from who is alive [row, query, slot], for each kind of layer."""
    masks = {}
    for kind, window in windows(config).items():
        kept = keep if window is None else keep & (key_position[:, None, :] > query_position[:, :, None] - window)
        if config._attn_implementation == "eager":  # eager attention adds its mask
            kept = torch.zeros(kept.shape, dtype=dtype, device=kept.device).masked_fill(~kept, torch.finfo(dtype).min)
        masks[kind] = kept[:, None]
    return masks.get("all", masks)


@contextmanager
def decoding(model: Any, attention: str | None = None, compiled: Sequence[Any] = ()) -> Iterator[None]:
    """Decode without dropout, and with SDPA where the model scores with FlexAttention: one column needs no block mask.

    `attention` names another implementation. Of its layers, those `compiled` are called as they were: shapes change here.
    """
    calls = [layer._compiled_call_impl for layer in compiled]
    for layer in compiled:
        layer._compiled_call_impl = None
    config, was_training = model.config, model.training
    loaded = config._attn_implementation
    config._attn_implementation = attention or ("sdpa" if loaded == "flex_attention" else loaded)
    if was_training:
        model.eval()
    try:
        yield
    finally:
        config._attn_implementation = loaded
        for layer, call in zip(compiled, calls, strict=True):
            layer._compiled_call_impl = call
        if was_training:
            model.train()


def uniforms(seed: int, row: int, count: int) -> Tensor:
    """The random numbers of a row: one for each action, whatever its neighbours do.

    Philox has a stream for every 128-bit key; torch's own generator keeps 32 bits of its seed on a CPU.
    """
    stream = numpy.random.Philox(key=row << 64 | seed % 2**64)
    return torch.from_numpy(numpy.random.Generator(stream).random(count))


def choose(logits: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """An action for each row, and the log of Σ exp logits.

    Greedy where there is no random number, else by inverting the cumulative distribution at it. Sums are in float64, first of
    blocks of the vocabulary, then inside the block that the number falls on.
    """
    if uniform is None:
        return logits.argmax(-1), logits.logsumexp(-1)
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).exp_()
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    upto = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = upto[:, -1:]
    target = uniform[:, None] * total
    block = torch.searchsorted(upto, target, right=True).clamp_(max=upto.shape[1] - 1)
    before = torch.where(block > 0, upto.gather(1, (block - 1).clamp_(min=0)), 0)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK)).squeeze(1).to(torch.float64).cumsum(-1)
    # Rounding may put the number behind the block's last possible token, never behind the one that ends the sum.
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    place = block * BLOCK + torch.minimum(torch.searchsorted(inside, target - before, right=True), last)
    action = place.squeeze(1).clamp_(max=logits.shape[-1] - 1)  # NaN is past the end; it is reported, not looked up
    return action, (largest + total.log()).squeeze(1)


def _as_attended(states: Tensor) -> Tensor:
    """In the precision that attention has under autocast: keys that were turned in float32 would be kept in it."""
    device = states.device.type
    is_cast = states.dtype == torch.float32 and torch.is_autocast_enabled(device)
    return states.to(torch.get_autocast_dtype(device)) if is_cast else states


class StackCache(Cache):
    """Keys and values of each layer, [row, head, column, dim]; a row's column j belongs to the j-th token of its state."""

    def __init__(self, rows: int, columns: int) -> None:
        """Empty; a layer's memory is taken when it first has something to write."""
        super().__init__(layers=[])
        self.rows, self.columns = rows, columns
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.row = self.column = torch.empty(0)
        self.width = 0

    def point(self, row: Tensor, column: Tensor, width: int) -> None:
        """Where the next pass writes: one new token of each row at `column`, or, where that is 2-D, prompts from column 0.

        A single token sees the first `width` columns, prompts see themselves.
        """
        self.row, self.column, self.width = row, column, width

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write what is new in place, and return what it may see."""
        states = (_as_attended(key_states), _as_attended(value_states))
        if layer_idx not in self.stored:
            sizes = [(self.rows, s.shape[1], self.columns, s.shape[3]) for s in states]
            self.stored[layer_idx] = (states[0].new_zeros(sizes[0]), states[1].new_zeros(sizes[1]))
        stored = self.stored[layer_idx]
        if self.column.ndim == 2:
            for whole, new in zip(stored, states, strict=True):
                whole[self.row, :, : new.shape[2]] = new
            return states
        self.write(stored, states)
        return stored[0][:, :, : self.width], stored[1][:, :, : self.width]

    def write(self, stored: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
        """Put one token of each row at its column."""
        for whole, part in zip(stored, new, strict=True):
            whole[self.row, :, self.column] = part[:, :, 0]

    def select(self, kept: Tensor) -> None:
        """Keep some of the rows."""
        self.rows = len(kept)
        for layer, (keys, values) in self.stored.items():  # one after the other: two of each would not fit
            self.stored[layer] = keys[kept], values[kept]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Columns before those of the next pass."""
        return 0 if self.column.ndim == 2 else self.width - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The same, by another name."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many columns a mask has, and which is the first."""
        return self.get_seq_length(layer_idx) + query_length, 0


class Rollback:
    """Rows of text that grow and shrink, in slots that are filled again when a row has ended.

    All that a step reads and writes is tensors of fixed shape, so that a GPU can replay it without being told anything.
    What an ended row, or one that has nothing to push, computes is written where nobody looks.
    """

    cache_type: type[StackCache] = StackCache

    def __init__(
        self,
        model: Any,
        head: Callable[[Tensor], Tensor],
        limits: Limits,
        choice: Choice,
        *,
        slots: int,
        longest_prompt: int,
    ) -> None:
        """`model` is a Hugging Face causal LM, `head` takes its last hidden vectors to the logits of all actions."""
        self.model, self.config, self.head = model, model.config, head
        self.compiled: list[Any] = []
        self.limits, self.choice, self.forwards = limits, choice, 0
        self.device = model.get_input_embeddings().weight.device
        #: The depth that no state reaches, and the action that no row takes: what must not be written goes there.
        self.depth, self.actions = longest_prompt + limits.max_new_tokens, limits.max_actions

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.numbers: list[int | None] = [None] * slots
        self.slot = torch.arange(slots, device=self.device)
        self.tokens = torch.full((slots, self.depth + 1), limits.eos, device=self.device)
        self.size, self.prompt, self.floor, self.taken = zeros(slots), zeros(slots), zeros(slots), zeros(slots)
        self.is_running, self.has_pushed = zeros(slots, dtype=torch.bool), zeros(slots, dtype=torch.bool)
        self.uniform = zeros(slots, self.actions + 1, dtype=torch.float64)
        self.chosen = zeros(slots, self.actions + 1)
        self.log_probs = zeros(slots, self.actions + 1, dtype=torch.float64)
        self.values = zeros(slots, self.actions + 1, dtype=torch.float64)
        self.stops = torch.tensor(sorted(limits.stop_tokens), dtype=torch.long, device=self.device)
        self.cache = self.cache_type(slots, self.depth + 1)
        self.hidden = torch.empty(0)
        self.deleted: list[dict[int, set[int]]] = [{} for _ in range(slots)]

    @torch.no_grad()
    def fill(
        self, slots: Sequence[int], rows: Sequence[int], prompts: Sequence[Sequence[int]], uniform: Sequence[Tensor]
    ) -> None:
        """Start rows, numbered by the caller, in free slots: one pass over their prompts; `uniform` is for their actions."""
        self.compiled = [layer for layer in self.model.modules() if layer._compiled_call_impl is not None]
        longest = max(map(len, prompts))
        tokens = torch.full((len(prompts), longest), self.limits.eos)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        tokens, slot = tokens.to(self.device), torch.tensor(slots, device=self.device)
        ordinal = torch.arange(longest, device=self.device).expand(len(prompts), -1)
        self.cache.point(slot, ordinal, longest)
        # What stands behind a shorter prompt is seen by nothing before it.
        hidden = self._forward(tokens, ordinal[:, None, :] <= ordinal[:, :, None], ordinal)
        if not len(self.hidden):
            self.hidden = hidden.new_zeros(len(self.slot), self.depth + 1, hidden.shape[-1])
        self.hidden[slot, :longest] = hidden
        self.tokens[slot, :longest] = tokens
        length = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.size[slot] = self.prompt[slot] = length
        self.floor[slot] = length if self.limits.protect_prompt else torch.ones_like(length)
        self.taken[slot] = 0
        self.is_running[slot] = True
        if not self.choice.greedy:
            self.uniform[slot, : self.actions] = torch.stack(list(uniform)).to(self.device)
        for place, row in zip(slots, rows, strict=True):
            self.numbers[place], self.deleted[place] = row, {}

    def free(self) -> list[int]:
        """Slots without a row."""
        return [slot for slot, number in enumerate(self.numbers) if number is None]

    def ended(self) -> Iterator[tuple[int, list[int], Tensor, Tensor]]:
        """Each row that has ended since the last time, and is now forgotten: its number, actions, log-probabilities, values."""
        running = self.is_running.tolist()
        slots = [slot for slot, number in enumerate(self.numbers) if number is not None and not running[slot]]
        if not slots:
            return
        taken = self.taken[slots].tolist()
        records = [part[slots, : max(taken)].cpu() for part in (self.chosen, self.log_probs, self.values)]
        for slot, count, chosen, log_probs, values in zip(slots, taken, *records, strict=True):
            number, self.numbers[slot] = self.numbers[slot], None
            check(log_probs[:count], values[:count])
            yield cast(int, number), chosen[:count].tolist(), log_probs[:count].float(), values[:count].float()

    def advance(self) -> None:
        """Push what was decided, and decide again."""
        if bool(self.has_pushed.any()):
            self.push()
        for _ in self.decide():
            pass

    @torch.no_grad()
    def decide(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Let every running row choose until it has something to push or ends; yields (slots, chosen, executed) each time."""
        choosing = (self.is_running & ~self.has_pushed).nonzero()[:, 0]
        while len(choosing):
            yield choosing, *self.act(choosing)
            choosing = choosing[self.is_running[choosing] & ~self.has_pushed[choosing]]

    @torch.no_grad()
    def act(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Choose and execute an action in each of `slot` that runs and has not pushed; what was chosen, and executed."""
        limits, choice = self.limits, self.choice
        these = slice(None) if slot is self.slot else slot  # of all rows, what is there need not be copied
        size, taken = self.size[these], self.taken[these]
        logits = self.head(self.hidden[slot, size - 1])
        value = logits.logsumexp(-1) if choice.changes_logits else None
        if choice.backspace_bias and limits.bkspc is not None:
            logits[:, limits.bkspc] += choice.backspace_bias
        if choice.ban_deleted:
            for row, place, depth in zip(logits, slot.tolist(), size.tolist(), strict=True):
                if depth in self.deleted[place]:
                    row[list(self.deleted[place][depth])] = -torch.inf
        if choice.process is not None:
            logits = choice.process(self._states(slot), logits)
        if choice.warp is not None:
            logits = choice.warp(logits)
        action, normaliser = choose(logits, None if choice.greedy else self.uniform[slot, taken])
        log_prob = logits.gather(1, action[:, None]).squeeze(1) - normaliser

        acts = self.is_running[these] & ~self.has_pushed[these]
        at = torch.where(acts, taken, self.actions)
        self.chosen[slot, at] = action
        self.log_probs[slot, at] = log_prob.double()
        self.values[slot, at] = (normaliser if value is None else value).double()
        is_bkspc = action == (-1 if limits.bkspc is None else limits.bkspc)
        is_token = ~is_bkspc & (action != limits.eos)
        is_cut = (is_token & (size - self.prompt[these] >= limits.max_new_tokens)) | (taken + 1 == limits.max_actions)
        if len(self.stops):
            is_cut |= (action[:, None] == self.stops).any(1)
        executed = torch.where(is_cut, limits.eos, action)
        pops = acts & is_bkspc & ~is_cut & (size > self.floor[these])
        pushes = acts & is_token & ~is_cut
        if choice.ban_deleted:
            self._remember(slot, size, pops)
        self.tokens[slot, torch.where(pushes, size, self.depth)] = executed
        self.taken[these] = taken + acts
        self.size[these] = size + pushes.long() - pops.long()
        self.is_running[these] &= ~(acts & (executed == limits.eos))
        self.has_pushed[these] |= pushes
        return action, executed

    @torch.no_grad()
    def push(self) -> None:
        """One forward pass over the new token of every row that has one."""
        # A row that pushed nothing computes something above its top; one that has ended, at the bottom.
        column = torch.where(self.has_pushed, self.size - 1, torch.where(self.is_running, self.size, 0))
        token = self.tokens[self.slot, column]
        hidden = self._attend(token[:, None], column)
        self.hidden[self.slot, column] = hidden[:, 0]
        self.has_pushed.fill_(False)

    def _attend(self, tokens: Tensor, column: Tensor) -> Tensor:
        """The hidden vectors of one new token in each row, at `column`, over the columns up to it."""
        width = int(column.max()) + 1
        self.cache.point(self.slot, column, width)
        keep = torch.arange(width, device=self.device) <= column[:, None]
        return self._forward(tokens, keep[:, None, :], column[:, None])

    def _forward(self, tokens: Tensor, keep: Tensor, positions: Tensor) -> Tensor:
        self.forwards += 1
        with decoding(self.model, compiled=self.compiled):
            mask = None
            # One new column that sees all others needs no mask; attention is faster without one.
            if tokens.shape[1] > 1 or any(windows(self.config).values()) or not bool(keep.all()):
                slots = torch.arange(keep.shape[-1], device=self.device).expand(len(tokens), -1)
                mask = cache_mask(self.config, keep, slots, positions, self.model.dtype)
            return self.backbone(tokens, mask, positions)

    def backbone(self, tokens: Tensor, mask: Any, positions: Tensor) -> Tensor:
        """The model's last hidden vectors."""
        return self.model.base_model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        ).last_hidden_state

    def drop_ended(self) -> None:
        """Ended rows leave once they are a quarter of the slots; until then they push something nobody sees."""
        kept = self.is_running.nonzero()[:, 0]
        if not 0 < len(kept) <= 0.75 * len(self.slot):
            return
        self.cache.select(kept)
        for name in ("tokens", "size", "prompt", "floor", "taken", "is_running", "has_pushed", "uniform", "hidden"):
            setattr(self, name, getattr(self, name)[kept])
        self.chosen, self.log_probs, self.values = self.chosen[kept], self.log_probs[kept], self.values[kept]
        self.slot = self.slot[: len(kept)]
        self.numbers = [self.numbers[slot] for slot in kept.tolist()]
        self.deleted = [self.deleted[slot] for slot in kept.tolist()]

    def _states(self, slot: Tensor) -> list[list[int]]:
        return [row[:size] for row, size in zip(self.tokens[slot].tolist(), self.size[slot].tolist(), strict=True)]

    def _remember(self, slot: Tensor, size: Tensor, pops: Tensor) -> None:
        """What was deleted after each state on the stack."""
        tops = self.tokens[slot, size - 1]
        for place, depth, token in torch.stack([slot, size, tops], 1)[pops].tolist():
            deleted = self.deleted[place]
            deleted.pop(depth, None)  # what was deleted after the token that now goes itself
            deleted.setdefault(depth - 1, set()).add(token)

    def run(self) -> Iterator[Chosen]:
        """Choose and execute actions until every row has ended, yielding each as it happens."""
        while bool(self.is_running.any()):
            for slot, chosen, executed in self.decide():
                at = self.taken[slot] - 1
                log_prob, value = self.log_probs[slot, at], self.values[slot, at]
                check(log_prob, value)
                states, scores = self._states(slot), zip(log_prob.tolist(), value.tolist(), strict=True)
                actions = zip(slot.tolist(), chosen.tolist(), executed.tolist(), strict=True)
                for state, (place, action, done), score in zip(states, actions, scores, strict=True):
                    end = (self.limits.eos,) if done == self.limits.eos else ()
                    yield Chosen(cast(int, self.numbers[place]), action, done, *score, (*state, *end))
            self.drop_ended()
            if bool(self.has_pushed.any()):
                self.push()


def check(log_probs: Tensor, values: Tensor) -> None:
    """Refuse what was chosen from logits that allow no choice."""
    if bool(values.isnan().any()):
        raise ValueError("The model's logits are NaN: nothing can be chosen from them. Check its weights and dtype.")
    if bool(log_probs.isnan().any()):
        raise ValueError(
            "`logits_processor` must leave an action possible: nothing can be chosen from NaN or -inf alone."
        )


def backtrack(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    bkspc_token_id: int | None = None,
    seed: int | None = None,
    ban_deleted: bool = False,
    backspace_bias: float = 0.0,
    **inputs: Any,
) -> Tensor:
    """`model.generate(..., custom_generate=backtrack)`: the model's own decoding, with `<bkspc>` obeyed.

    `bkspc_token_id` is the row of the output layer that deletes, by default `model.config.bkspc_token_id`. The prompt is
    never deleted here, because callers slice it off the result by its length.
    """
    if generation_config.eos_token_id is None:
        raise ValueError(
            "`eos_token_id` must be set: it is what ends a row. Pass it, or set `model.generation_config.eos_token_id`."
        )
    ignored = {
        "num_beams": generation_config.num_beams not in (None, 1),
        "streamer": inputs.get("streamer") is not None,
    }
    ignored["return_dict_in_generate"] = bool(generation_config.return_dict_in_generate)
    ignored["stopping_criteria"] = any(
        type(c) not in (MaxLengthCriteria, EosTokenCriteria) for c in stopping_criteria or ()
    )
    for name, would_be in ignored.items():
        if would_be:
            raise ValueError(f"`{name}` would be ignored by decoding with deletions. Leave it out.")
    bkspc = bkspc_token_id if bkspc_token_id is not None else getattr(model.config, "bkspc_token_id", None)
    # Not a named parameter: transformers would take it out of what it prepares, and then pass it twice.
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    prompts = [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]
    eos = generation_config.eos_token_id
    stops = eos.tolist() if isinstance(eos, Tensor) else eos if isinstance(eos, list) else [eos]
    budget = generation_config.max_length - input_ids.shape[1]
    limits = Limits(stops[0], bkspc, budget, 4 * budget + 1, True, frozenset(stops[1:]))
    processors = _let_through(bkspc, logits_processor or LogitsProcessorList())

    def process(states: list[list[int]], logits: Tensor) -> Tensor:
        rows = [
            processors(torch.tensor([s], device=logits.device), row[None])
            for s, row in zip(states, logits, strict=True)
        ]
        return torch.cat(rows)

    number = int(torch.randint(2**31, ())) if seed is None and generation_config.do_sample else seed or 0
    output_layer = model.get_output_embeddings()
    rollback = Rollback(
        model,
        lambda hidden: _own_logits(model, output_layer, hidden),
        limits,
        Choice(not generation_config.do_sample, process, None, ban_deleted, backspace_bias),
        slots=len(prompts),
        longest_prompt=max(map(len, prompts)),
    )
    drawn = [uniforms(number, row, limits.max_actions) for row in range(len(prompts))]
    rollback.fill(range(len(prompts)), range(len(prompts)), prompts, drawn)
    finals: list[tuple[int, ...]] = [()] * len(prompts)
    for event in rollback.run():
        was_cut = event.executed == limits.eos != event.chosen
        last = (event.chosen,) if event.chosen in limits.stop_tokens else ()
        finals[event.row] = event.tokens[:-1] + last if was_cut else event.tokens
    # Like transformers, without an <eos> that there was no room for.
    completions = [list(final[len(prompt) :])[:budget] for final, prompt in zip(finals, prompts, strict=True)]
    longest = max(map(len, completions))
    pad = generation_config.pad_token_id if generation_config.pad_token_id is not None else stops[0]
    tail = torch.tensor(
        [c + [pad] * (longest - len(c)) for c in completions], device=input_ids.device, dtype=input_ids.dtype
    )
    return torch.cat([input_ids, tail.view(len(prompts), longest)], dim=1)


def _let_through(bkspc: int | None, processors: LogitsProcessorList) -> LogitsProcessorList:
    """A checkpoint suppresses `<bkspc>` for decoders that don't know it. This one does."""
    kept = LogitsProcessorList()
    for processor in processors:
        if isinstance(processor, SuppressTokensLogitsProcessor):
            tokens = processor.suppress_tokens
            processor = SuppressTokensLogitsProcessor(tokens[tokens != bkspc].tolist(), device=tokens.device)
        kept.append(processor)
    return kept


def scale_and_cap(config: Any) -> tuple[float, float | None]:
    """What a model does to its logits after the output layer: Cohere and Granite scale them, Gemma 2 caps them."""
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return float(scale), getattr(config, "final_logit_softcapping", None)


def _own_logits(model: Any, output_layer: Any, hidden: Tensor) -> Tensor:
    """The logits a checkpoint's own forward pass gives, in float32 or better."""
    scale, cap = scale_and_cap(model.config)
    logits = output_layer(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    return logits if cap is None else cap * torch.tanh(logits / cap)
