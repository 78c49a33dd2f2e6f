"""Profiles: the kernels a variant spends its time in on a GPU, and the operators on a CPU."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Call, now, provenance

FILE = "profile.md"
SHOWN, NAME_WIDTH = 12, 160


@dataclass(frozen=True)
class Busy:
    """A kernel or operator: the seconds spent in itself, and its calls."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Profile:
    """One call of a variant: its seconds under the profiler, and its kernels or operators, the longest first."""

    seconds: float
    busy: tuple[Busy, ...]


def profile(call: Call, device: str) -> Profile:
    """Profile one call with torch's profiler, after a warm-up call."""
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
    """Summed here: a generation has hundreds of thousands of events, which torch's own summary takes minutes for."""
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
    (folder / FILE).write_text(markdown(profiles, provenance(command, threads=1)))


def markdown(profiles: Mapping[str, Profile], made_by: Mapping[str, str]) -> str:
    """A table per variant of its longest kernels or operators, below the provenance."""
    lines = ["# Where the time goes", "", *(f"- {name}: {value}" for name, value in made_by.items())]
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
