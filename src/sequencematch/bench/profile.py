"""Where a variant's time goes: its busiest kernels on a GPU, its busiest operators on a CPU."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sequencematch.bench.measure import Call, now, signature

FILE = "profile.md"
SHOWN, NAME_WIDTH = 12, 160


@dataclass(frozen=True)
class Busy:
    """A kernel or operator: for how long it was busy itself, in how many calls."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Profile:
    """One call: how long it took under the profiler, and all that was busy meanwhile, the busiest first."""

    seconds: float
    busy: tuple[Busy, ...]


def profile(call: Call, device: str) -> Profile:
    """One call under torch's profiler, after one that warms up."""
    call()
    is_cuda = device.startswith("cuda")
    activity = torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        start = now(device)
        call()
        seconds = now(device) - start
    busy = _kernels(profiler) if is_cuda else _operators(profiler)
    return Profile(seconds, tuple(sorted(busy, key=lambda entry: -entry.seconds)))


def _kernels(profiler: Any) -> list[Busy]:
    """From the raw events: a generation has hundreds of thousands, and torch's own summary takes minutes over them."""
    durations: dict[str, list[int]] = defaultdict(list)
    for event in profiler.profiler.kineto_results.events():
        if event.device_type().name == "CUDA":
            durations[event.name()].append(event.duration_ns())
    return [Busy(name, sum(times) / 1e9, len(times)) for name, times in durations.items()]


def _operators(profiler: Any) -> list[Busy]:
    return [Busy(entry.key, entry.self_cpu_time_total / 1e6, entry.count) for entry in profiler.key_averages()]


def save(profiles: Mapping[str, Profile], folder: Path, command: str) -> None:
    """Write `profile.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(markdown(profiles, signature(command, threads=1)))


def markdown(profiles: Mapping[str, Profile], signed: Mapping[str, str]) -> str:
    """A table for each variant of what was busy longest, and how it was made."""
    lines = ["# Where the time goes", "", *(f"- {name}: {value}" for name, value in signed.items())]
    for title, found in profiles.items():
        whole = sum(entry.seconds for entry in found.busy)
        calls = sum(entry.calls for entry in found.busy)
        lines += [
            "",
            f"## {title}",
            "",
            f"{_ms(found.seconds)} ms under the profiler, busy for {_ms(whole)} in {calls:,} calls",
        ]
        lines += ["", "| ms | of all | calls | what |", "|---:|---:|---:|---|"]
        for entry in found.busy[:SHOWN]:
            share = entry.seconds / whole if whole else 0.0
            lines.append(f"| {_ms(entry.seconds)} | {share:.1%} | {entry.calls:,} | `{entry.name[:NAME_WIDTH]}` |")
    return "\n".join(lines) + "\n"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"
