"""Actions per second of `Policy.generate` beside Hugging Face's `model.generate`: SmolLM2-135M's shapes, random weights."""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.measure import write_json
from sequencematch.policy import Policy

SHAPES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
DYNAMIC = "model.generate, dynamic cache"


def measure(policy: Policy, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every variant samples at temperature 1 in interleaved rounds; none ends early but by its limit."""
    prompts = torch.randint(
        3, policy.space.vocab_size, (batch, args.prompt_length), generator=torch.Generator().manual_seed(0)
    )
    inputs, rows, new_tokens = prompts.to(policy.device), prompts.tolist(), args.new_tokens

    def hugging_face(**options: Any) -> Callable[[], int]:
        length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        ids = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
        config = GenerationConfig(do_sample=True, top_k=0, **ids, **length, **options)

        def run() -> int:
            policy.base.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config)
            return batch * new_tokens

        return run

    def ours(bias: float) -> Callable[[], int]:
        def run() -> int:
            result = policy.generate(rows, max_new_tokens=new_tokens, seed=0, batch_size=batch, backspace_bias=bias)
            return sum(map(len, result.trajectories))

        return run

    variants = {
        DYNAMIC: hugging_face(),
        "Policy.generate, never deleting": ours(-1e4),
        "Policy.generate, deleting": ours(9.5),
    }
    variants["model.generate, A/A control"] = hugging_face()
    if args.static:
        variants["model.generate, static cache"] = hugging_face(cache_implementation="static")
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(args.rounds + 1):
        for name, run in variants.items():
            start = _now(policy.device)
            actions = run()
            if round_number:  # the first warms up
                rates[name].append(actions / (_now(policy.device) - start))
    return [
        {
            "batch": batch,
            "variant": name,
            "actions_per_s": statistics.median(rate),
            "times_dynamic": statistics.median(r / b for r, b in zip(rate, rates[DYNAMIC], strict=True)),
        }
        for name, rate in rates.items()
    ]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Print the table and, with `--out`, write it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="batch sizes (default 1 16)")
    parser.add_argument("--prompt-length", type=int, default=32, help="tokens per prompt (default 32)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens to write (default 32)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds after a warm-up (default 3)")
    parser.add_argument("--static", action="store_true", help="also the static cache, which compiles first")
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config).to(device=args.device, dtype=getattr(torch, args.dtype)).eval()
    policy = Policy.from_pretrained(model)
    rows = [row for batch in args.batch for row in measure(policy, batch, args)]
    print(f"{'batch':>6}  {'variant':<34}{'actions/s':>11}{'× dynamic':>11}")
    for row in rows:
        print("{batch:>6}  {variant:<34}{actions_per_s:>11.0f}{times_dynamic:>11.2f}".format(**row))
    if args.out:
        arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        write_json(args.out, {"arguments": arguments, "rows": rows})


if __name__ == "__main__":
    main()
