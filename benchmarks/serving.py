"""Serving: a server under load on a CPU, and the engine beside transformers' continuous batching on a GPU.

python -m benchmarks.serving load --seconds 60 --out results/serving/load.json
python -m benchmarks.serving engine --device cuda --shape SmolLM2-135M --out results/serving/engine_135m.json
python -m benchmarks.serving engine --device cuda --shape Llama-2-7b --out results/serving/engine_7b.json

`load` starts `sequencematch serve` as a program of its own, and lets clients ask it one request after another: first one client,
then several. `engine` needs no web framework.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import with_attention
from benchmarks.session import random_prompts
from benchmarks.shapes import EOS, LLAMA_2_7B, SMOLLM2_135M, TINY, Shape, build
from benchmarks.timing import Call, interleaved_seconds, one_thread, paired, write_json
from sequencematch.policy import Policy, Sampling
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX
from sequencematch.serving.engine import Engine
from sequencematch.serving.jobs import Job, Update

SHAPES: Mapping[str, Shape] = {shape.name: shape for shape in (SMOLLM2_135M, LLAMA_2_7B, TINY)}
ENGINE, CONTROL, GENERATE, PEER = "engine", "engine (A/A control)", "Policy.generate", "generate_batch"
#: No row deletes or ends early: all variants write the same number of tokens.
NEVER = -1e4


# The engine


def engine_seconds(options: argparse.Namespace) -> dict[str, Any]:
    """Rows that arrive together as concurrent streams, beside `Policy.generate` and `generate_batch` on the same prompts."""
    shape, device, new = SHAPES[options.shape], options.device, options.new_tokens
    one_thread()
    policy = Policy(build(shape, device).eval())
    prompts = random_prompts(policy, options.streams, options.prompt)
    engine = Engine(policy, slots=options.streams, queue=options.streams, context=options.prompt + new).start()
    written: dict[str, int] = {}

    def ours(name: str) -> Call:
        def run() -> None:
            written[name] = _decode(engine, prompts, new)

        return with_attention(policy, CAUSAL_PREFIX, run)

    def generate() -> None:
        result = policy.generate(prompts, max_new_tokens=new, seed=0, batch_size=options.streams, backspace_bias=NEVER)
        written[GENERATE] = sum(map(len, result.trajectories))

    variants: dict[str, Call] = {
        ENGINE: ours(ENGINE),
        CONTROL: ours(CONTROL),
        GENERATE: with_attention(policy, CAUSAL_PREFIX, generate),
    }
    if not options.without_peer:
        variants[PEER] = with_attention(policy, "sdpa", _generate_batch(policy, prompts, new, options, written))
    seconds = interleaved_seconds(variants, options.rounds, device=device, title=shape.name)
    engine.close()
    rates = {name: written[name] / statistics.median(times) for name, times in seconds.items()}
    ratios = {
        f"{ENGINE} / {name}, tokens per second": statistics.median(
            [written[ENGINE] / written[name] * ratio for ratio in paired(seconds, name, ENGINE)]
        )
        for name in variants
        if name != ENGINE
    }
    return {
        "shape": shape.name,
        "device": device,
        "streams": options.streams,
        "prompt": options.prompt,
        "new_tokens": new,
        "is_captured": engine.is_captured,
        "captured_steps": {str(tuple(uses)): True for uses in getattr(engine.decoder, "graphs", {})},
        "peer_attention": options.attention_seen if not options.without_peer else None,
        "actions_per_s": rates,
        "ratios": ratios,
        "seconds": {name: list(times) for name, times in seconds.items()},
    }


def _decode(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
    """Submit all prompts, and wait for all actions; returns how many there were."""
    written, left, done = [0], [len(prompts)], threading.Event()

    def deliver(update: Update) -> None:  # called by the engine's thread alone
        assert update.error is None, update.error
        written[0] += len(update.actions.chosen)
        left[0] -= update.ended
        if not left[0]:
            done.set()

    sampling = Sampling(max_new_tokens=new_tokens, seed=0, backspace_bias=NEVER)
    engine.submit([Job(prompt, sampling, deliver, row=row) for row, prompt in enumerate(prompts)])
    done.wait()
    return written[0]


def _generate_batch(
    policy: Policy, prompts: list[list[int]], new_tokens: int, options: argparse.Namespace, written: dict[str, int]
) -> Call:
    """transformers' continuous batching at temperature 1; the attention that it ran goes into `options.attention_seen`."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    sampled = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=new_tokens, eos_token_id=EOS, pad_token_id=0, bos_token_id=1
    )
    blocks = -(-(options.prompt + new_tokens) // 32) * len(prompts) + len(prompts)
    batching = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=max(512, len(prompts) * options.prompt))
    if hasattr(batching, "auto_switch_to_flash"):
        batching.auto_switch_to_flash = False  # it would download kernels

    def run() -> None:
        found = policy.base.generate_batch(
            inputs=prompts, generation_config=sampled, continuous_batching_config=batching, progress_bar=False
        )
        options.attention_seen = policy.base.config._attn_implementation
        written[PEER] = sum(len(output.generated_tokens) for output in found.values())

    return run


# A server under load


