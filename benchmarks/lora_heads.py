"""LoRA with three kinds of output layer: frozen, one trained row for `<eos>`, and trained whole. docs/deviations.md has the result.

python -m benchmarks.lora_heads sequencematch/arithmetic-base --out results/lora_heads/arithmetic.json
python -m benchmarks.lora_heads FOLDER --rows captions.jsonl --room 40 --out results/lora_heads/captions.json
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tqdm import tqdm

from benchmarks.timing import write_json
from sequencematch import Policy, SequenceMatchConfig, SequenceMatchTrainer
from sequencematch.experiments.demo import FULL, task
from sequencematch.metrics import own_errors

HEADS = ("frozen", "<eos> row", "whole", "no adapter")
#: Rows for the test, the last of the data.
TEST_ROWS = 300


def adapter(head: str, eos: int) -> LoraConfig | None:
    """LoRA on all linear layers but the output layer, and what is trained of that; None to train all weights."""
    extra: dict[str, dict[str, Any]] = {
        "frozen": {"trainable_token_indices": {}},
        "<eos> row": {"trainable_token_indices": {"lm_head": [eos]}},
        "whole": {"modules_to_save": ["lm_head"]},
    }
    if head not in extra:
        return None
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", **extra[head])


def run(model: str, rows: Sequence[Mapping[str, Any]], head: str, seed: int, steps: int, room: int) -> dict[str, Any]:
    """Fine-tune with SequenceMatch, noise from the whole vocabulary, and measure on the last rows at temperature 1."""
    train, test = rows[:-TEST_ROWS], rows[-TEST_ROWS:]
    policy = Policy.from_pretrained(model, dtype=torch.float32)
    tokenizer: Any = policy.tokenizer
    with tempfile.TemporaryDirectory() as folder:
        args = SequenceMatchConfig(
            folder,
            noise_rate=0.1,
            noise_source="uniform",
            max_steps=steps,
            bc_steps=steps // 3,
            bc_anneal_steps=steps // 3,
            per_device_train_batch_size=32,
            learning_rate=1e-3 if head == "no adapter" else 2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 20,
            max_length=min(128, policy.max_positions),
            max_completion_length=room,
            packing=True,
            logging_steps=max(steps // 20, 1),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        )
        began = time.perf_counter()
        trainer = SequenceMatchTrainer(policy, args, train_dataset=train, peft_config=adapter(head, policy.space.eos))
        trainer.train()
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    done = trainer.model.generate(
        [row["prompt"] for row in test], max_new_tokens=room, seed=0, protect_prompt=True, batch_size=TEST_ROWS
    )
    wanted = [tokenizer(row["prompt"] + row["completion"])["input_ids"] for row in test]
    errors, rights = own_errors(done.trajectories, wanted)
    pairs = zip(done.texts, test, strict=True)
    return {
        "model": str(model),
        "head": head,
        "seed": seed,
        "steps": steps,
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "right": sum(text.strip() == row["completion"].strip() for text, row in pairs) / len(test),
        "cut": sum(t.truncated for t in done.trajectories) / len(test),
        "deletes": sum(t.executed.count(t.space.bkspc) for t in done.trajectories) / sum(map(len, done.trajectories)),
        "own_errors_deleted": errors.value,
        "right_tokens_deleted": rights.value,
        "loss": {name: last[name] for name in ("loss/bc", "objective")},
        "rollouts": {
            name: last[f"completions/{name}"]
            for name in ("clipped_ratio", "backspace_rate")
            if f"completions/{name}" in last
        },
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    """Write every run as JSON, and print means over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name")
    parser.add_argument("--rows", type=Path, help="JSONL with prompt and completion; default: sums in bases 5 to 9")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--room", type=int, default=12, help="tokens of a rollout")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = (
        task(FULL).train() if options.rows is None else [json.loads(x) for x in options.rows.read_text().splitlines()]
    )
    cells = [(head, seed) for seed in range(options.seeds) for head in HEADS]
    found = []
    for head, seed in tqdm(cells, unit="run"):
        found.append(run(options.model, rows, head, seed, options.steps, options.room))
        write_json(options.out, {"runs": found})
    for head in HEADS:
        of_head = [one for one in found if one["head"] == head]
        means = {
            name: sum(one[name] for one in of_head) / len(of_head)
            for name in ("right", "cut", "deletes", "right_tokens_deleted", "seconds")
        }
        print(f"{head:<12}", "  ".join(f"{name} {value:.3f}" for name, value in means.items()))


if __name__ == "__main__":
    main()
