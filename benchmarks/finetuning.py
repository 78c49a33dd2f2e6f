"""Fine-tune a real model on prompt–completion data; record losses, memory, and the share of time spent in rollouts."""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import write_json
from sequencematch import Policy, SequenceMatchConfig, SequenceMatchTrainer


def fine_tune(args: argparse.Namespace) -> dict[str, Any]:
    """Train and test once; return the record."""
    train, test = ([json.loads(line) for line in path.read_text().splitlines()] for path in (args.train, args.test))
    peft_config = None
    if args.adapter:
        from peft import LoraConfig

        peft_config = LoraConfig(r=64, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    config = SequenceMatchConfig(
        output_dir=str(args.run),
        objective=args.objective,
        noise_rate=None if args.objective in ("mle", "unlikelihood") else 0.1,
        noise_source="tokens" if "noise_tokens" in train[0] else "uniform",
        alpha=args.alpha,
        max_steps=args.steps,
        bc_steps=args.steps // 3,
        bc_anneal_steps=args.steps // 3,
        per_device_train_batch_size=32,
        learning_rate=5e-4 if args.adapter else 1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 10,
        max_length=128,
        max_completion_length=32,
        packing=args.packing,
        logging_steps=10,
        save_steps=args.steps // 3,
        save_total_limit=1,
        bf16=torch.cuda.is_available(),
        report_to="none",
        seed=args.seed,
        log_completions=True,
        disable_tqdm=True,
    )
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    policy = Policy.from_pretrained(args.model, dtype=torch.float32)
    trainer = SequenceMatchTrainer(policy, config, train_dataset=train, peft_config=peft_config)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    answers = trainer.model.generate([row["prompt"] for row in test], max_new_tokens=32, temperature=0, batch_size=250)
    right = sum(text.strip() == row["completion"].strip() for text, row in zip(answers.texts, test, strict=True))
    steps_between = [b["step"] - a["step"] for a, b in itertools.pairwise([{"step": 0}, *history])]
    drawing = [min(10, max(0, entry["step"] - args.steps // 3 - 1)) for entry in history]
    in_rollouts = sum(entry.get("rollouts/seconds", 0.0) * n for entry, n in zip(history, drawing, strict=True))
    in_steps = sum(entry["step_seconds"] * n for entry, n in zip(history, steps_between, strict=True))
    return {
        "model": args.model.name,
        "rows": len(train),
        "adapter": args.adapter,
        "settings": config.own_values()
        | {"learning_rate": config.learning_rate, "batch_size": 32, "steps": args.steps},
        "seconds": seconds,
        "seconds_in_rollouts": in_rollouts,
        "share_in_rollouts": in_rollouts / in_steps,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
        "greedy_accuracy": right / len(test),
        "test_rows": len(test),
        "history": history,
    }


def main() -> None:
    """Write the record as JSON and print a summary."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetuning", description=__doc__)
    parser.add_argument("model", type=Path, help="a model's folder")
    parser.add_argument("train", type=Path, help="a .jsonl file with prompt, completion and perhaps noise_tokens")
    parser.add_argument("test", type=Path, help="a .jsonl file with prompt and completion")
    parser.add_argument("--adapter", action="store_true", help="LoRA, r = 64, instead of all weights")
    parser.add_argument("--objective", default="sequencematch", help="sequencematch, bc, mle or unlikelihood")
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=300, help="a third of them cloning, a third annealing")
    parser.add_argument("--packing", action="store_true", help="pack rows and share prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, default=Path("out/finetuning"), help="where checkpoints go")
    parser.add_argument("--out", type=Path, required=True, help="where the numbers go")
    args = parser.parse_args()
    result = fine_tune(args)
    write_json(args.out, result)
    shown = ("seconds", "share_in_rollouts", "peak_gib", "greedy_accuracy")
    print("  ".join(f"{name} {result[name]}" for name in shown), f"loss {result['history'][-1]['loss']:.3f}")


if __name__ == "__main__":
    main()
