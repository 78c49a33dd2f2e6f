"""What a row has written: its stack replayed from actions, its text token by token, and what can no longer be deleted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from sequencematch.core.mdp import ActionSpace
from sequencematch.data.pieces import Decode
from sequencematch.policy.sampling import Sampling
from sequencematch.serving.jobs import Actions

Kind = Literal["write", "delete", "end", "cut"]
#: Tokens that are decoded before a new one: a first token may lose its space, and a character may take several tokens.
_WINDOW = 4
_UNFINISHED = "\ufffd"  # what an incomplete character is decoded to


class Token(NamedTuple):
    """A token on the stack: its text, which is empty until its character is complete, and what the model said of it."""

    id: int
    text: str
    is_complete: bool = True
    log_prob: float | None = None  # None for a token that was given
    alternatives: Sequence[tuple[int, float]] = ()
    written_at: float = 0.0


class Event(NamedTuple):
    """An action, and the token that was written or deleted. A row that is cut does not execute its last action."""

    step: int
    kind: Kind
    token: Token | None
    log_prob: float
    value: float
    bkspc_log_prob: float
    alternatives: Sequence[tuple[int, float]]
    before: Sequence[Token]  # the end of the state in which it was chosen


class Speller:
    """Tokens → text, one at a time: the texts of a stack's tokens concatenate to the text of the stack."""

    def __init__(self, tokenizer: Any, space: ActionSpace) -> None:
        """Without a tokenizer every text is empty."""
        self.space, self.tokenizer = space, tokenizer
        self.decode: Decode = (
            (lambda _: "") if tokenizer is None else partial(tokenizer.decode, skip_special_tokens=True)
        )

    def token(self, before: Sequence[Token], token: int) -> Token:
        """A token behind others, with the text that it adds."""
        start = max(0, len(before) - _WINDOW)
        while start > 0 and not before[start - 1].is_complete:
            start -= 1
        ids = [known.id for known in before[start:]]
        shorter, longer = self.decode(ids).rstrip(_UNFINISHED), self.decode([*ids, token])
        whole = longer.rstrip(_UNFINISHED)
        shared = next((n for n, pair in enumerate(zip(shorter, whole, strict=False)) if pair[0] != pair[1]), None)
        text = whole[min(len(shorter), len(whole)) if shared is None else shared :]
        return Token(token, text, is_complete=whole == longer)

    def tokens(self, before: Sequence[Token], ids: Sequence[int]) -> list[Token]:
        """Several tokens behind others."""
        found = list(before)
        for token in ids:
            found.append(self.token(found, token))
        return found[len(before) :]

    def rest(self, stack: Sequence[Token]) -> str:
        """The incomplete character at the end of a text that won't be continued."""
        if not stack or stack[-1].is_complete:
            return ""
        start = len(stack) - 1
        while start > 0 and not stack[start - 1].is_complete:
            start -= 1
        whole = self.decode([token.id for token in stack[start:]])
        return whole[len(whole.rstrip(_UNFINISHED)) :]

    def name(self, before: Sequence[Token], action: int) -> str:
        """The text of an action that was not taken; special tokens are named."""
        if action == self.space.bkspc:
            return "<bkspc>"
        if self.tokenizer is None:
            return ""
        return self.token(before, action).text or str(self.tokenizer.decode([action]))


@dataclass
class Settled:
    """Text and tokens that can no longer be deleted, since they were last asked for; `start` is the first one's place."""

    text: str
    tokens: list[Token]
    start: int


