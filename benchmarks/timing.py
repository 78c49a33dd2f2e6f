"""Timing: variants interleaved in one process, medians of paired ratios, peak memory; and the provenance of results."""

import ctypes
import importlib.metadata
import importlib.util
import json
import math
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

Seconds = Mapping[str, list[float]]
Call = Callable[[], object]


@dataclass(frozen=True)
class Measurement:
    """A number, the rounds it is the median of, and the range of their middle half.

    `target` is its key in `targets.py`, if it has one.
    """

    suite: str
    name: str
    value: float
    unit: str = "×"
    rounds: int = 1
    middle: tuple[float, float] | None = None
    target: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


def one_thread() -> None:
    """Use one CPU thread, and keep glibc from returning freed pages: taking them again would add page faults at random."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            for threshold in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
                libc.mallopt(threshold, 2**31 - 1)


def now(device: str) -> float:
    """Seconds on a clock: process time on a CPU, so that other programs don't count; on a GPU wall time after a synchronize."""
    if not device.startswith("cuda"):
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(call: Call, device: str, repeats: int = 1) -> float:
    """Seconds per call."""
    start = now(device)
    for _ in range(repeats):
        call()
    return (now(device) - start) / repeats


def interleaved_seconds(
    variants: Mapping[str, Call], rounds: int, *, device: str = "cpu", at_least_s: float = 0.05, title: str = ""
) -> Seconds:
    """Seconds per call of each variant in each round; every round runs all variants, in a random order.

    A variant runs with the caches and the memory that the variant before it left. Therefore the order changes, and each variant is
    called repeatedly, for at least `at_least_s` a round.
    """
    orders = random.Random(0)
    repeats: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    total = (rounds + 1) * len(variants)
    with tqdm(total=total, desc=title, unit="run", leave=False, disable=None) as bar:
        for name, call in variants.items():
            warming = seconds_of(call, device)
            once = warming if warming > 20 * at_least_s else seconds_of(call, device)
            repeats[name] = max(1, math.ceil(at_least_s / max(once, 1e-6)))
            bar.update()
        for _ in range(rounds):
            for name in orders.sample(list(variants), len(variants)):
                seconds[name].append(seconds_of(variants[name], device, repeats[name]))
                bar.update()
    return seconds


def paired(seconds: Seconds, slow: str, fast: str) -> list[float]:
    """Seconds of `slow` over seconds of `fast`, round by round."""
    return [s / f for s, f in zip(seconds[slow], seconds[fast], strict=True)]


def measured(suite: str, name: str, values: list[float], **fields: Any) -> Measurement:
    """The median of these values, one per round, with the range of their middle half."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Measurement(suite, name, statistics.median(values), rounds=len(values), middle=(low, high), **fields)


def peak_bytes(call: Call, device: str = "cpu") -> int:
    """Peak bytes of torch's allocator during the call, minus the bytes it held before."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def copy_bandwidth(device: str, size: int | None = None) -> float:
    """Bytes per second that a copy reads and writes: the memory bandwidth reached in practice."""
    size = size or (2**31 if device.startswith("cuda") else 2**26)  # far beyond any cache
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [seconds_of(lambda: target.copy_(source), device, repeats=5) for _ in range(5)]
    return 2 * size / min(seconds)


def machine(device: str) -> str:
    """`cpu`, or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write results with their provenance, under the key "signature"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"signature": provenance(), **record}, indent=2, ensure_ascii=False) + "\n")
    print(f"\nwritten to {path}")


def provenance(command: str | None = None, threads: int | None = None) -> dict[str, str]:
    """Command, commit, date, hardware and versions of a published number."""
    if command is None:
        command = " ".join(["python -m", *sys.orig_argv[sys.orig_argv.index("-m") + 1 :]])
    accelerator = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    packages = [name for name in ("torch", "transformers", "peft", "trl") if importlib.util.find_spec(name)]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return {
        "command": command,
        "commit": _commit(),
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {threads or torch.get_num_threads()} thread, {_processor()}{accelerator}",
        "versions": ", ".join([f"python {platform.python_version()}", *versions]),
    }


@cache
def _commit() -> str:
    """The commit a run began on. Read once: a commit made during a long run is not the code it measures."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return run.stdout.strip()

    changed = git("status", "--porcelain", "src", "benchmarks")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def _processor() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or "unknown processor"
