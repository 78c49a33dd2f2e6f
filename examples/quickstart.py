"""Quickstart: a bundled model deletes a wrong digit, then is fine-tuned, measured, saved and exported. A minute on a CPU.

    python examples/quickstart.py out/quickstart

No network and no GPU are needed. `--quick` trains for a few steps only.
"""

import sys
from pathlib import Path

from sequencematch import Policy, SequenceMatchConfig, SequenceMatchTrainer
from sequencematch.data.packaged import find_packaged
from sequencematch.evaluation import evaluate
from sequencematch.tasks import Rows

QUESTION = "In base 7, what is 25 + 14? Solution: 5"  # 19 + 11 = 30 = 4·7 + 2: the 5 is wrong
ROWS, TEST = find_packaged("examples/arithmetic.jsonl"), find_packaged("examples/arithmetic_test.jsonl")


def main(folder: Path, *, quick: bool) -> None:
    """Generate, train, measure, save, export."""
    policy = Policy.from_pretrained("sequencematch/arithmetic")
    result = policy.generate(QUESTION, temperature=0, max_new_tokens=8)
    assert policy.tokenizer is not None
    print(QUESTION + result.trajectories[0].render(policy.tokenizer.decode))

    from datasets import load_dataset  # any list of rows will do

    args = SequenceMatchConfig(
        output_dir=str(folder),
        objective="sequencematch",
        noise_source="tokens",  # wrong digits
        noise_rate=0.2,
        max_steps=4 if quick else 120,
        bc_steps=2 if quick else 40,
        bc_anneal_steps=1 if quick else 40,
        generation_batch_size=16,
        max_completion_length=24,
        max_length=96,
        learning_rate=1e-3,
        use_cpu=True,
        save_strategy="no",
    )
    rows = load_dataset("json", data_files=str(ROWS), split="train")
    trainer = SequenceMatchTrainer("sequencematch/arithmetic-base", args, train_dataset=rows)
    trainer.train()
    trainer.save_model()  # with a model card

    trained = Policy.from_pretrained(folder)
    for measure in evaluate(trained, Rows(TEST), metrics=["accuracy", "recovery"], progress=False).measures:
        print(measure)
    trained.export(folder / "plain")  # deletes with transformers alone: examples/transformers_only.py
    print(f"Wrote {folder} and {folder / 'plain'}.")


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if argument != "--quick"]
    main(Path(names[0] if names else "out/quickstart"), quick="--quick" in sys.argv)
