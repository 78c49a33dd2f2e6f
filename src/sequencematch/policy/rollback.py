"""Decoding that can delete: an append-only cache in which a deleted token is a hole (§4.1).

Needs torch, transformers and its numpy: `Policy.export` writes this file beside a checkpoint, which then backtracks by itself.
Every forward pass pushes one token in every running row. A row that chooses `<bkspc>` needs none: it goes back to the hidden
vector it had one token earlier and chooses again at once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, SuppressTokensLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

#: (tokens of each row's state, logits of its actions) → the logits to choose from.
Process = Callable[[list[list[int]], Tensor], Tensor]


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
class Chosen:
    """One action of one row: what was chosen, what was executed, and the state's tokens after it."""

    row: int
    chosen: int
    executed: int
    log_prob: float
    value: float
    tokens: tuple[int, ...]


@dataclass
class _Row:
    """A running row: its number, the tokens of its state, their cache columns, and what was deleted from each depth."""

    number: int
    tokens: list[int]
    columns: list[int]
    prompt_length: int
    floor: int
    actions: int = 0
    deleted: dict[int, set[int]] = field(default_factory=dict)


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
def decoding(model: Any) -> Iterator[None]:
    """Decode without dropout, and with SDPA where the model scores with FlexAttention: one column needs no block mask."""
    config, was_training = model.config, model.training
    loaded = config._attn_implementation
    config._attn_implementation = "sdpa" if loaded == "flex_attention" else loaded
    if was_training:
        model.eval()
    try:
        yield
    finally:
        config._attn_implementation = loaded
        if was_training:
            model.train()


def uniforms(seed: int, row: int, count: int) -> Tensor:
    """The random numbers of a row: one for each action, whatever its neighbours do.

    Philox has a stream for every 128-bit key; torch's own generator keeps 32 bits of its seed on a CPU.
    """
    stream = numpy.random.Philox(key=row << 64 | seed % 2**64)
    return torch.from_numpy(numpy.random.Generator(stream).random(count))


def choose(logits: Tensor, uniform: Tensor | None) -> Tensor:
    """Greedy where there is no random number, else by inverting the cumulative distribution at it."""
    if uniform is None:
        return logits.argmax(-1)
    cumulative = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    place = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    return place.clamp(max=logits.shape[-1] - 1)  # NaN is past the end; it is reported, not looked up


