"""A Llama whose every action is known, one that is random, and small tasks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from sequencematch.policy import Policy
from sequencematch.tasks import Row, Task
from tests.policy.tiny_models import DECODED, HIDDEN, character_tokenizer, llama

VOCAB = DECODED["vocab_size"]
#: The logit of what a known policy does next; all others are 0.
SURE = 6.0
#: Behind a colon it writes 1, which is its last word; any other digit it deletes.
ALWAYS_ONE = {":": "1"} | dict.fromkeys("023456", "<bkspc>")


def known_policy(following: Mapping[str, str] = ALWAYS_ONE) -> Policy:
    """A Llama that looks at the last token alone: one-hot embeddings, no attention, and a table for an output layer.

    `following` says what comes behind a token; behind all others comes <eos>.
    """
    tokenizer = character_tokenizer()
    sizes = {"hidden_size": VOCAB, "num_hidden_layers": 1, "tie_word_embeddings": False, "rms_norm_eps": 1e-12}
    model = llama(**sizes)
    table = torch.zeros(VOCAB + 1, VOCAB)
    for token, column in tokenizer.get_vocab().items():
        action = following.get(token, "<eos>")
        row = VOCAB if action == "<bkspc>" else tokenizer.convert_tokens_to_ids(action)
        table[row, column] = SURE / math.sqrt(VOCAB)  # RMSNorm makes a 1 a √48
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(table[:VOCAB])
        policy = Policy(model, tokenizer)
        policy.backspace.row.copy_(table[VOCAB])
    return policy


def random_policy(seed: int = 1) -> Policy:
    """Attends, and deletes in some states and not in others."""
    policy = Policy(llama(), character_tokenizer())
    with torch.no_grad():
        policy.backspace.row.copy_(torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.6)
    return policy


@dataclass(frozen=True)
class Questions(Task):
    """Rows as they are given."""

    name: ClassVar[str] = "questions"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "recovery", "backspace_rate")
    rows: Sequence[Row] = field(default=(), metadata={"help": "The rows."})
    max_new_tokens: int = 6
    prompt_length: int | None = None

    def train(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        return []

    def test(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        return list(self.rows)


@dataclass(frozen=True)
class Texts(Questions):
    """The same, of plain text."""

    name: ClassVar[str] = "texts"
    metrics: ClassVar[tuple[str, ...]] = ("ngram_entropy", "diversity", "perplexity")
    temperature: ClassVar[float] = 1.0
    prompt_length: int | None = 4


def texts(count: int) -> list[Row]:
    """Texts of 12 to 16 letters."""
    generator = torch.Generator().manual_seed(3)
    letters = "abcdefghijklmnopqrstuvwxyz ,."
    return [
        {"text": "".join(letters[n] for n in torch.randint(len(letters), (12 + row % 5,), generator=generator))}
        for row in range(count)
    ]


def words(count: int) -> list[Row]:
    """Prompts of several lengths, each with a word and vowels for noise."""
    found = []
    for row in texts(count):
        length = 2 + len(row["text"]) % 4
        found.append({"prompt": row["text"][:length], "completion": row["text"][length:8], "noise_tokens": [*"aeiou"]})
    return found
