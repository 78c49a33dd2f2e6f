"""Quickstart: a bundled model deletes a wrong digit; another is fine-tuned, measured, saved and exported. A minute on a CPU.

    python examples/quickstart.py out/quickstart

No network and no GPU are needed. `--quick` trains for a few steps only.
"""

import json
import random
import sys
from pathlib import Path

from sequencematch import Policy, SequenceMatchConfig, SequenceMatchTrainer
from sequencematch.evaluation import evaluate
from sequencematch.tasks import Rows

QUESTION = "In base 7, what is 25 + 14? Solution: 5"  # 19 + 11 = 30 = 4·7 + 2: the 5 is wrong
DIGITS = list("0123456789")


def sums() -> list[dict[str, str | list[str]]]:
    """900 sums, shuffled, each with the tokens that could be wrong in its answer."""
    pairs = [(a, b) for a in range(30) for b in range(30)]
    random.Random(0).shuffle(pairs)
    return [{"prompt": f"{a}+{b}=", "completion": str(a + b), "noise_tokens": DIGITS} for a, b in pairs]


def main(folder: Path, *, quick: bool) -> None:
    """Generate, train, measure, save, export."""
    policy = Policy.from_pretrained("sequencematch/arithmetic")
    result = policy.generate(QUESTION, temperature=0, max_new_tokens=8)
    assert policy.tokenizer is not None
    print(QUESTION + result.actions[0])

    rows = sums()
    args = SequenceMatchConfig(
        output_dir=str(folder),
        objective="bc",  # "sequencematch" adds the paper's objective, on rollouts of the model itself
        noise_rate=0.3,
        max_steps=4 if quick else 400,
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        use_cpu=True,
        save_strategy="no",
    )
    trainer = SequenceMatchTrainer("sequencematch/arithmetic-base", args, train_dataset=rows[:-100])
    trainer.train()
    trainer.save_model()  # with a model card

    trained, test = Policy.from_pretrained(folder), folder / "test.jsonl"
    test.write_text("\n".join(map(json.dumps, rows[-100:])))  # 100 sums that training did not see
    for measure in evaluate(trained, Rows(test), metrics=["accuracy", "recovery"], progress=False).measures:
        print(measure)
    trained.export(folder / "plain")  # deletes with transformers alone: examples/transformers_only.py
    print(f"Wrote {folder} and {folder / 'plain'}.")


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if argument != "--quick"]
    main(Path(names[0] if names else "out/quickstart"), quick="--quick" in sys.argv)