class Rollback:
    """Rows of text that grow and shrink over one append-only cache."""

    def __init__(
        self,
        model: Any,
        head: Callable[[Tensor], Tensor],
        prompts: Sequence[Sequence[int]],
        limits: Limits,
    ) -> None:
        """`model` is a Hugging Face causal LM, `head` takes its last hidden vectors to the logits of all actions."""
        self.model, self.config, self.dtype = model, model.config, model.dtype
        self.device = model.get_input_embeddings().weight.device
        self.head, self.limits, self.forwards = head, limits, 0
        #: Without holes one new column sees all others and needs no mask; attention is faster without one.
        self.has_holes = len(set(map(len, prompts))) > 1
        longest = max(map(len, prompts))
        self.rows = [
            _Row(n, list(p), list(range(len(p))), len(p), floor=len(p) if limits.protect_prompt else 1)
            for n, p in enumerate(prompts)
        ]
        self.used = longest
        slots, depth = longest + limits.max_actions, longest + limits.max_new_tokens + 1
        self.is_alive = torch.zeros(len(prompts), slots, dtype=torch.bool, device=self.device)
        self.position = torch.zeros(len(prompts), slots, dtype=torch.long, device=self.device)
        # Not the model's own kind of cache: a sliding one would drop columns that are still in the window.
        self.cache = DynamicCache()

        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        ordinal = torch.arange(longest, device=self.device)
        in_prompt = ordinal < lengths[:, None]
        tokens = torch.full((len(prompts), longest), limits.eos)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        self.is_alive[:, :longest] = in_prompt
        self.position[:, :longest] = ordinal
        causal = (ordinal <= ordinal[:, None]) & (in_prompt[:, None] | (ordinal == ordinal[:, None]))
        hidden = self._forward(tokens.to(self.device), causal, ordinal.expand(len(prompts), -1))
        #: By depth, not by column: only what is on the stack can be returned to.
        self.hidden = hidden.new_zeros(len(prompts), depth, hidden.shape[-1])
        self.hidden[:, :longest] = hidden

    @torch.no_grad()
    def _forward(self, tokens: Tensor, keep: Tensor, positions: Tensor) -> Tensor:
        self.forwards += 1
        with decoding(self.model):
            mask = None
            if self.has_holes or tokens.shape[1] > 1 or any(windows(self.config).values()):
                mask = cache_mask(self.config, keep, self.position[:, : keep.shape[-1]], positions, self.dtype)
            return self.model.base_model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
            ).last_hidden_state

    def run(
        self,
        uniform: Callable[[int, int], float] | None,
        process: Process | None,
        *,
        ban_deleted: bool = False,
        backspace_bias: float = 0.0,
    ) -> Iterator[Chosen]:
        """Choose and execute actions until every row has ended, yielding each as it happens."""
        running = list(range(len(self.rows)))  # places in the batch
        while running:
            pushing: dict[int, int] = {}
            choosing = running
            while choosing:
                again = []
                for place, action, log_prob, value in self._choose(
                    choosing, uniform, process, ban_deleted, backspace_bias
                ):
                    executed = self._execute(place, action)
                    if executed == self.limits.bkspc:
                        again.append(place)
                    elif executed != self.limits.eos:
                        pushing[place] = executed
                    row = self.rows[place]
                    yield Chosen(row.number, action, executed, log_prob, value, tuple(row.tokens))
                choosing = again
            running = self._push(pushing) if pushing else []

    @torch.no_grad()
    def _choose(
        self,
        places: list[int],
        uniform: Callable[[int, int], float] | None,
        process: Process | None,
        ban_deleted: bool,
        backspace_bias: float,
    ) -> list[tuple[int, int, float, float]]:
        rows = [self.rows[place] for place in places]
        place, depth = torch.tensor([places, [len(row.tokens) - 1 for row in rows]], device=self.device)
        logits = self.head(self.hidden[place, depth])
        value = normaliser = logits.logsumexp(-1)
        if backspace_bias and self.limits.bkspc is not None:
            logits[:, self.limits.bkspc] += backspace_bias
        if ban_deleted:
            for i, row in enumerate(rows):
                logits[i, list(row.deleted.get(len(row.tokens), ()))] = -torch.inf
        if process is not None:
            logits = process([row.tokens for row in rows], logits)
        if process is not None or ban_deleted or backspace_bias:
            normaliser = logits.logsumexp(-1)
        drawn = None
        if uniform is not None:
            numbers = [uniform(row.number, row.actions) for row in rows]
            drawn = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
        action = choose(logits, drawn)
        log_prob = logits.gather(1, action[:, None]).squeeze(1) - normaliser
        # One transfer for all three, since each would wait for the device.
        answers = torch.stack([action.double(), log_prob.double(), value.double()], dim=1).tolist()
        if any(math.isnan(p) and not math.isnan(v) for _, p, v in answers):
            raise ValueError(
                "`logits_processor` must leave an action possible: nothing can be chosen from NaN or -inf alone."
            )
        if any(math.isnan(v) for _, _, v in answers):
            raise ValueError(
                "The model's logits are NaN: nothing can be chosen from them. Check its weights and dtype."
            )
        return [(at, int(a), p, v) for at, (a, p, v) in zip(places, answers, strict=True)]

    def _execute(self, place: int, action: int) -> int:
        """Apply an action to the stack; what was executed, which is `<eos>` where a limit is hit."""
        limits, row = self.limits, self.rows[place]
        row.actions += 1
        is_token = action not in (limits.eos, limits.bkspc)
        too_long = is_token and len(row.tokens) - row.prompt_length >= limits.max_new_tokens
        if action in limits.stop_tokens or too_long or row.actions == limits.max_actions:
            action = limits.eos
        if action == limits.bkspc and len(row.tokens) > row.floor:
            row.deleted.pop(len(row.tokens), None)  # what was deleted after the token that now goes itself
            self.is_alive[place, row.columns.pop()] = False
            self.has_holes = True
            token = row.tokens.pop()
            row.deleted.setdefault(len(row.tokens), set()).add(token)
        elif action != limits.bkspc:
            row.tokens.append(action)
        return action

    def _push(self, pushing: dict[int, int]) -> list[int]:
        """One forward pass over one new token in each row of `pushing` (place → token); the places that run on.

        Ended rows leave the batch once they are a quarter of it. Until then they push something nobody sees.
        """
        if len(pushing) <= 0.75 * len(self.rows):
            kept = torch.tensor(sorted(pushing), device=self.device)
            self.cache.batch_select_indices(kept)
            self.is_alive, self.position, self.hidden = self.is_alive[kept], self.position[kept], self.hidden[kept]
            self.rows = [self.rows[place] for place in sorted(pushing)]
            pushing = {new: pushing[old] for new, old in enumerate(sorted(pushing))}
        column = self.used
        self.used += 1
        running = sorted(pushing)
        for place in running:
            self.rows[place].columns.append(column)
        token = [[pushing.get(place, self.limits.eos)] for place in range(len(self.rows))]
        depth = [[len(row.tokens) - 1 if place in pushing else 0] for place, row in enumerate(self.rows)]
        tokens, position = torch.tensor([token, depth], device=self.device)
        self.is_alive[:, column] = True
        self.position[:, column] = position.squeeze(1)
        hidden = self._forward(tokens, self.is_alive[:, None, : column + 1], position)
        # An ended row that is still here writes at depth 0, which it no longer needs.
        self.hidden[torch.arange(len(self.rows), device=self.device), position[:, 0]] = hidden[:, 0]
        return running


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

    uniform = None
    if generation_config.do_sample:
        number = int(torch.randint(2**31, ())) if seed is None else seed
        drawn = [uniforms(number, row, limits.max_actions) for row in range(len(prompts))]
        uniform = lambda row, action: float(drawn[row][action])  # noqa: E731
    output_layer = model.get_output_embeddings()
    rollback = Rollback(model, lambda hidden: _own_logits(model, output_layer, hidden), prompts, limits)
    finals: list[tuple[int, ...]] = [()] * len(prompts)
    for event in rollback.run(uniform, process, ban_deleted=ban_deleted, backspace_bias=backspace_bias):
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
