"""One scoring step, forward and backward, under dense and FlexAttention: which mask to build on a GPU."""

import argparse
import statistics
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.decoding import SHAPES
from benchmarks.measure import interleaved_seconds, paired_ratio, peak_bytes, write_json
from sequencematch.core.encoding import encode
from sequencematch.core.mdp import Trajectory
from sequencematch.core.objectives import sequencematch_loss
from sequencematch.policy import Policy


def main() -> None:
    """Print seconds and memory of each attention implementation at each length, tokens being equal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scoring", description=__doc__)
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 4096], help="nodes per row (default 1024 4096)")
    parser.add_argument("--tokens", type=int, default=8192, help="nodes in all (default 8192)")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPES, "head_dim": 64}, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config).to(device="cuda", dtype=torch.bfloat16)
    policy = Policy.from_pretrained(model)
    rows = []
    for length in args.length:
        actions = torch.randint(3, 49152, (args.tokens // length, length * 2 // 3))
        actions[torch.rand(actions.shape) < 0.1] = policy.space.bkspc
        batch = [Trajectory.rollout(policy.space, (1,), (*row, 2)) for row in actions.tolist()]
        encoding = encode(batch, row_length=length, device="cuda")
        half = len(batch) // 2

        def step(implementation: str, encoding=encoding, half=half) -> None:  # type: ignore[no-untyped-def]
            model.set_attn_implementation(implementation)
            scores = policy(encoding)
            sequencematch_loss(scores[:half], scores[half:], alpha=0.1, gamma=0.998).loss.backward()
            policy.zero_grad()

        variants = {name: lambda name=name: step(name) for name in ("sdpa", "flex_attention")}
        seconds = interleaved_seconds(variants, args.rounds, device="cuda")
        for name in variants:
            peak = peak_bytes(variants[name], "cuda") / 2**20
            ratio = paired_ratio(seconds, name, "sdpa")
            rows.append(
                {
                    "length": length,
                    "attention": name,
                    "ms": 1e3 * statistics.median(seconds[name]),
                    "over_sdpa": ratio,
                    "mib": peak,
                }
            )
    for row in rows:
        print("{length:>6}  {attention:<16}{ms:>9.1f} ms{over_sdpa:>8.2f} × sdpa{mib:>9.0f} MiB".format(**row))
    if args.out:
        write_json(args.out, {"tokens": args.tokens, "rows": rows})


if __name__ == "__main__":
    main()
