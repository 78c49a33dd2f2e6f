"""A task of your own: words written backwards, with any letter as noise.

Measure a model on it; the options of the task are flags:

    sequencematch evaluate MODEL --task examples/new_task.py:Reverse

To train on it, write its rows to a folder and use them as the dataset of a recipe:

    python examples/new_task.py out/reverse
    sequencematch train examples/train_small.yaml --dataset out/reverse/train.jsonl
"""

import random
import sys
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any, ClassVar

from sequencematch.tasks import Row, Task, write_rows


@dataclass(frozen=True)
class Reverse(Task):
    """`What is stop backwards? Solution: pots`. A task must have `train` and `test`; its rows have these keys."""

    name: ClassVar[str] = "reverse"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "recovery", "own_errors", "backspace_rate")
    train_size: int = field(default=2000, metadata={"help": "Words to train on."})
    test_size: int = field(default=200, metadata={"help": "Words held out."})
    letters: int = field(default=5, metadata={"help": "Letters in a word."})
    max_new_tokens: int = 16

    def train(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        """Words that are not held out."""
        return self._rows()[self.test_size :]

    def test(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        """Words held out."""
        return self._rows()[: self.test_size]

    def _rows(self) -> list[Row]:
        numbers = random.Random(0).sample(range(26**self.letters), self.test_size + self.train_size)
        words = ["".join(ascii_lowercase[n // 26**i % 26] for i in range(self.letters)) for n in numbers]
        return [
            {
                "prompt": f"What is {word} backwards? Solution:",
                "completion": f" {word[::-1]}",
                "noise_tokens": list(ascii_lowercase),
            }
            for word in words
        ]


if __name__ == "__main__":
    write_rows(Reverse(), sys.argv[1])