@dataclass
class Row:
    """The replay of one row from its actions. `stop` are strings that end it as soon as its text holds one.

    With `hold_back` in its sampling, tokens settle while the row goes on; else all settle at its end.
    """

    speller: Speller
    sampling: Sampling
    prompt: list[Token]
    prefix: list[Token]
    stop: Sequence[str] = ()
    clock: Callable[[], float] = lambda: 0.0
    stack: list[Token] = field(init=False)
    finish_reason: Literal["stop", "length"] | None = field(default=None, init=False)
    actions: int = field(default=0, init=False)
    deletions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.stack = [*self.prompt, *self.prefix]
        self._deepest = len(self.stack)
        self._kept = len(self.prompt)  # tokens of the prompt that were not deleted
        self._settled = 0  # tokens behind the kept prompt that were handed out
        self._cut: int | None = None  # where the text ends before a stop string
        self._text = ""  # all settled text, handed out or not
        self._sent = 0

    def take(self, actions: Actions) -> list[Event]:
        """Replay actions, up to the one that ends the row."""
        found = []
        for n, action in enumerate(actions.chosen):
            if self.finish_reason is not None:
                break
            likely = actions.alternatives[n] if actions.alternatives else ()
            scores = actions.log_probs[n], actions.values[n], actions.bkspc_log_probs[n]
            found.append(self._take(action, *scores, likely))
        return found

    def _take(
        self, action: int, log_prob: float, value: float, bkspc: float, likely: Sequence[tuple[int, float]]
    ) -> Event:
        space, before = self.speller.space, self.stack[-_WINDOW - 4 :]
        step, self.actions = self.actions, self.actions + 1
        is_last = self.actions == self.sampling.action_limit
        kind: Kind
        token: Token | None
        if action in space.ends:
            kind, token, self.finish_reason = "end", Token(action, ""), "stop"
        elif is_last or (action != space.bkspc and len(self.stack) - len(self.prompt) >= self.sampling.max_new_tokens):
            kind, self.finish_reason = "cut", "length"
            token = None if action == space.bkspc else self.speller.token(self.stack, action)
        elif action == space.bkspc:
            kind, token = "delete", self.stack.pop()
            self.deletions += 1
            self._kept = min(self._kept, len(self.stack))
        else:
            kind = "write"
            spelt = self.speller.token(self.stack, action)
            token = spelt._replace(log_prob=log_prob, alternatives=likely, written_at=self.clock())
            self.stack.append(token)
            self._deepest = max(self._deepest, len(self.stack))
            self._find_stop()
        return Event(step, kind, token, log_prob, value, bkspc, likely, before)

    def _find_stop(self) -> None:
        """End the row if the text holds a stop string, part of which the last token wrote."""
        if not self.stop:
            return
        needed, end = max(map(len, self.stop)) - 1 + len(self.stack[-1].text), ""
        for token in reversed(self.stack[self._kept :]):
            end = token.text + end
            if len(end) >= needed:
                break
        if any(text in end for text in self.stop):
            whole = "".join(token.text for token in self.stack[self._kept :])
            self._cut = min(place for text in self.stop if (place := whole.find(text)) >= 0)
            self.finish_reason = "stop"

    def settle(self) -> Settled:
        """What has become final: tokens with `hold_back` others above the deepest state, and all once the row has ended."""
        final = self._kept + self._settled
        if self.finish_reason is not None:
            final = len(self.stack)
        elif self.sampling.hold_back is not None:
            final = max(final, self._deepest - self.sampling.hold_back)
        start = self._kept + self._settled
        tokens = self.stack[start:final]
        self._settled += len(tokens)
        self._text += "".join(token.text for token in tokens)
        if self.finish_reason is None:
            # A stop string may have begun in the last characters.
            upto = max(self._sent, len(self._text) - max(map(len, self.stop), default=1) + 1)
        elif self._cut is not None:
            upto = self._cut
        else:
            self._text += self.speller.rest(self.stack)
            upto = len(self._text)
        text = self._text[self._sent : upto]
        self._sent += len(text)
        return Settled(text, tokens, start)

    @property
    def text(self) -> str:
        """The text behind the part of the prompt that was not deleted, up to a stop string."""
        whole = "".join(token.text for token in self.stack[self._kept :])
        return whole[: self._cut] if self._cut is not None else whole + self.speller.rest(self.stack)

    @property
    def kept(self) -> int:
        """Tokens of the prompt that were not deleted."""
        return self._kept

    @property
    def new_tokens(self) -> int:
        """Tokens behind the kept prompt."""
        return len(self.stack) - self._kept

    def alternatives(self, place: int) -> list[tuple[str, float]]:
        """What might have stood in a place of the stack, by name, and the log-probability of each."""
        before = self.stack[max(0, place - 2 * _WINDOW) : place]
        return [(self.speller.name(before, action), p) for action, p in self.stack[place].alternatives]
