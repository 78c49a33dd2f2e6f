"""Time and memory of the head, forward and backward, beside dense logits: 4,096 positions × 32,001 tokens."""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import interleaved_seconds, paired_ratio, peak_bytes, write_json
from sequencematch.policy.head import Unembedding, action_logits_and_values

OURS, DENSE, CONTROL = "slabs", "dense", "dense (A/A control)"


def dense(hidden: Tensor, unembedding: Unembedding, visit: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once, as a plain head and loss make them."""
    logits = unembedding.logits(hidden)
    return logits[visit, action], logits.logsumexp(1)


def measure(args: argparse.Namespace, hidden_size: int, trained: bool, dtype: torch.dtype) -> dict[str, Any]:
    """One row of the table."""
    torch.manual_seed(0)
    make = {"dtype": dtype, "device": args.device}
    hidden = torch.randn(args.positions, hidden_size, **make, requires_grad=True)
    weight = (torch.randn(args.vocab, hidden_size, **make) / hidden_size**0.5).requires_grad_(trained)
    unembedding = Unembedding(weight)
    visit = torch.arange(args.positions, device=args.device)
    action = torch.randint(0, args.vocab, (args.positions,), device=args.device)
    inputs = [hidden, weight] if trained else [hidden]

    def run(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[], object]:
        def step() -> object:
            logit, value = function(hidden, unembedding, visit, action)
            return torch.autograd.grad((logit - value).sum(), inputs)

        return step

    variants = {DENSE: run(dense), OURS: run(action_logits_and_values), CONTROL: run(dense)}
    seconds = interleaved_seconds(variants, args.rounds, device=args.device)
    memory = {name: peak_bytes(variants[name], args.device) for name in (OURS, DENSE)}
    return {
        "hidden": hidden_size,
        "unembedding": "trained" if trained else "frozen",
        "dtype": str(dtype).removeprefix("torch."),
        "dense_ms": 1e3 * statistics.median(seconds[DENSE]),
        "time": paired_ratio(seconds, OURS, DENSE),
        "control": paired_ratio(seconds, CONTROL, DENSE),
        "dense_mib": memory[DENSE] / 2**20,
        "ours_mib": memory[OURS] / 2**20,
        "memory": memory[OURS] / memory[DENSE],
    }


def main() -> None:
    """Print the table and, with `--out`, write it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu (one thread, process time) or cuda")
    parser.add_argument("--hidden", type=int, nargs="+", default=[512], help="hidden sizes (default 512)")
    parser.add_argument("--positions", type=int, default=4096, help="states (default 4096)")
    parser.add_argument("--vocab", type=int, default=32001, help="tokens (default 32001)")
    parser.add_argument("--dtype", nargs="+", default=["float32"], help="float32, bfloat16 or both")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(args, hidden, trained, getattr(torch, dtype))
        for hidden in args.hidden
        for dtype in args.dtype
        for trained in (False, True)
    ]
    names = ("hidden", "unembedding", "dtype", "dense ms", "time ×", "A/A", "dense MiB", "ours MiB", "memory ×")
    print("{:>7}{:>13}{:>10}{:>10}{:>8}{:>6}{:>11}{:>10}{:>10}".format(*names))
    for row in rows:
        print(
            "{hidden:>7}{unembedding:>13}{dtype:>10}{dense_ms:>10.1f}{time:>8.2f}{control:>6.2f}"
            "{dense_mib:>11.0f}{ours_mib:>10.0f}{memory:>10.2f}".format(**row)
        )
    if args.out:
        write_json(args.out, {"positions": args.positions, "vocab": args.vocab, "rows": rows})


if __name__ == "__main__":
    main()
