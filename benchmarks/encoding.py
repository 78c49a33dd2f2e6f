"""Encoding: throughput beside Algorithm A as printed in the paper, and memory against length.

Every variant turns the same action sequences into inputs, positions and attention on the CPU.
"""

import statistics
from collections.abc import Iterator

import torch

from benchmarks.session import Session
from benchmarks.timing import Measurement, measured, paired, peak_bytes
from benchmarks.workloads import random_rollouts, space_of
from sequencematch.core.encoding import encode, stack_nodes
from sequencematch.core.mdp import Trajectory
from tests.oracles.algorithm_a import printed_algorithm_a

PRINTED, TENSORS, CONTROL = "Algorithm A as printed", "alive intervals", "alive intervals (A/A control)"
BACKSPACES = 0.2
SPACE = space_of(32_000)


def encoding(session: Session) -> Iterator[Measurement]:
    """Seconds of the printed pseudocode over ours, and bytes per token at growing lengths."""
    batch, lengths = session.scale.encoding_batch, session.scale.encoding_lengths
    length = lengths[0]
    trajectories = random_rollouts(SPACE, batch, length, BACKSPACES, seed=0)
    events, ends, floors = _as_tensors(trajectories)
    lists = events.tolist()
    variants = {
        PRINTED: lambda: [printed_algorithm_a(row, SPACE.bkspc) for row in lists],
        TENSORS: lambda: stack_nodes(events, ends, floors, bkspc=SPACE.bkspc),
        CONTROL: lambda: stack_nodes(events, ends, floors, bkspc=SPACE.bkspc),
        "the paper's layout": lambda: stack_nodes(events, ends, floors, bkspc=SPACE.bkspc, layout="paper"),
        "encode, from Trajectory objects": lambda: encode(trajectories),
        "encode, packed": lambda: encode(trajectories, row_length=2 * length),
    }
    seconds = session.seconds("encoding", variants)
    speed = {name: batch * length / statistics.median(times) / 1e6 for name, times in seconds.items()}
    yield measured(
        "encoding",
        "A/A control: alive intervals / alive intervals",
        paired(seconds, CONTROL, TENSORS),
        target="control",
        detail={"batch": batch, "events": length, "backspaces": BACKSPACES, "million_tokens_per_s": speed},
    )
    for name in variants:
        if name not in (PRINTED, CONTROL):
            yield measured("encoding", f"{PRINTED} / {name}", paired(seconds, PRINTED, name))
    for size in lengths:
        tensors = _as_tensors(random_rollouts(SPACE, batch, size, BACKSPACES, seed=0))
        peak = peak_bytes(lambda t=tensors: stack_nodes(*t, bkspc=SPACE.bkspc))  # type: ignore[misc]
        yield Measurement(
            "encoding",
            f"peak memory at {size} events",
            peak / (batch * size),
            unit="B/token",
            detail={"mib": peak / 2**20, "dense_mask_mib": batch * size**2 / 2**20},
        )


def _as_tensors(trajectories: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Events, lengths and floors, as `stack_nodes` takes them."""
    events = torch.tensor([t.initial + t.executed for t in trajectories])
    return events, torch.full((len(events),), events.shape[1]), torch.ones(len(events), dtype=torch.long)
