"""A stream is only ever appended to, and what it sends is the answer, over 200 random requests with many deletions."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy
import pytest

from sequencematch.serving.text import Row
from tests.serving.rows import policy
from tests.serving.server import byte_policy, running

REQUESTS = 200
PROMPTS = {"letters": "the cat ", "bytes": "é a "}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running({"letters": policy(), "bytes": byte_policy()}, slots=48) as found:
        yield found


def random_bodies(seed: int, count: int) -> list[dict[str, Any]]:
    """Requests that delete about every third token, half of them with characters of several tokens."""
    rng = numpy.random.default_rng(seed)
    found = []
    for _ in range(count):
        model = str(rng.choice(list(PROMPTS)))
        body: dict[str, Any] = {"model": model, "prompt": PROMPTS[model], "seed": int(rng.integers(2**31))}
        body |= {"max_tokens": int(rng.integers(1, 30)), "temperature": float(rng.choice([0.7, 1.0, 1.5]))}
        body |= {"backspace_bias": float(rng.choice([2.0, 4.0, 6.0])), "protect_prompt": bool(rng.integers(2))}
        body |= {"ban_deleted": bool(rng.integers(2))}
        if rng.random() < 0.9:
            body["hold_back"] = int(rng.integers(0, 8))
        if rng.random() < 0.3:
            body["stop"] = [str(rng.choice(["a", "qu", " ", "e."])), "é"]
        if rng.random() < 0.2:
            body["n"] = 2
        found.append(body)
    return found


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[str], list[str], int]:
    """Text and finish reason of each choice, and the number of chunks with text."""
    texts, reasons, chunks = [""] * body.get("n", 1), [""] * body.get("n", 1), 0
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"]
                chunks += bool(choice["text"])
    return texts, reasons, chunks


async def both(address: str, bodies: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Each request as a stream and whole, many at the same time."""
    at_once = asyncio.Semaphore(96)  # httpx spends its time on requests that wait for a connection

    async def limited(call: Any) -> Any:
        async with at_once:
            return await call

    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        streams = [limited(streamed(client, body)) for body in bodies]
        wholes = [limited(client.post("/v1/completions", json=body)) for body in bodies]
        found = await asyncio.gather(*streams, *wholes)
    return list(zip(found[: len(bodies)], found[len(bodies) :], strict=True))


def test_a_concatenated_stream_is_the_whole_answer(address: str) -> None:
    bodies = random_bodies(0, REQUESTS)
    deletions = actions = chunks = 0
    for body, ((texts, reasons, parts), answer) in zip(bodies, asyncio.run(both(address, bodies)), strict=True):
        whole = answer.json()
        assert texts == [choice["text"] for choice in whole["choices"]], body
        assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
        actions, deletions = actions + whole["usage"]["actions"], deletions + whole["usage"]["deletions"]
        chunks += parts
    print(f"{actions} actions, {deletions} deletions, {chunks} chunks of text")
    assert deletions > 0.15 * actions
    assert chunks > 3 * REQUESTS


def test_the_text_is_what_policy_generate_writes(address: str) -> None:
    bodies = [body for body in random_bodies(1, 60) if not body.keys() & {"stop", "n"}][:20]
    for body, (_, answer) in zip(bodies, asyncio.run(both(address, bodies)), strict=True):
        model = policy() if body["model"] == "letters" else byte_policy()
        names = ("seed", "temperature", "backspace_bias", "protect_prompt", "ban_deleted")
        options: Any = {name: body[name] for name in names} | {"hold_back": body.get("hold_back", 16)}
        wanted = model.generate(body["prompt"], max_new_tokens=body["max_tokens"], **options)
        assert answer.json()["choices"][0]["text"] == wanted.texts[0]


def test_a_stream_that_does_not_hold_back_is_caught(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: every token is sent as soon as it is written."""
    settle = Row.settle

    def sends_at_once(self: Row) -> Any:
        held, sampling = self.sampling, dict(vars(self.sampling))
        object.__setattr__(self, "sampling", type("Impatient", (), {**sampling, "hold_back": 0}))
        try:
            return settle(self)
        finally:
            object.__setattr__(self, "sampling", held)

    bodies = [{**body, "hold_back": 5} for body in random_bodies(2, 30)]
    monkeypatch.setattr(Row, "settle", sends_at_once)
    monkeypatch.setattr("sequencematch.serving.answers.Answer.whole", _from_rows)
    found = asyncio.run(both(address, bodies))
    assert any(texts != [choice["text"] for choice in answer.json()["choices"]] for (texts, _, _), answer in found)


async def _from_rows(self: Any) -> dict[str, Any]:
    async for _ in self.exchange.news():
        pass
    return {"choices": [{"text": row.text} for row in self.exchange.rows]}
