"""Peers that are trained on other data or inputs, for path-star graphs.

Answers reversed, answers predicted without the tokens before them (teacherless), and walks into dead ends written out, with a
word for going back.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import get_cosine_schedule_with_warmup

from sequencematch.experiments.peers import Outcome, Tokens, is_right
from sequencematch.policy import Policy


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
    return Outcome(tuple(is_right(t, list(answer)[::-1]) for t, answer in pairs), length)


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
