"""Rows of text that grow and shrink: every forward pass pushes one token in every running row (§4.1).

A row that chooses `<bkspc>` needs no forward pass: its top moves back to the hidden vector of one token earlier, and the row
chooses again. Needs torch and transformers alone: `Policy.export` writes this file beside a checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from sequencematch.policy.attention import cache_mask, windows
from sequencematch.policy.changes import decoding, lock_of
from sequencematch.policy.decoding.cache import StackCache
from sequencematch.policy.decoding.choice import Choice, check, choose
from sequencematch.policy.decoding.search import DeletedTokens, keep_open

#: The most bytes that a decoder's records of actions may take.
MAX_RECORD_BYTES = 2**32


@dataclass(frozen=True)
class Limits:
    """When a row ends, and what it may delete.

    `ends` holds `eos`, which is executed where a row is cut. `<bkspc>` is not offered in a state as short as the row's floor,
    unless `self_loops`: there it changes nothing. The floor is one token, or the prompt under `protect_prompt`; with `hold_back`
    it follows `hold_back` tokens below the deepest state so far.
    """

    eos: int
    ends: frozenset[int]
    bkspc: int | None
    max_new_tokens: int
    max_actions: int
    min_new_tokens: int = 0
    protect_prompt: bool = False
    hold_back: int | None = None
    self_loops: bool = False
    stop_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ActionEvent:
    """One action of one row: the chosen and the executed action, and the state's tokens after it."""

    row: int
    chosen: int
    executed: int
    log_prob: float
    value: float
    tokens: tuple[int, ...]


