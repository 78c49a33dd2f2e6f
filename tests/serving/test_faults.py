"""Whatever one client does, it gets an error object or is cleaned up after, and the others' answers are what they were."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import httpx
import hypothesis
import openai
import pytest
import schemathesis

from sequencematch.policy import Policy
from sequencematch.serving.engine import Engine
from sequencematch.serving.settings import Served, ServerSettings
from tests.serving.rows import policy
from tests.serving.server import running, serving
from tests.serving.test_engine import poisoned

BODY: dict[str, Any] = {"prompt": "the cat ", "max_tokens": 20, "seed": 1, "backspace_bias": 3.0, "hold_back": 2}
#: Takes 40 steps, and sends text after the first few.
LONG: dict[str, Any] = {**BODY, "max_tokens": 40, "min_tokens": 40, "backspace_bias": -1000, "stream": True}


class Gate:
    """Lets an engine take one step at a time, or all."""

    def __init__(self, engine: Engine) -> None:
        self.steps, self.is_open, advance = threading.Semaphore(0), False, engine.decoder.advance

        def wait() -> None:
            if not self.is_open:
                self.steps.acquire()
            advance()

        engine.decoder.advance = wait  # type: ignore[method-assign]

    def open(self) -> None:
        self.is_open = True
        self.steps.release()


@contextmanager
def gated(
    settings: ServerSettings | None = None, *, of: Policy | None = None, **options: Any
) -> Iterator[tuple[str, Engine, Gate]]:
    """A server whose steps the test allows."""
    engine = Engine(of or policy(), **options)
    gate = Gate(engine)
    engine.start()
    with serving({"tiny": Served("tiny", engine)}, settings or ServerSettings()) as address:
        try:
            yield address, engine, gate
        finally:
            gate.open()


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that must happen; the limit is only reached by a bug."""
    limit = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.005)


def post(address: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{address}/v1/completions", json={**BODY, **body}, timeout=600)


def expected(**changes: Any) -> str:
    """What BODY is answered with."""
    options: Any = {"seed": 1, "backspace_bias": 3.0, "hold_back": 2, "protect_prompt": True, **changes}
    return policy().generate(BODY["prompt"], max_new_tokens=20, **options).texts[0]


# Clients that vanish


def request_bytes(address: str, body: dict[str, Any]) -> bytes:
    sent = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.removeprefix('http://')}\r\nContent-Length: {len(sent)}\r\n"
    )
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + sent


def connect(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=600)


def read_until(client: socket.socket, wanted: bytes) -> None:
    found = b""
    while wanted not in found:
        part = client.recv(65536)
        assert part, found
        found += part


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_vanishes_frees_its_slot_and_changes_nothing_for_others(is_stream: bool) -> None:
    with gated(slots=2, queue=4) as (address, engine, gate):
        leaving = [connect(address) for _ in range(2)]
        for client in leaving:
            client.sendall(request_bytes(address, {**LONG, "stream": is_stream}))
        until(lambda: len(engine.running) + len(engine.waiting) == 2)
        for _ in range(8):
            gate.steps.release()
        until(lambda: len(engine.running) == 2)
        if is_stream:
            for client in leaving:
                read_until(client, b"text_completion")  # in the middle of its text
        staying = threading.Thread(target=lambda: answers.append(post(address).json()))
        answers: list[Any] = []
        staying.start()
        until(lambda: len(engine.waiting) == 1)
        leaving.pop().close()
        until(lambda: engine.counts.ended["cancelled"] + len(engine._cancelled) == 1)
        gate.steps.release()  # the step that runs; the next one has the new row
        until(lambda: not engine.waiting and len(engine.running) == 2)
        leaving.pop().close()
        until(lambda: engine.counts.ended["cancelled"] + len(engine._cancelled) == 2)
        gate.open()
        staying.join(600)
        assert answers[0]["choices"][0]["text"] == expected()
        until(lambda: not engine.running)
        assert engine.counts.ended == {"done": 1, "cancelled": 2, "timeout": 0, "error": 0}


