"""Answers as OpenAI's objects, whole or in chunks, and the events of `stream_actions`."""

import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from sequencematch.core.mdp import ActionSpace
from sequencematch.serving.exchange import Exchange
from sequencematch.serving.text import Event, Row, Settled, Speller, Token

#: Called with the seconds between the writing of each token and its sending.
Observe = Callable[[float], None]


class Answer:
    """The objects of one exchange: they share an id, a time and the model's name."""

    def __init__(self, exchange: Exchange, observe: Observe) -> None:
        """`observe` is called for every token that is handed out."""
        self.exchange, self.plan, self.observe = exchange, exchange.plan, observe
        kind = "chatcmpl" if self.plan.is_chat else "cmpl"
        self.head: dict[str, Any] = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.plan.served.name,
            "system_fingerprint": None,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer when all rows have ended."""
        texts = [""] * len(self.exchange.rows)
        async for index, _ in self.exchange.news():
            texts[index] += self._settled(self.exchange.rows[index]).text
        choices = []
        for index, (row, text) in enumerate(zip(self.exchange.rows, texts, strict=True)):
            said: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text, "refusal": None}}
                if self.plan.is_chat
                else {"text": text}
            )
            log_probs = self._log_probs(row, row.kept, row.new_tokens, 0)
            choices.append({"index": index, **said, "logprobs": log_probs, "finish_reason": row.finish_reason})
        kind = "chat.completion" if self.plan.is_chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": self.exchange.usage, **self._seed()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The same answer as text that is only ever appended to."""
        kind = "chat.completion.chunk" if self.plan.is_chat else "text_completion"
        usage: dict[str, Any] = {"usage": None} if self.plan.include_usage else {}
        head = {**self.head, "object": kind, **usage}
        lengths = [0] * len(self.exchange.rows)
        if self.plan.is_chat:
            for index in range(len(self.exchange.rows)):
                first = {"role": "assistant", "content": "", "refusal": None}
                yield {**head, "choices": [{"index": index, "delta": first, "logprobs": None, "finish_reason": None}]}
        async for index, _ in self.exchange.news():
            row = self.exchange.rows[index]
            settled = self._settled(row)
            text, tokens = settled.text, settled.tokens
            if not text and not tokens and row.finish_reason is None:
                continue
            said: dict[str, Any] = {"delta": {"content": text} if text else {}} if self.plan.is_chat else {"text": text}
            log_probs = self._log_probs(row, settled.start, len(tokens), lengths[index])
            lengths[index] += sum(len(token.text) for token in tokens)
            yield {
                **head,
                "choices": [{"index": index, **said, "logprobs": log_probs, "finish_reason": row.finish_reason}],
            }
        if self.plan.include_usage:
            yield {**head, "choices": [], "usage": self.exchange.usage, **self._seed()}

    async def actions(self) -> AsyncIterator[dict[str, Any]]:
        """Every action as it happens; `docs/serving.md` has the fields."""
        speller, space = self.plan.served.speller, self.plan.served.policy.space
        yield {
            **self.head,
            "object": "action.start",
            "choices": [{"index": index} for index in range(len(self.exchange.rows))],
            "prompt_tokens": [_token(token) for token in self.plan.prompts[0]],
            "prefix_tokens": [_token(token) for token in self.plan.prefix],
            **self._seed(),
        }
        async for index, events in self.exchange.news():
            row = self.exchange.rows[index]
            for event in events:
                yield {"object": "action", "index": index, **_action(event, speller, space)}
            self._settled(row)
            if row.finish_reason is not None:
                end = {"finish_reason": row.finish_reason, "text": row.text, "usage": self.exchange.usage}
                yield {"object": "action.end", "index": index, **end}

    def _seed(self) -> dict[str, int]:
        return {} if self.plan.sampling.seed is None else {"seed": self.plan.sampling.seed}

    def _settled(self, row: Row) -> Settled:
        settled, now = row.settle(), time.perf_counter()
        for token in settled.tokens:
            if token.log_prob is not None:
                self.observe(now - token.written_at)
        return settled

    def _log_probs(self, row: Row, start: int, count: int, offset: int) -> dict[str, Any] | None:
        """Log-probabilities of the tokens from `start` on that the model wrote, as completions or chats list them."""
        if not self.plan.wants_log_probs:
            return None
        places, offsets = list[int](), list[int]()
        for place in range(start, start + count):
            if row.stack[place].log_prob is not None:
                places.append(place)
                offsets.append(offset)
            offset += len(row.stack[place].text)
        tokens, likely = [row.stack[place] for place in places], [row.alternatives(place) for place in places]
        if self.plan.is_chat:
            pairs = zip(tokens, likely, strict=True)
            content = [
                {**_scored(token.text, token.log_prob), "top_logprobs": [_scored(*pair) for pair in others]}
                for token, others in pairs
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [dict(others) for others in likely] if self.plan.alternatives else None,
            "text_offset": offsets,
        }


def _scored(text: str, log_prob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}


def _token(token: Token | None) -> dict[str, Any] | None:
    return None if token is None else {"id": token.id, "text": token.text}


def _action(event: Event, speller: Speller, space: ActionSpace) -> dict[str, Any]:
    token = _token(event.token)
    if event.kind == "end" and event.token is not None:
        token = {"id": event.token.id, "text": speller.name(event.before, event.token.id)}
    alternatives = [
        {"id": action, "text": speller.name(event.before, action), "prob": math.exp(p), "kind": _kind(action, space)}
        for action, p in event.alternatives
    ]
    return {
        "step": event.step,
        "kind": event.kind,
        "token": token,
        "prob": math.exp(event.log_prob),
        "value": event.value,
        "bkspc_prob": math.exp(event.bkspc_log_prob),
        "alternatives": alternatives,
    }


def _kind(action: int, space: ActionSpace) -> str:
    return "delete" if action == space.bkspc else "end" if action in space.ends else "write"


def sse(data: Mapping[str, Any] | str) -> str:
    """A server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n"
