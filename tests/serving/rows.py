"""Jobs for an engine: a policy that deletes often, random settings, and what `policy.generate` makes of them."""

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from sequencematch.policy import Policy, Sampling
from sequencematch.serving.engine import Engine
from sequencematch.serving.jobs import Actions, Job, Update
from tests.policy.tiny_models import DECODED, HIDDEN, character_tokenizer, exact_llama

VOCAB = DECODED["vocab_size"]


@functools.cache
def policy() -> Policy:
    """In float64, so that rounding decides nothing; its <bkspc> row is as large as the others."""
    found = Policy(exact_llama(), character_tokenizer())
    with torch.no_grad():
        found.backspace.row.copy_(torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.6)
    return found


def random_settings(rng: numpy.random.Generator) -> dict[str, Any]:
    """The fields of a `Sampling`, of all kinds that a request may have."""
    settings: dict[str, Any] = {"max_new_tokens": int(rng.integers(1, 24)), "seed": int(rng.integers(2**62))}
    kind = rng.integers(4)
    if kind == 0:
        settings |= {"temperature": 0.0}
        del settings["seed"]
    elif kind == 1:
        settings |= {"search": True, "min_p": float(rng.choice([0.05, 0.3]))}
        if rng.random() < 0.5:
            settings |= {"temperature": 1.3}
        else:
            del settings["seed"]
        return settings
    else:
        settings |= {"temperature": float(rng.choice([0.7, 1.0, 1.4]))}
        cuts: dict[str, tuple[Any, ...]] = {"top_k": (1, 5, 100), "top_p": (0.5, 0.9), "min_p": (0.02, 0.2)}
        settings |= {name: values[rng.integers(len(values))] for name, values in cuts.items() if rng.random() < 0.4}
    settings |= {"protect_prompt": bool(rng.integers(2)), "ban_deleted": bool(rng.integers(2))}
    settings |= {"backspace_bias": float(rng.choice([0.0, 3.0, 6.0]))}
    if rng.random() < 0.5:
        settings["hold_back"] = int(rng.integers(0, 6))
    if rng.random() < 0.3:
        settings["min_new_tokens"] = int(rng.integers(0, settings["max_new_tokens"] + 1))
    if rng.random() < 0.3:
        settings["max_actions"] = int(rng.integers(1, 60))
    return settings


class Collected:
    """Everything that a job was told."""

    def __init__(self) -> None:
        self.chosen: list[int] = []
        self.log_probs: list[float] = []
        self.values: list[float] = []
        self.updates: list[Update] = []
        self.error: Exception | None = None
        self.done = threading.Event()

    def __call__(self, update: Update) -> None:
        actions: Actions = update.actions
        self.updates.append(update)
        self.chosen += actions.chosen
        self.log_probs += actions.log_probs
        self.values += actions.values
        if update.ended:
            self.error = update.error
            self.done.set()


def submit(engine: Engine, prompts: Sequence[Sequence[int]], settings: Sequence[dict[str, Any]]) -> list[Collected]:
    """Submit all jobs at once, and wait until each has ended."""
    found = [Collected() for _ in prompts]
    rows = zip(prompts, settings, found, strict=True)
    engine.submit([Job(prompt, Sampling(**s), collected) for prompt, s, collected in rows])
    for collected in found:
        assert collected.done.wait(600)
    return found