def test_clients_that_never_finish_their_body_or_headers_hold_nothing() -> None:
    with gated(ServerSettings(body_timeout_s=0.05), slots=1) as (address, engine, gate):
        gate.open()
        slow = connect(address)
        slow.sendall(request_bytes(address, LONG)[:-5])
        assert slow.recv(65536).startswith(b"HTTP/1.1 408")
        half = connect(address)
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127")
        whole = connect(address)
        whole.sendall(request_bytes(address, BODY))  # at once: httpx sends the body after the headers
        read_until(whole, json.dumps(expected(), ensure_ascii=False).encode())
        assert not engine.running
        for client in (slow, half, whole):
            client.close()


# A queue that is full, and time that is up


def test_a_full_queue_is_answered_429_with_the_time_to_wait() -> None:
    with gated(slots=1, queue=1) as (address, engine, gate):
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(post(address).json())) for _ in range(2)]
        for count, thread in enumerate(threads):
            thread.start()
            until(lambda: len(engine.running) + len(engine.waiting) == count + 1)  # noqa: B023
        until(lambda: len(engine.running) == 1)
        busy = post(address)
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
        assert busy.json()["error"]["type"] == "rate_limit_error"
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        with client, pytest.raises(openai.RateLimitError, match="The server is busy"):
            client.completions.create(model="tiny", prompt="a")
        assert httpx.get(f"{address}/health").status_code == 200
        gate.open()
        for thread in threads:
            thread.join(600)
        assert [answer["choices"][0]["text"] for answer in answers] == [expected()] * 2


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_request_that_takes_too_long_is_answered_so(is_stream: bool) -> None:
    now = [0.0]
    with gated(ServerSettings(timeout_s=5), slots=1, clock=lambda: now[0]) as (address, engine, gate):
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(post(address, **{**LONG, "stream": is_stream})))
        asking.start()
        until(lambda: len(engine.running) == 1)
        now[0] = 6.0
        gate.open()
        asking.join(600)
        (answer,) = answers
        error = json.loads(answer.text.split("\n\n")[-2].removeprefix("data: ")) if is_stream else answer.json()
        assert answer.status_code == (200 if is_stream else 504)
        assert (error["error"]["type"], error["error"]["code"]) == ("timeout_error", "timeout")
        assert "[DONE]" not in answer.text
        until(lambda: not engine.running)


# Bodies


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running({"tiny": policy()}, ServerSettings(api_key="right"), slots=4) as found:
        yield found


def ask(address: str, content: bytes | str, **headers: str) -> httpx.Response:
    sent = {"Content-Type": "application/json", "Authorization": "Bearer right", **headers}
    return httpx.post(f"{address}/v1/completions", content=content, headers=sent, timeout=600)


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        ('{"prompt": "a"', 400, "The body must be JSON"),
        ("", 400, "The body is wrong: Field required"),
        ("[1, 2]", 400, "The body is wrong"),
        ("null", 400, "The body is wrong"),
        (b'{"prompt": "\xff"}', 400, ""),
        ("[" * 100_000, 400, ""),
        ('{"prompt": "a", "temperature": NaN}', 400, "`temperature` is wrong"),
        ('{"prompt": "a", "temperature": 1e400}', 400, "`temperature` is wrong"),
        ('{"prompt": "a", "max_tokens": ' + "9" * 4000 + "}", 400, "`max_tokens` is wrong"),
        ('{"prompt": "a", "max_tokens": ' + "9" * 5000 + "}", 400, ""),  # more digits than Python reads
        ('{"prompt": "\\ud800"}', 400, ""),  # half of a character
        ('{"prompt": "\\u0000"}', 200, ""),
        (
            json.dumps({"prompt": "a" * 10**6}),
            400,
            "must fit the context of 64 tokens. Got 1000000 characters",
        ),
        (json.dumps({"prompt": "a" * 2**20}), 413, "at most 1048576 bytes"),
        (json.dumps({"prompt": [3] * 200_000}), 400, "context of 64 tokens"),
        (json.dumps({"prompt": ["a"] * 20_000}), 400, "at most 16"),
    ],
    ids=range(16),
)
def test_a_body_that_is_broken_or_too_large_is_answered_with_an_error_object(
    address: str, content: bytes | str, status: int, text: str
) -> None:
    answer = ask(address, content)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert text in answer.json()["error"]["message"]
        assert len(answer.text) < 500  # nothing large comes back


