"""How everything here is measured: variants interleaved in one process, medians of paired ratios, peak memory by allocation."""

import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date

import torch

Seconds = Mapping[str, list[float]]


def interleaved_seconds(variants: Mapping[str, Callable[[], object]], rounds: int, at_least_s: float = 0.05) -> Seconds:
    """Process time per call of each variant in each round, one variant after the other inside a round.

    A variant is called so often in a row that a round of it lasts `at_least_s`, so that what ran before it does not matter.
    """
    repeats: dict[str, int] = {}
    for name, call in variants.items():
        call()  # warm up
        repeats[name] = max(1, math.ceil(at_least_s / max(_seconds(call, 1), 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            seconds[name].append(_seconds(call, repeats[name]) / repeats[name])
    return seconds


def _seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        call()
    return time.process_time() - start


def paired_ratio(seconds: Seconds, slow: str, fast: str) -> float:
    """The median over rounds of how many times longer `slow` took than `fast` in the same round."""
    return statistics.median(s / f for s, f in zip(seconds[slow], seconds[fast], strict=True))


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that torch's CPU allocator held at once during the call, beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def signature() -> dict[str, str]:
    """What a published number carries besides itself: command, commit, hardware and versions."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "src", "benchmarks"], capture_output=True, text=True, check=False
    )
    return {
        "command": " ".join(["python -m", *sys.orig_argv[sys.orig_argv.index("-m") + 1 :]])
        if "-m" in sys.orig_argv
        else sys.argv[0],
        "commit": (commit.stdout.strip() or "unknown") + (" with changes" if changed.stdout.strip() else ""),
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread, {_processor()}",
        "versions": f"python {platform.python_version()}, torch {torch.__version__}",
    }


def _processor() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or "unknown processor"
