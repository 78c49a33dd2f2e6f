"""How everything here is measured: variants interleaved in one process, medians of paired ratios, peak memory by allocation."""

import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

Seconds = Mapping[str, list[float]]


def interleaved_seconds(
    variants: Mapping[str, Callable[[], object]], rounds: int, at_least_s: float = 0.05, device: str = "cpu"
) -> Seconds:
    """Seconds per call of each variant in each round, one variant after the other inside a round.

    On a CPU it is process time, so that other programs don't count; on a GPU wall time up to the end of all its work. A
    variant is called so often in a row that a round of it lasts `at_least_s`, so that what ran before it does not matter.
    """
    repeats: dict[str, int] = {}
    for name, call in variants.items():
        call()  # warm up
        repeats[name] = max(1, math.ceil(at_least_s / max(_seconds(call, 1, device), 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            seconds[name].append(_seconds(call, repeats[name], device) / repeats[name])
    return seconds


def _seconds(call: Callable[[], object], repeats: int, device: str) -> float:
    def clock() -> float:
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    start = clock()
    for _ in range(repeats):
        call()
    return clock() - start


def paired_ratio(seconds: Seconds, slow: str, fast: str) -> float:
    """The median over rounds of how many times longer `slow` took than `fast` in the same round."""
    return statistics.median(s / f for s, f in zip(seconds[slow], seconds[fast], strict=True))


def peak_bytes(call: Callable[[], object], device: str = "cpu") -> int:
    """The most memory that torch's allocator held at once during the call, beyond what it held before."""
    if device != "cpu":
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


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Numbers with their signature."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"signature": signature(), **record}, indent=2, ensure_ascii=False) + "\n")
    print(f"\nwritten to {path}")


def signature() -> dict[str, str]:
    """What a published number carries besides itself: command, commit, hardware and versions."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return run.stdout.strip()

    changed = git("status", "--porcelain", "src", "benchmarks")
    accelerator = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return {
        "command": " ".join(["python -m", *sys.orig_argv[sys.orig_argv.index("-m") + 1 :]]),
        "commit": (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else ""),
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread, {_processor()}{accelerator}",
        "versions": f"python {platform.python_version()}, torch {torch.__version__}",
    }


def _processor() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or "unknown processor"
