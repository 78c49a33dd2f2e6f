"""Encoding throughput beside Algorithm A as printed, and memory against length.

Every variant turns the same sequences of actions into inputs, positions and attention; all run on one thread, interleaved,
in process time.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import interleaved_seconds, paired_ratio, peak_bytes, write_json
from sequencematch.core.encoding import encode, stack_nodes
from sequencematch.core.mdp import ActionSpace, Trajectory
from tests.oracles.algorithm_a import printed_algorithm_a

SPACE = ActionSpace(vocab_size=32_000, eos=2, bos=1)
PRINTED = "Algorithm A as printed, dense mask"
TENSORS = "alive intervals"
CONTROL = "alive intervals (A/A control)"


def random_trajectories(batch: int, length: int, backspaces: float, seed: int) -> list[Trajectory]:
    """Trajectories of `length` events, <bos> and <eos> among them, of which a share are backspaces."""
    generator = torch.Generator().manual_seed(seed)
    actions = torch.randint(3, SPACE.vocab_size, (batch, length - 2), generator=generator)
    actions[torch.rand(batch, length - 2, generator=generator) < backspaces] = SPACE.bkspc
    return [Trajectory.rollout(SPACE, (SPACE.bos or 0,), (*row, SPACE.eos)) for row in actions.tolist()]


def as_tensors(trajectories: Sequence[Trajectory]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Events, lengths and floors, as `stack_nodes` takes them."""
    events = torch.tensor([t.initial + t.executed for t in trajectories])
    return events, torch.full((len(events),), events.shape[1]), torch.ones(len(events), dtype=torch.long)


def throughput(batch: int, length: int, backspaces: float, rounds: int, seed: int) -> list[dict[str, Any]]:
    """Million tokens per second of each variant, and how many times as fast as the printed pseudocode it is."""
    trajectories = random_trajectories(batch, length, backspaces, seed)
    events, lengths, floors = as_tensors(trajectories)
    lists = events.tolist()
    variants = {
        PRINTED: lambda: [printed_algorithm_a(row, SPACE.bkspc) for row in lists],
        TENSORS: lambda: stack_nodes(events, lengths, floors, bkspc=SPACE.bkspc),
        CONTROL: lambda: stack_nodes(events, lengths, floors, bkspc=SPACE.bkspc),
        "alive intervals, the paper's layout": lambda: stack_nodes(
            events, lengths, floors, bkspc=SPACE.bkspc, layout="paper"
        ),
        "encode: from Trajectory objects": lambda: encode(trajectories),
        "encode: packed into rows of 2 × length": lambda: encode(trajectories, row_length=2 * length),
    }
    seconds = interleaved_seconds(variants, rounds)
    return [
        {
            "variant": name,
            "million_tokens_per_s": batch * length / statistics.median(seconds[name]) / 1e6,
            "times_printed": paired_ratio(seconds, PRINTED, name),
            "over_alive_intervals": paired_ratio(seconds, name, TENSORS),
        }
        for name in variants
    ]


def memory(lengths: Sequence[int], batch: int, backspaces: float, seed: int) -> list[dict[str, Any]]:
    """Peak memory of encoding one batch at each length, beside what the dense mask alone would take."""
    rows = []
    for length in lengths:
        events, ends, floors = as_tensors(random_trajectories(batch, length, backspaces, seed))
        peak = peak_bytes(lambda e=events, n=ends, f=floors: stack_nodes(e, n, f, bkspc=SPACE.bkspc))  # type: ignore[misc]
        rows.append(
            {
                "length": length,
                "peak_mib": peak / 2**20,
                "bytes_per_token": peak / (batch * length),
                "dense_mask_mib": batch * length**2 / 2**20,
            }
        )
    return rows


def main() -> None:
    """Print both tables and, with `--out`, write them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoding", description=__doc__)
    parser.add_argument("--batch", type=int, default=64, help="trajectories at a time (default 64)")
    parser.add_argument("--length", type=int, default=1024, help="events per trajectory (default 1024)")
    parser.add_argument("--backspaces", type=float, default=0.2, help="share of actions that delete (default 0.2)")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    parser.add_argument("--seed", type=int, default=0, help="of the trajectories (default 0)")
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    args = parser.parse_args()
    if args.length < 3 or args.batch < 1 or args.rounds < 1 or not 0 <= args.backspaces < 1:
        parser.error("--length must be at least 3, --batch and --rounds at least 1, --backspaces in [0, 1)")
    torch.set_num_threads(1)

    speeds = throughput(args.batch, args.length, args.backspaces, args.rounds, args.seed)
    print(
        f"Encoding {args.batch} × {args.length} events, {args.backspaces:.0%} backspaces, median of {args.rounds} rounds\n"
    )
    print(f"{'variant':<42}{'M tokens/s':>12}{'× printed':>12}{'/ intervals':>13}")
    for row in speeds:
        print(
            "{variant:<42}{million_tokens_per_s:>12.2f}{times_printed:>12.1f}{over_alive_intervals:>13.2f}".format(
                **row
            )
        )

    sizes = memory([1024, 2048, 4096, 8192, 16384], args.batch, args.backspaces, args.seed)
    print(f"\nPeak memory of alive intervals, batch {args.batch}\n")
    print(f"{'length':>8}{'peak MiB':>12}{'bytes/token':>14}{'a dense mask would take, MiB':>32}")
    for size in sizes:
        print("{length:>8}{peak_mib:>12.1f}{bytes_per_token:>14.1f}{dense_mask_mib:>32.0f}".format(**size))

    if args.out:
        write_json(args.out, {"arguments": vars(args) | {"out": str(args.out)}, "throughput": speeds, "memory": sizes})


if __name__ == "__main__":
    main()
