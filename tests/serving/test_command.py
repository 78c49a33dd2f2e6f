"""`sequencematch serve`: it starts without an argument, ends as it should, and says in one line what is wrong."""

import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import programs
from tests.cli.conftest import folder as folder
from tests.cli.program import PROGRAM, check_error, run

GRAPH = "12 6 | 0 11 | 9 14 | 0 13 | 13 21 | 2 23 | 11 10 | 10 12 | 27 26 | 21 27 | 0 2 | 23 9 / 0 26 ="


@contextmanager
def program(*arguments: str) -> Iterator[tuple[str, programs.Program]]:
    """The server as its own program, on a free port: its address, and its process."""
    with programs.Program(*PROGRAM[1:], "serve", "--port", "0", *arguments) as process:
        line = process.stdout.readline()
        assert line.startswith("Serving "), process.communicate()
        yield next(word for word in line.split() if word.startswith("http://")), process


def test_it_serves_a_bundled_model_without_an_argument_and_sigterm_finishes_what_runs() -> None:
    with program() as (address, process):
        limits = {"max_tokens": 200, "min_tokens": 200, "hold_back": 0, "backspace_bias": -1000}
        body = {"prompt": GRAPH, "seed": 0, "stream": True, **limits}
        texts: list[str] = [""] * 8
        began, ended = threading.Semaphore(0), list[int]()

        def ask(row: int) -> None:
            with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=600) as answer:
                began.release()
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        ended.append(row)
                    elif line:
                        texts[row] += json.loads(line.removeprefix("data: "))["choices"][0]["text"]

        asking = [threading.Thread(target=ask, args=(row,)) for row in range(len(texts))]
        for thread in asking:
            thread.start()
        assert all(began.acquire(timeout=600) for _ in texts)  # one that asks after the signal would be refused
        process.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join(600)
        assert process.wait(600) == -signal.SIGTERM  # 143 in a shell
        assert sorted(ended) == list(range(8))
        assert len(set(texts)) == 1
        assert len(texts[0].split()) > 190  # a special token has no text
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")


def test_flags_and_the_environment_reach_the_server_and_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def look(served: Any, settings: Any, bound: socket.socket, **options: Any) -> None:
        seen.update(served=served, settings=settings, host=bound.getsockname()[0], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr("sequencematch.serving.server.serve", look)
    monkeypatch.setenv("SEQUENCEMATCH_API_KEY", "secret")
    models = ["sequencematch/path-star", "sequencematch/arithmetic"]
    flags = ["--search", "--batch-size", "2", "--queue", "3", "--context", "100", "--hold-back", "5", "--timeout", "7"]
    result = run("serve", *models, *flags, "--port", "0", "--shutdown-timeout", "9", "--max-body", "1000")
    assert result.exit_code == 130
    assert result.stdout.startswith("Serving sequencematch/path-star, sequencematch/arithmetic at http://127.0.0.1:")
    engines = [served.engine for served in seen["served"].values()]
    assert list(seen["served"]) == models
    assert [(engine.slots, engine.queue, engine.context) for engine in engines] == [(2, 3, 100)] * 2
    settings = seen["settings"]
    assert (settings.api_key, settings.search, settings.hold_back) == ("secret", True, 5)
    assert (settings.timeout_s, settings.max_body_bytes, seen["shutdown_timeout_s"]) == (7.0, 1000, 9)
    assert "127.0.0.1" in settings.allowed_hosts  # only by its own names
    open_to_all = run("serve", "--host", "0.0.0.0", "--port", "0", "--api-key", "k")
    assert open_to_all.stderr == ""
    monkeypatch.delenv("SEQUENCEMATCH_API_KEY")
    assert "there is no --api-key" in run("serve", "--host", "0.0.0.0", "--port", "0").stderr
    assert seen["settings"].allowed_hosts == frozenset()


def test_a_folder_is_served_under_its_own_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("sequencematch.serving.server.serve", lambda served, *_, **__: seen.extend(served))
    assert run("serve", str(folder), "--port", "0").exit_code == 0
    assert seen == ["tiny"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere/at-all"], "`MODEL` must be a folder, a .gguf file, or a model on the hub. Got 'nowhere/at-all'"),
        (["sequencematch/path-star", "sequencematch/path-star"], "`MODEL` must name models of different names"),
        (["--host", "no.such.host.invalid"], "`--host` and `--port` must be an address of this machine"),
        (["--batch-size", "0"], "`--batch-size` must be at least 1. Got 0"),
        (["--queue", "0"], "`--queue` must be at least 1"),
        (["--context", "1000"], "`--context` must be from 2 to the model's own 256 tokens. Got 1000"),
        (["--timeout", "0"], "`--timeout` must be above 0"),
        (["--api-key", ""], "`--api-key` must not be empty"),
        (["--device", "abacus"], "`--device` must be a device of this machine"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], text: str) -> None:
    check_error(run("serve", "--port", "0", *arguments), text)


def test_a_port_in_use_is_one_line_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["sequencematch.cli.serve"], "load", lambda *_: pytest.fail("loaded a model first"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check_error(
            run("serve", "--port", str(port)), f"`--port` must be free on 127.0.0.1. Got {port}: Address already"
        )


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else True)
    check_error(run("serve"), "The server needs the package uvicorn: pip install 'sequencematch[serve]'.")


def test_help_lists_the_flags() -> None:
    shown = run("serve", "--help").stdout
    for flag in ("--host", "--port", "--api-key", "--search", "--batch-size", "--queue", "--device", "--dtype"):
        assert flag in shown