def test_a_body_in_pieces_without_a_length_is_limited_too(address: str) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(64):
            yield b"a" * 2**15

    sent = {"Content-Type": "application/json", "Authorization": "Bearer right"}
    try:
        answer = httpx.post(f"{address}/v1/completions", content=pieces(), headers=sent, timeout=600)
    except httpx.WriteError:
        return  # the server has answered and closed while pieces were still on their way
    assert answer.status_code == 413


@pytest.mark.parametrize("key", [None, "Bearer wrong", "right", "Basic right", "Bearer", "Bearer rightt", "Bearer é"])
def test_a_wrong_key_is_refused_and_the_page_and_health_need_none(address: str, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": key.encode("latin-1")}
    for path in ("/v1/models", "/v1/examples", "/metrics"):
        answer = httpx.get(f"{address}{path}", headers=headers)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    for path in ("/health", "/ready"):
        assert httpx.get(f"{address}{path}").status_code == 200
    assert httpx.get(f"{address}/v1/models", headers={"Authorization": "Bearer right"}).status_code == 200


def test_a_page_elsewhere_cannot_reach_a_loopback_server_under_its_own_name() -> None:
    with running({"tiny": policy()}, ServerSettings(allowed_hosts=frozenset({"127.0.0.1"})), slots=1) as address:
        answer = httpx.get(f"{address}/v1/models", headers={"Host": "evil.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "wrong_host")
        assert httpx.get(f"{address}/v1/models").status_code == 200


# NaN in one request


def test_nan_in_one_requests_logits_fails_that_request_alone() -> None:
    model = poisoned()
    good = {"prompt": [5, 6], "max_tokens": 12, "temperature": 0, "backspace_bias": -1000}
    with running({"tiny": model}, slots=8) as address:

        async def all_at_once() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=address, timeout=600) as client:
                bodies = [good, {**good, "prompt": [5, 47]}, good, {**good, "prompt": [47], "stream": True}, good]
                return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

        found = asyncio.run(all_at_once())
        wanted = model.generate(
            [5, 6], max_new_tokens=12, temperature=0, backspace_bias=-1000.0, hold_back=16, protect_prompt=True
        )
        assert 47 not in wanted.trajectories[0].chosen
    for row in (0, 2, 4):
        assert found[row].json()["choices"][0]["text"] == wanted.texts[0]
    assert (found[1].status_code, found[1].json()["error"]["code"]) == (500, "row_failed")
    assert "logits are NaN" in found[1].json()["error"]["message"]
    assert '"row_failed"' in found[3].text
    assert "[DONE]" not in found[3].text


# Any body at all


def test_no_request_makes_the_server_fail() -> None:
    """Requests by the OpenAPI description, and requests that break it. schemathesis' own plugin fails with this pytest."""
    with running({"tiny": policy()}, slots=8) as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        operations: list[Any] = [cast(Any, found).ok() for found in schema.get_all_operations()]
        paths = [operation.path for operation in operations]
        assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/examples"} <= set(paths)
        statuses: set[int] = set()
        for operation in operations:
            count = 15 if operation.method == "post" else 4
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                _ask_many(operation, mode, count, statuses)
        assert {200, 400} <= statuses  # the control: some were answered, some refused
        assert max(statuses) < 500


def _ask_many(operation: Any, mode: schemathesis.GenerationMode, count: int, statuses: set[int]) -> None:
    checks = list(hypothesis.HealthCheck)
    quiet = hypothesis.settings(max_examples=count, derandomize=True, database=None, suppress_health_check=checks)

    @quiet
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        answer = case.call_and_validate(checks=[schemathesis.checks.not_a_server_error])
        statuses.add(answer.status_code)

    try:
        ask()
    except hypothesis.errors.Unsatisfiable:  # nothing about the operation can be broken
        assert mode is schemathesis.GenerationMode.NEGATIVE
