"""Other ways to solve path-star graphs, the peers of a model that deletes.

Next-token prediction with more forward passes (beam search, several samples, a search with a threshold), and other data or
inputs to train on: answers reversed, answers predicted without the tokens before them (teacherless), and walks into dead ends
written out, with a word for going back. A forward pass is one token of one row; the prompt's are the same for all and not
counted.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import get_cosine_schedule_with_warmup

from sequencematch.core.mdp import Trajectory
from sequencematch.policy import Policy

Tokens = Sequence[int]


@dataclass(frozen=True)
class Outcome:
    """Which rows are right, and forward passes per row."""

    right: tuple[bool, ...]
    passes: float

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
    return Outcome(tuple(_is_right(t, answer) for t, answer in zip(picked, answers, strict=True)), passes)


def best_by_oracle(drawn: Sequence[Sequence[Trajectory]], answers: Sequence[Tokens]) -> Outcome:
    """Whether any of a row's samples is right: what a perfect judge would reach."""
    passes = sum(len(t.final_parts[1]) for row in drawn for t in row) / len(drawn)
    pairs = zip(drawn, answers, strict=True)
    return Outcome(tuple(any(_is_right(t, answer) for t in row) for row, answer in pairs), passes)


def searching(policy: Policy, prompts: Sequence[Tokens], answers: Sequence[Tokens], **options: Any) -> Outcome:
    """A search in which the policy says itself where to delete."""
    length = max(map(len, answers))
    done = policy.generate(prompts, max_new_tokens=length, search=True, batch_size=1000, **options)
    passes = sum(t.num_nodes - len(t.initial) - 1 for t in done.trajectories) / len(prompts)
    pairs = zip(done.trajectories, answers, strict=True)
    return Outcome(tuple(_is_right(t, answer) for t, answer in pairs), passes)


def searching_below(policy: Policy, prompts: Sequence[Tokens], answers: Sequence[Tokens], least: float) -> Outcome:
    """A search by a model without `<bkspc>`: it deletes where the likeliest token left has a probability below `least`."""
    bkspc = policy.space.bkspc

    def stop(_: Tensor, logits: Tensor) -> Tensor:
        tokens = logits[:, :bkspc].log_softmax(-1)
        return torch.cat([tokens, torch.full_like(tokens[:, :1], math.log(least))], 1)

    return searching(policy, prompts, answers, logits_processor=stop)


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


def _is_right(trajectory: Trajectory, answer: Tokens) -> bool:
    return not trajectory.truncated and list(trajectory.final_parts[1]) == list(answer)


# Other data


class ReversedRows(Dataset[Mapping[str, Any]]):
    """Answers from the goal back to the centre: every step is then the only edge into a node."""

    def __init__(self, ids: np.ndarray, length: int) -> None:
        """`ids` [row, token]: prompts, and answers of `length` tokens."""
        self.ids, self.mask = ids, [0] * (ids.shape[1] - length) + [1] * length
        self.length = length

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.ids)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """A row as the trainer reads it."""
        ids = self.ids[row].tolist()
        return {"input_ids": ids[: -self.length] + ids[: -self.length - 1 : -1], "completion_mask": self.mask}


class TraceRows(Dataset[Mapping[str, Any]]):
    """Walks through the arms in random order until the goal, as a solver would write them down: dead ends stay in the text.

    After a dead end comes the word `back`, and the walk starts at the centre again (a stream of search, Gandhi et al. 2024).
    """

    def __init__(self, ids: np.ndarray, length: int, back: int) -> None:
        """`ids` [row, token]: prompts, and answers of `length` tokens; `back` is the id of the word for going back."""
        self.ids, self.length, self.back = ids, length, back

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.ids)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """A row as the trainer reads it; the order of the arms is a function of the row's number."""
        ids = self.ids[row].tolist()
        prompt, answer = ids[: -self.length], ids[-self.length :]
        centre, edges = prompt[-3], prompt[1:-4]
        after: dict[int, list[int]] = {}
        for a, b in zip(edges[::3], edges[1::3], strict=True):
            after.setdefault(a, []).append(b)
        firsts, trace = after[centre], list[int]()
        random.Random(int(row)).shuffle(firsts)
        for first in firsts:
            arm = [first]
            while arm[-1] in after:
                arm += after[arm[-1]]
            trace += arm
            if arm == answer:
                break
            trace.append(self.back)
        return {"input_ids": prompt + trace, "completion_mask": [0] * len(prompt) + [1] * len(trace)}


def reversed_answers(policy: Policy, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> Outcome:
    """Greedy answers of a model trained on `ReversedRows`."""
    length = max(map(len, answers))
    done = policy.generate(
        prompts, max_new_tokens=length, temperature=0.0, backspace_bias=-math.inf, batch_size=1000
    ).trajectories
    pairs = zip(done, answers, strict=True)
    return Outcome(tuple(_is_right(t, list(answer)[::-1]) for t, answer in pairs), length)


def traced_answers(
    policy: Policy, prompts: Sequence[Tokens], answers: Sequence[Tokens], back: int, arms: int
) -> Outcome:
    """Greedy walks of a model trained on `TraceRows`: the answer is what comes after the last `back`."""
    length = max(map(len, answers))
    done = policy.generate(
        prompts, max_new_tokens=(arms + 2) * (length + 1), temperature=0.0, backspace_bias=-math.inf, batch_size=1000
    ).trajectories
    right = []
    for trajectory, answer in zip(done, answers, strict=True):
        written = list(trajectory.final_parts[1])
        last = len(written) - 1 - written[::-1].index(back) if back in written else -1
        right.append(not trajectory.truncated and written[last + 1 :] == list(answer))
    return Outcome(tuple(right), sum(len(t.final_parts[1]) for t in done) / len(done))


def teacherless(
    model: Any, ids: np.ndarray, length: int, dummy: int, eos: int, *, steps: int, batch: int, lr: float
) -> None:
    """Train a model to write an answer that it does not see: all inputs behind the prompt are `dummy`.

    Bachmann and Nagarajan (2024) call this teacherless training.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    model.train()
    for step in range(steps):
        rows = torch.from_numpy(ids[step * batch : (step + 1) * batch].astype(np.int64)).to(device)
        logits = model(**_without_teacher(rows[:, :-length], length, dummy)).logits[:, -length - 1 :]
        target = torch.cat([rows[:, -length:], torch.full_like(rows[:, :1], eos)], 1)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def teacherless_answers(
    model: Any, prompts: Sequence[Tokens], answers: Sequence[Tokens], dummy: int, eos: int
) -> Outcome:
    """The likeliest token at every place at once."""
    device, length, right = next(model.parameters()).device, max(map(len, answers)), list[bool]()
    for first in range(0, len(prompts), 1000):
        ids = torch.tensor([list(prompt) for prompt in prompts[first : first + 1000]], device=device)
        found = model(**_without_teacher(ids, length, dummy)).logits[:, -length - 1 :].argmax(-1).tolist()
        right += [row == [*answer, eos] for row, answer in zip(found, answers[first : first + 1000], strict=True)]
    return Outcome(tuple(right), length)


def _without_teacher(prompts: Tensor, length: int, dummy: int) -> dict[str, Tensor]:
    ids = torch.cat([prompts, torch.full_like(prompts[:, :1], dummy).expand(-1, length)], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
