"""Whole training runs of `SequenceMatchTrainer`, sampling included, beside `transformers.Trainer` and TRL's `SFTTrainer`."""

import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.peers import arguments, missing, sft_seconds, trainer_seconds, training_seconds
from benchmarks.session import Session
from benchmarks.shapes import Scale, build
from benchmarks.timing import Measurement, measured, paired
from sequencematch.policy import Policy
from sequencematch.training import SequenceMatchConfig, SequenceMatchTrainer

HF, CONTROL, TRL = "transformers.Trainer, MLE", "transformers.Trainer, MLE (A/A control)", "TRL's SFTTrainer, MLE"
#: Objectives of `SequenceMatchTrainer`, with their settings.
OURS: dict[str, dict[str, Any]] = {"mle": {}, "sequencematch": {"bc_steps": 0, "bc_anneal_steps": 0}}


def end_to_end(session: Session) -> Iterator[Measurement]:
    """Seconds of `train()` on the same data with the same number of steps; every run builds a new model."""
    scale = session.scale
    generator = torch.Generator().manual_seed(0)
    size = (scale.training_steps * scale.batch, scale.training_length)
    tokens = torch.randint(3, scale.training.vocab, size, generator=generator)
    variants: dict[str, Callable[[], float]] = {
        HF: lambda: _peer(trainer_seconds, session, tokens),
        **{name: lambda name=name: _ours(name, session, tokens) for name in OURS},  # type: ignore[misc]
        CONTROL: lambda: _peer(trainer_seconds, session, tokens),
    }
    reason = missing("trl")
    if reason is None:
        variants[TRL] = lambda: _peer(sft_seconds, session, tokens)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    rounds = scale.generations
    for number in tqdm(range(rounds + 1), desc="training runs", unit="round", leave=False, disable=None):
        for name, run in variants.items():
            taken = run()
            session.free()
            if number:  # the first round warms up
                seconds[name].append(taken)
    detail = {
        "model": scale.training.name,
        "steps": scale.training_steps,
        "batch": scale.batch,
        "length": scale.training_length,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        **({} if reason is None else {TRL: f"left out: {reason}"}),
    }
    control = paired(seconds, CONTROL, HF)
    yield measured("end_to_end", "A/A control: Trainer / Trainer", control, target="control", detail=detail)
    for name in OURS:
        yield measured("end_to_end", f"SequenceMatchTrainer, {name} / Trainer, MLE", paired(seconds, name, HF))
    if TRL in seconds:
        yield measured("end_to_end", "SFTTrainer / Trainer, MLE", paired(seconds, TRL, HF))


def _peer(run: Callable[..., float], session: Session, tokens: Tensor) -> float:
    scale, device = session.scale, session.device
    return run(build(scale.training, device), tokens, device, scale.batch, scale.training_steps)


def _ours(objective: str, session: Session, tokens: Tensor) -> float:
    scale: Scale = session.scale
    policy = Policy.from_pretrained(build(scale.training, session.device))
    prompt = scale.training_length // 4
    with tempfile.TemporaryDirectory() as folder:
        config = SequenceMatchConfig(
            **arguments(folder, session.device, scale.batch, scale.training_steps),
            objective=objective,
            max_length=scale.training_length,
            max_prompt_length=prompt,
            max_completion_length=scale.training_length - prompt,
            generation_batch_size=scale.training_generation,
            replay_reuse=scale.reuse,
            packing=True,
            **OURS[objective],
        )
        trainer = SequenceMatchTrainer(policy, config, [{"input_ids": row} for row in tokens.tolist()])
        return training_seconds(trainer, session.device)
