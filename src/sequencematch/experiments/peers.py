"""Peers of a model that deletes: next-token prediction with more forward passes.

Beam search, several samples and a judge, a search with a threshold. A forward pass is one token of one row; the prompt's are
the same for all and not counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sequencematch.core.mdp import Trajectory
from sequencematch.policy import Policy

Tokens = Sequence[int]


@dataclass(frozen=True)
class Outcome:
    """Which rows are right, forward passes per row, and of a search what it did."""

    right: tuple[bool, ...]
    passes: float
    trajectories: tuple[Trajectory, ...] = ()

    @property
    def accuracy(self) -> float:
        """The share of right rows."""
        return sum(self.right) / len(self.right)


def beam_search(policy: Policy, prompts: Sequence[Tokens], answers: Sequence[Tokens], beams: int) -> Outcome:
    """The likeliest of `beams` answers, by transformers' beam search on the model without `<bkspc>`."""
    right, length = [], max(map(len, answers))
    for first in range(0, len(prompts), 500):
        ids = torch.tensor([list(prompt) for prompt in prompts[first : first + 500]], device=policy.device)
        done = policy.base.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=beams,
            do_sample=False,
            max_new_tokens=length + 1,
            pad_token_id=policy.space.eos,
        )
        for row, answer in zip(done[:, ids.shape[1] :].tolist(), answers[first : first + 500], strict=True):
            right.append(row[: len(answer) + 1] == [*answer, policy.space.eos])
    return Outcome(tuple(right), beams * length)


def samples(
    policy: Policy, prompts: Sequence[Tokens], length: int, count: int, **options: Any
) -> list[list[Trajectory]]:
    """`count` answers of each prompt without deletions, the likeliest first; at temperature 1 unless `options` say otherwise."""
    many = [prompt for prompt in prompts for _ in range(count)]
    done = policy.generate(many, max_new_tokens=length, backspace_bias=-math.inf, batch_size=1000, **options)
    likelihood = [float(log_probs.sum()) for log_probs in done.log_probs]
    order = [
        sorted(range(count * row, count * (row + 1)), key=lambda place: -likelihood[place])
        for row in range(len(prompts))
    ]
    return [[done.trajectories[place] for place in places] for places in order]


def best_of(drawn: Sequence[Sequence[Trajectory]], answers: Sequence[Tokens], score: Any = None) -> Outcome:
    """The first of each row's samples, or the one with the largest `score`."""
    picked = [row[0] if score is None else max(row, key=score) for row in drawn]
    passes = sum(len(t.final_parts[1]) for row in drawn for t in row) / len(drawn)
    return Outcome(tuple(is_right(t, answer) for t, answer in zip(picked, answers, strict=True)), passes)


def best_by_oracle(drawn: Sequence[Sequence[Trajectory]], answers: Sequence[Tokens]) -> Outcome:
    """Whether any of a row's samples is right: what a perfect judge would reach."""
    passes = sum(len(t.final_parts[1]) for row in drawn for t in row) / len(drawn)
    pairs = zip(drawn, answers, strict=True)
    return Outcome(tuple(any(is_right(t, answer) for t in row) for row, answer in pairs), passes)


def searching(policy: Policy, prompts: Sequence[Tokens], answers: Sequence[Tokens], **options: Any) -> Outcome:
    """A search in which the policy says itself where to delete."""
    length = max(map(len, answers))
    done = policy.generate(prompts, max_new_tokens=length, search=True, batch_size=1000, **options)
    passes = sum(t.num_nodes - len(t.initial) - 1 for t in done.trajectories) / len(prompts)
    pairs = zip(done.trajectories, answers, strict=True)
    return Outcome(tuple(is_right(t, answer) for t, answer in pairs), passes, tuple(done.trajectories))


def searching_below(
    policy: Policy, prompts: Sequence[Tokens], answers: Sequence[Tokens], least: float, **options: Any
) -> Outcome:
    """A search by a model without `<bkspc>`: it deletes where the likeliest token left has a probability below `least`."""
    bkspc = policy.space.bkspc

    def stop(_: Tensor, logits: Tensor) -> Tensor:
        tokens = logits[:, :bkspc].log_softmax(-1)
        return torch.cat([tokens, torch.full_like(tokens[:, :1], math.log(least))], 1)

    return searching(policy, prompts, answers, logits_processor=stop, **options)


@torch.no_grad()
def doubts(judge: Policy, trajectories: Sequence[Trajectory]) -> dict[Trajectory, float]:
    """The largest p(`<bkspc>`) of another policy in any state of an answer."""
    found = {}
    for first in range(0, len(trajectories), 1000):
        part = trajectories[first : first + 1000]
        width = max(len(t.final_state.tokens) - 1 for t in part)
        ids = torch.full((len(part), width), judge.space.eos)
        for row, trajectory in zip(ids, part, strict=True):
            tokens = trajectory.final_state.tokens[:-1]
            row[: len(tokens)] = torch.tensor(tokens)
        ids = ids.to(judge.device)
        hidden = judge.base.base_model(input_ids=ids).last_hidden_state
        chance = judge.action_logits(hidden).float().softmax(-1)[..., judge.space.bkspc].cpu()
        for row, trajectory in zip(chance, part, strict=True):
            start, end = len(trajectory.initial), len(trajectory.final_state.tokens) - 1
            found[trajectory] = float(row[start:end].max()) if end > start else 1.0
    return found


def is_right(trajectory: Trajectory, answer: Tokens) -> bool:
    """Whether a trajectory ended by itself with this answer."""
    return not trajectory.truncated and list(trajectory.final_parts[1]) == list(answer)
