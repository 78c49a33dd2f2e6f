"""A real server in this process, on a free port, and models that delete often."""

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tokenizers
import torch
import transformers
import uvicorn

from sequencematch.policy import Policy
from sequencematch.serving.app import create_app
from sequencematch.serving.engine import Engine
from sequencematch.serving.server import bound_socket
from sequencematch.serving.settings import Served, ServerSettings
from tests.policy.tiny_models import DECODED, exact_llama
from tests.serving.rows import policy

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}assistant:"


@functools.cache
def byte_policy() -> Policy:
    """Every token is a piece of a byte-level vocabulary: most characters of its random text take several tokens."""
    special = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    # The bytes of é, €, 😀 and a few letters; the model writes them in any order, mostly wrong UTF-8.
    letters = [_BYTES[b] for b in sorted({*"é€😀".encode(), *b" abcdefghijklmnopqrstuvwxyz.,!?0123"})]
    vocabulary = special | {letter: n for n, letter in enumerate(letters, start=3)}
    assert len(vocabulary) <= DECODED["vocab_size"]
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token=None))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    names = {f"{name[1:-1]}_token": name for name in special}
    found = Policy(exact_llama(), transformers.PreTrainedTokenizerFast(tokenizer_object=core, **names))
    with torch.no_grad():
        found.backspace.row.copy_(policy().backspace.row)
    return found


def _byte_letters() -> dict[int, str]:
    """How byte-level vocabularies spell a byte: as itself if it can be printed, else by a number from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_BYTES = _byte_letters()


@contextmanager
def running(
    models: Mapping[str, Policy],
    settings: ServerSettings | None = None,
    *,
    chat_template: str | None = None,
    **options: Any,
) -> Iterator[str]:
    """The address of a server. `options` are the engines'."""
    served = {}
    for name, found in models.items():
        if chat_template is not None and found.tokenizer is not None:
            found.tokenizer.chat_template = chat_template
        served[name] = Served(name, Engine(found, **options).start())
    with serving(served, settings or ServerSettings()) as address:
        yield address


@contextmanager
def serving(served: Mapping[str, Served], settings: ServerSettings) -> Iterator[str]:
    """The address of a server whose engines run."""
    bound = bound_socket("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(create_app(served, settings), log_level="error", lifespan="on", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        bound.close()
