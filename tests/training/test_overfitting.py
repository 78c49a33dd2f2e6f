"""Sixteen sentences learnt by heart: written exactly, and a wrong letter put into them is deleted."""

import random
from pathlib import Path
from typing import Any

from sequencematch.policy import Policy
from sequencematch.training import SequenceMatchTrainer
from tests.training.tiny_run import config, policy

NOUNS = ["cat", "dog", "fox", "owl"]
VERBS = ["saw", "met", "hid", "fed"]
PLACES = ["by the river.", "in a house.", "on the hill.", "at noon.", "under a tree.", "near town."]


def sentences() -> list[dict[str, str]]:
    """Two words that no other sentence starts with, and what follows them."""
    choice = random.Random(0).choice
    return [
        {"prompt": f"{noun} {verb}", "completion": f" the {choice(NOUNS)} {choice(PLACES)}"}
        for noun in NOUNS
        for verb in VERBS
    ]


def trained(folder: Path, **changes: Any) -> Policy:
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 192, "initializer_range": 0.08}
    settings = {
        "max_steps": 120,
        "per_device_train_batch_size": 16,
        "learning_rate": 4e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "bc_steps": 60,
        "bc_anneal_steps": 20,
        "generation_batch_size": 32,
        "max_completion_length": 40,
        "max_length": 64,
        "noise_rate": 0.2,
        "logging_steps": 50,
    }
    learner = policy(**sizes)
    args = config(folder, **(settings | changes))
    SequenceMatchTrainer(model=learner, args=args, train_dataset=sentences()).train()
    return learner


def reproduced(learner: Policy) -> float:
    """The share of sentences that greedy decoding writes exactly."""
    texts = learner.generate([row["prompt"] for row in sentences()], max_new_tokens=40, temperature=0).texts
    return sum(text == row["completion"] for text, row in zip(texts, sentences(), strict=True)) / len(texts)


def deleted(learner: Policy) -> float:
    """How often the first action behind a right beginning and a wrong letter is to delete it, at ten places a sentence."""
    tokenizer, dice, prompts = learner.tokenizer, random.Random(1), []
    assert tokenizer is not None
    for row in sentences():
        prompt, completion = (tokenizer(row[part])["input_ids"] for part in ("prompt", "completion"))
        for place in dice.sample(range(len(completion)), 10):
            wrong = dice.choice([token for token in range(4, 48) if token != completion[place]])
            prompts.append([*prompt, *completion[:place], wrong])
    rolled = learner.generate(prompts, max_new_tokens=1, max_actions=1, temperature=0)
    return sum(t.chosen[0] == learner.space.bkspc for t in rolled.trajectories) / len(prompts)


def test_sequencematch_writes_every_sentence_and_deletes_wrong_letters(tmp_path: Path) -> None:
    learner = trained(tmp_path)
    assert reproduced(learner) == 1
    assert deleted(learner) >= 0.95


def test_without_noise_cloning_writes_but_never_learns_to_delete(tmp_path: Path) -> None:
    """The control: what deletes is learnt from noise, not from the model's shape."""
    learner = trained(tmp_path, objective="bc", noise_rate=0.0, max_steps=60)
    assert reproduced(learner) == 1
    assert deleted(learner) <= 0.05