@dataclass
class Seen:
    """What the clients of one phase have seen."""

    tokens: int = 0
    actions: int = 0
    first_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    memory_bytes: list[int] = field(default_factory=list)

    def record(self, seconds: float) -> dict[str, Any]:
        """As JSON: rates, quantiles in milliseconds, memory."""
        return {
            "requests": dict(self.statuses),
            "tokens_per_s": self.tokens / seconds,
            "actions_per_s": self.actions / seconds,
            "first_token_ms": _quantiles(self.first_s),
            "token_ms": _quantiles(self.token_s),
            "memory_mb": [round(size / 2**20, 1) for size in self.memory_bytes],
            "memory_growth": self.memory_bytes[-1] / self.memory_bytes[0] - 1 if self.memory_bytes else None,
        }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [float("nan")]
    return {f"p{q}": 1000 * ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 99)}


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Host and port of a server in its own process, and the process's id."""
    command = [sys.executable, "-m", "sequencematch.cli", "serve", options.model, "--port", "0"]
    command += ["--batch-size", str(options.batch_size), "--queue", str(options.queue)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = next(word for word in line.split() if word.startswith("http://")).removeprefix("http://")
            yield address.rpartition(":")[0], int(address.rpartition(":")[2]), process.pid
        finally:
            process.terminate()


def _memory(process: int) -> int:
    """Resident bytes of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


async def _ask(host: str, port: int, body: Mapping[str, Any], seen: Seen) -> None:
    """One streamed request over a connection of its own, and the times at which its text came."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(sent)}\r\nConnection: close\r\n\r\n".encode() + sent)
    status, last = int((await reader.readline()).split()[1]), None
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        data = json.loads(line.removeprefix(b"data: "))
        if "error" in data:
            status = 500
        elif data["choices"]:
            now = time.perf_counter()
            (seen.first_s if last is None else seen.token_s).append(now - (began if last is None else last))
            last = now
        else:
            seen.tokens += data["usage"]["completion_tokens"]
            seen.actions += data["usage"]["actions"]
    seen.statuses[status] += 1
    writer.close()


async def _phase(host: str, port: int, process: int, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """So many clients, each asking again as soon as it is answered."""
    from sequencematch.tasks.path_star import as_row, graphs

    drawn, seen = graphs(3, 4, 30, seed=clients), Seen()
    limits = {
        "stream_options": {"include_usage": True},
        "backspace_bias": -1000,  # all requests write as many tokens, whatever the model would delete
        "max_tokens": options.new_tokens,
        "min_tokens": options.new_tokens,
        "hold_back": options.hold_back,
    }
    began = time.perf_counter()

    async def client(number: int) -> None:
        asked = 0
        while time.perf_counter() - began < options.seconds:
            asked += 1
            body = {"prompt": as_row(next(drawn))["prompt"], "seed": number * 10**6 + asked, "stream": True}
            await _ask(host, port, body | limits, seen)

    async def watch() -> None:
        await asyncio.sleep(options.seconds / 5)  # every buffer has been used once
        while True:
            seen.memory_bytes.append(_memory(process))
            await asyncio.sleep(options.seconds / 10)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(number) for number in range(clients)))
    watching.cancel()
    seen.memory_bytes.append(_memory(process))
    return {"clients": clients, **seen.record(time.perf_counter() - began)}


def under_load(options: argparse.Namespace) -> dict[str, Any]:
    """One client, then several."""
    with _server(options) as (host, port, process):
        warm = argparse.Namespace(**{**vars(options), "seconds": min(3.0, options.seconds)})
        asyncio.run(_phase(host, port, process, options.clients, warm))
        phases = [asyncio.run(_phase(host, port, process, n, options)) for n in (1, options.clients)]
    return {
        "model": options.model,
        "batch_size": options.batch_size,
        "new_tokens": options.new_tokens,
        "hold_back": options.hold_back,
        "seconds": options.seconds,
        "phases": phases,
        "throughput_ratio": phases[1]["tokens_per_s"] / phases[0]["tokens_per_s"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write JSON, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    load = kinds.add_parser("load", help="a server and its clients")
    load.add_argument("--model", default="sequencematch/path-star")
    load.add_argument("--clients", type=int, default=32)
    load.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    load.add_argument("--batch-size", type=int, default=32)
    load.add_argument("--queue", type=int, default=256)
    load.add_argument("--hold-back", type=int, default=4)
    load.add_argument("--new-tokens", type=int, default=32)
    load.set_defaults(measure=under_load)
    engine = kinds.add_parser("engine", help="the engine beside its peers")
    engine.add_argument("--device", default="cpu")
    engine.add_argument("--shape", choices=SHAPES, default=TINY.name)
    engine.add_argument("--streams", type=int, default=64)
    engine.add_argument("--prompt", type=int, default=32)
    engine.add_argument("--new-tokens", type=int, default=128)
    engine.add_argument("--rounds", type=int, default=11)
    engine.add_argument("--without-peer", action="store_true", help="leave out generate_batch")
    engine.set_defaults(measure=engine_seconds)
    for kind in (load, engine):
        kind.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    record = options.measure(options)
    write_json(options.out, record)
    print(json.dumps({name: value for name, value in record.items() if name != "seconds"}, indent=2))


if __name__ == "__main__":
    main()