class Decoder:
    """Rows in slots; a slot is filled again when its row has ended.

    A step reads and writes tensors of fixed shape only, so that a CUDA graph can replay it. Idle and ended rows still compute;
    nothing reads their writes.
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
        """`model` is a Hugging Face causal LM; `head` maps its last hidden vectors to the logits of all actions."""
        if slots * limits.max_actions * 32 > MAX_RECORD_BYTES:
            raise ValueError(
                f"`max_actions` must leave room in memory for a record of every action. Got {limits.max_actions} for each of "
                f"{slots} rows; lower it, or the batch size."
            )
        self.model, self.config, self.head = model, model.config, head
        self.compiled: list[Any] = []
        self.limits, self.choice, self.forwards = limits, choice, 0
        self.device = model.get_input_embeddings().weight.device
        #: Scratch column of each row's tokens, and scratch entry of its actions: writes to be ignored go there.
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
        self.ends, self.stops = (
            torch.tensor(sorted(tokens), dtype=torch.long, device=self.device)
            for tokens in (limits.ends, limits.stop_tokens - limits.ends)
        )
        self.all_ends = torch.cat([self.ends, self.stops])
        self.cache = self.cache_type(slots, self.depth + 1)
        self.hidden = torch.empty(0)
        remembers = choice.ban_deleted or choice.search_min_p is not None
        self.deleted = DeletedTokens(slots, self.depth, self.device) if remembers else None

    @torch.no_grad()
    def fill(
        self, slots: Sequence[int], rows: Sequence[int], prompts: Sequence[Sequence[int]], uniform: Sequence[Tensor]
    ) -> None:
        """Start rows, numbered by the caller, in free slots: one pass over prompts. `uniform` has a random number per action."""
        with lock_of(self.model):  # another thread's pass may have uncompiled them
            self.compiled = [layer for layer in self.model.modules() if layer._compiled_call_impl is not None]
        longest = max(map(len, prompts))
        tokens = torch.full((len(prompts), longest), self.limits.eos)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        tokens, slot = tokens.to(self.device), torch.tensor(slots, device=self.device)
        ordinal = torch.arange(longest, device=self.device).expand(len(prompts), -1)
        self.cache.point(slot, ordinal, longest)
        # Causal attention: padding after a shorter prompt is not attended to.
        hidden = self._forward(tokens, ordinal[:, None, :] <= ordinal[:, :, None], ordinal)
        if not len(self.hidden):
            self.hidden = hidden.new_zeros(len(self.slot), self.depth + 1, hidden.shape[-1])
        self.hidden[slot, :longest] = hidden
        self.tokens[slot, :longest] = tokens
        length = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.size[slot] = self.prompt[slot] = length
        self.floor[slot] = length if self.limits.protect_prompt else torch.ones_like(length)
        self._raise_floor(slot)
        self.taken[slot] = 0
        self.is_running[slot] = True
        if not self.choice.greedy:
            self._keep_uniforms(slots, uniform)
        for place, row in zip(slots, rows, strict=True):
            self.numbers[place] = row
        if self.deleted is not None:
            self.deleted.count[slot] = 0

    def _keep_uniforms(self, slots: Sequence[int], uniform: Sequence[Tensor]) -> None:
        slot = torch.tensor(slots, device=self.device)
        self.uniform[slot, : self.actions] = torch.stack(list(uniform)).to(self.device)

    def free(self) -> list[int]:
        """Slots without a row."""
        return [slot for slot, number in enumerate(self.numbers) if number is None]

    def ended(self) -> Iterator[tuple[int, list[int], Tensor, Tensor]]:
        """Rows that ended since the last call, whose slots become free: number, actions, log-probabilities, values."""
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
        """Push the tokens that were chosen, then let rows choose again."""
        if bool(self.has_pushed.any()):
            self.push()
        for _ in self.decide():
            pass

    @torch.no_grad()
    def decide(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Let every running row choose until it pushes or ends; yields (slots, chosen, executed) after each round."""
        choosing = (self.is_running & ~self.has_pushed).nonzero()[:, 0]
        while len(choosing):
            yield choosing, *self.act(choosing)
            choosing = choosing[self.is_running[choosing] & ~self.has_pushed[choosing]]

    @torch.no_grad()
    def act(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Choose and execute an action in each of `slot` that runs and has not pushed; returns both actions."""
        limits = self.limits
        these = slice(None) if slot is self.slot else slot  # a view if all rows are meant
        size, taken, written = self.size[these], self.taken[these], self.size[these] - self.prompt[these]
        acts = self.is_running[these] & ~self.has_pushed[these]
        at_floor = size <= self.floor[these]
        logits = self.head(self.hidden[slot, size - 1])
        action, log_prob, value, stays = self._choose(logits, slot, size, taken, acts, at_floor)

        at = torch.where(acts, taken, self.actions)
        self.chosen[slot, at] = action
        self.log_probs[slot, at] = log_prob.double()
        self.values[slot, at] = value.double()
        is_bkspc = action == (-1 if limits.bkspc is None else limits.bkspc)
        is_end = (action[:, None] == self.ends).any(1)
        is_token = ~is_bkspc & ~is_end
        max_new_tokens, max_actions = self._most(these)
        is_cut = (is_token & (written >= max_new_tokens)) | ((taken + 1 == max_actions) & ~is_end)
        if len(self.stops):
            is_cut |= (action[:, None] == self.stops).any(1)
        executed = torch.where(is_cut, limits.eos, action)
        pops = acts & is_bkspc & ~is_cut & ~at_floor
        pushes = acts & is_token & ~is_cut
        if self.deleted is not None:
            self._remember(slot, stays, pops, pushes)
        self.tokens[slot, torch.where(pushes, size, self.depth)] = executed
        self.taken[these] = taken + acts
        self.size[these] = size + pushes.long() - pops.long()
        self._raise_floor(these)
        self.is_running[these] &= ~(acts & (is_end | is_cut))
        self.has_pushed[these] |= pushes
        return action, executed

    def _choose(
        self, logits: Tensor, slot: Tensor, size: Tensor, taken: Tensor, acts: Tensor, at_floor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Actions from the model's logits: actions, their log-probabilities, V of the states, and what `_search` returns."""
        limits, choice = self.limits, self.choice
        value = logits.logsumexp(-1) if choice.changes_logits or limits.min_new_tokens else None
        bkspc = logits[:, limits.bkspc].clone() if limits.bkspc is not None else None
        if choice.backspace_bias and limits.bkspc is not None:
            logits[:, limits.bkspc] += choice.backspace_bias
        if limits.bkspc is not None and not limits.self_loops:
            logits[:, limits.bkspc].masked_fill_(at_floor, -torch.inf)
        if limits.min_new_tokens:
            too_early = (size - self.prompt[slot] < limits.min_new_tokens)[:, None].expand(-1, len(self.all_ends))
            logits[:, self.all_ends] = logits[:, self.all_ends].masked_fill(too_early, -torch.inf)
        if choice.ban_deleted and self.deleted is not None:
            self.deleted.close(logits, slot, size)
        if choice.process is not None:
            logits = choice.process(self._states(slot), logits)
        if choice.warp is not None:
            logits = choice.warp(logits)
        stays = None
        if choice.search_min_p is not None:
            stays = self._search(logits, choice.search_min_p, slot, acts)
        action, normaliser = choose(logits, None if choice.greedy else self.uniform[slot, taken])
        log_prob = logits.gather(1, action[:, None]).squeeze(1) - normaliser
        if value is None:
            value = normaliser
            if bkspc is not None and not limits.self_loops:  # V is of all actions, also of those not offered
                value = torch.where(at_floor, torch.logaddexp(normaliser, bkspc.to(normaliser)), normaliser)
        return action, log_prob, value, stays

    def _most(self, these: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """`max_new_tokens` and `max_actions` of rows: numbers, or a tensor with an entry for each."""
        return self.limits.max_new_tokens, self.limits.max_actions

    def _search(self, logits: Tensor, min_p: float | Tensor, slot: Tensor, acts: Tensor) -> Tensor:  # noqa: ARG002
        """Leave the logits of the actions that a search may choose, in place; of rows that do not act, whatever is cheapest.

        A row at full length can only end or delete. Once a row has only as many actions left as it takes to write a completion
        of full length and `<eos>`, it deletes no more. Returns the rows in which nothing is left to try, or to remember.
        """
        limits, deleted, size = self.limits, self.deleted, self.size[slot]
        assert deleted is not None
        assert limits.bkspc is not None
        max_new_tokens, max_actions = self._most(slot)
        room = max_new_tokens - (size - self.prompt[slot])
        # A deletion takes one action, and one more to fill the room that it makes; <eos> takes one.
        may_delete = (size > self.floor[slot]) & (max_actions - self.taken[slot] >= room + 3)
        is_full = deleted.is_full(slot, size)
        is_stuck = keep_open(
            logits,
            deleted,
            slot,
            size,
            min_p=min_p,
            bkspc=limits.bkspc,
            ends=self.all_ends,
            eos=limits.eos,
            may_delete=may_delete,
            only_ends=(room <= 0) | (may_delete & is_full),
        )
        return is_stuck | is_full

    def _remember(self, slot: Tensor, stays: Tensor | None, pops: Tensor, pushes: Tensor) -> None:
        """After an action: keep what was deleted. A row that `stays` never deletes its next token: its floor is raised."""
        assert self.deleted is not None
        size = self.size[slot]
        if stays is not None:
            self.floor[slot] += pushes & (size <= self.floor[slot]) & stays
        self.deleted.update(slot, size, self.tokens[slot, size - 1], pops, pushes)

    def _raise_floor(self, these: Any) -> None:
        """With `hold_back`, let the floor follow the deepest state."""
        if self.limits.hold_back is not None:
            self.floor[these] = torch.maximum(self.floor[these], self.size[these] - self.limits.hold_back)

    def end(self, row: int) -> None:
        """End a running row after its last action, for a reason that only the caller knows."""
        slot = self.numbers.index(row)
        self.is_running[slot] = self.has_pushed[slot] = False

    @torch.no_grad()
    def push(self) -> None:
        """One forward pass over the new token of every row that has one."""
        # A running row that pushed nothing computes above its top, an ended row at column 0.
        column = torch.where(self.has_pushed, self.size - 1, torch.where(self.is_running, self.size, 0))
        token = self.tokens[self.slot, column]
        hidden = self._attend(token[:, None], column)
        self.hidden[self.slot, column] = hidden[:, 0]
        self.has_pushed.fill_(False)

    def _attend(self, tokens: Tensor, column: Tensor) -> Tensor:
        """The hidden vectors of one new token in each row, at `column`, attending to the columns up to it."""
        width = int(column.max()) + 1
        self.cache.point(self.slot[: len(column)], column, width)
        keep = torch.arange(width, device=self.device) <= column[:, None]
        return self._forward(tokens, keep[:, None, :], column[:, None])

    def _forward(self, tokens: Tensor, keep: Tensor, positions: Tensor) -> Tensor:
        self.forwards += 1
        with decoding(self.model, compiled=self.compiled):
            mask = None
            # A new column that attends to all others needs no mask, and attention is faster without one.
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
        """Remove ended rows once they are a quarter of the slots."""
        kept = self.is_running.nonzero()[:, 0]
        if not 0 < len(kept) <= 0.75 * len(self.slot):
            return
        self.cache.select(kept)
        for name in ("tokens", "size", "prompt", "floor", "taken", "is_running", "has_pushed", "uniform", "hidden"):
            setattr(self, name, getattr(self, name)[kept])
        self.chosen, self.log_probs, self.values = self.chosen[kept], self.log_probs[kept], self.values[kept]
        self.slot = self.slot[: len(kept)]
        self.numbers = [self.numbers[slot] for slot in kept.tolist()]
        if self.deleted is not None:
            self.deleted.select(kept)

    def _states(self, slot: Tensor) -> list[list[int]]:
        return [row[:size] for row, size in zip(self.tokens[slot].tolist(), self.size[slot].tolist(), strict=True)]

    def run(self) -> Iterator[ActionEvent]:
        """Run until every row has ended, yielding each action as it happens."""
        while bool(self.is_running.any()):
            for slot, chosen, executed in self.decide():
                at = self.taken[slot] - 1
                log_prob, value = self.log_probs[slot, at], self.values[slot, at]
                check(log_prob, value)
                states, scores = self._states(slot), zip(log_prob.tolist(), value.tolist(), strict=True)
                actions = zip(slot.tolist(), chosen.tolist(), executed.tolist(), strict=True)
                for state, (place, action, done), score in zip(states, actions, scores, strict=True):
                    end = (done,) if done in self.limits.ends else ()
                    yield ActionEvent(cast(int, self.numbers[place]), action, done, *score, (*state, *end))
            self.drop_ended()
            if bool(self.has_pushed.any()):
                self.push()
