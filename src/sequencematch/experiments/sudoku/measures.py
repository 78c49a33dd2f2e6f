"""What a trained network does on new puzzles, and at what cost: under each way to decode, and in the states that decide.

A forward pass is one token of one sequence, after the prompt. A context is how many tokens such a pass attends to.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
import torch

from sequencematch.core.mdp import Trajectory
from sequencematch.experiments import peers
from sequencematch.experiments.networks import START
from sequencematch.experiments.peers import Tokens, is_right
from sequencematch.experiments.sudoku.cells import METHODS, TRACE_CONTEXT
from sequencematch.experiments.sudoku.rows import PROMPT, ZERO, answer_of, as_puzzle, trace
from sequencematch.metrics import own_errors
from sequencematch.policy import Policy
from sequencematch.tasks.sudoku import legal_digits

#: Accuracy and costs of a way to decode, by name; None where it can't be said.
Record = dict[str, float | None]
#: Sizes of beam search and of best of n.
COUNTS = (2, 4, 8, 16)
#: Actions, or tokens of a written-out search, beyond those that write an answer at once.
EXTRA = (2, 10, 25, 60, 140, 320, 640)
#: Thresholds to tune the search of a model without `<bkspc>` with.
THRESHOLDS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
#: Actions of a policy that can delete without end.
MANY = 400


@dataclass(frozen=True)
class Questions:
    """Puzzles held out, as token ids [row, token]: those of the test, and others to tune on."""

    test: np.ndarray
    tune: np.ndarray


def measure(policy: Policy, name: str, questions: Questions) -> dict[str, Any]:
    """What a network does under each way to decode that its training asks for: name → accuracy and costs. Nothing of a start."""
    method = METHODS[name]
    if name == START:
        return {"ways": {}}
    if method.deletes:
        return {"ways": deleting(policy, questions.test), "states": probabilities(policy, questions.test)}
    if method.rows == "traces":
        return {"ways": writing_out(policy, questions.test), "solver": solver(questions.test)}
    return {"ways": predicting(policy, questions)}


def _asked(ids: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and answers."""
    return ids[:, :PROMPT].tolist(), ids[:, PROMPT:].tolist()


# Costs


def contexts(trajectory: Trajectory) -> list[int]:
    """The context of each token that was run after the prompt."""
    depth, found = len(trajectory.initial), []
    for action in trajectory.executed[:-1]:  # the last is always <eos>, which is not run
        if action == trajectory.space.bkspc:
            depth = max(depth - 1, trajectory.floor)
        else:
            depth += 1
            found.append(depth)
    return found


def recorded(policy: Policy, right: Sequence[bool], runs: Sequence[Sequence[int]]) -> Record:
    """Accuracy, and means over puzzles of forward passes, FLOPs and the longest context; `runs` are a puzzle's contexts.

    FLOPs are 2 · parameters for each pass, input embeddings left out, and 4 · layers · width for each token attended to.
    """
    config, table = policy.base.config, policy.base.get_input_embeddings().weight
    weights = sum(weight.numel() for weight in policy.base.parameters() if weight is not table)
    per_token = 4 * config.num_hidden_layers * config.hidden_size
    return {
        "accuracy": mean(map(float, right)),
        "passes": mean(map(len, runs)),
        "flops": mean(2 * weights * len(run) + per_token * sum(run) for run in runs),
        "context": mean(max(run, default=PROMPT) for run in runs),
        "longest_context": max(max(run, default=PROMPT) for run in runs),
    }


def _rolled(policy: Policy, done: Sequence[Trajectory], ids: np.ndarray) -> Record:
    """The record of one trajectory a puzzle, with the shares of its own errors and of its right tokens that it deleted."""
    answers = _asked(ids)[1]
    right = [is_right(trajectory, answer) for trajectory, answer in zip(done, answers, strict=True)]
    errors, rights = own_errors(done, ids.tolist())
    return {
        **recorded(policy, right, [contexts(trajectory) for trajectory in done]),
        "own_errors_deleted": errors.value if errors.count else None,
        "right_tokens_deleted": rights.value if rights.count else None,
    }


# Ways to decode


def deleting(policy: Policy, ids: np.ndarray) -> dict[str, Record]:
    """A network that deletes: greedily without deletions, without a memory of them, with `ban_deleted`; and searches."""
    prompts, answers = _asked(ids)
    length = len(answers[0])
    greedy = {"temperature": 0.0, "protect_prompt": True, "max_actions": MANY}
    how: dict[str, dict[str, Any]] = {
        "no deletions": {"temperature": 0.0, "backspace_bias": -math.inf},
        "plain": greedy,
        "ban": {**greedy, "ban_deleted": True},
    }
    how |= {f"search, {length + 1 + n} actions": {"search": True, "max_actions": length + 1 + n} for n in EXTRA}
    return {
        name: _rolled(
            policy,
            policy.generate(prompts, max_new_tokens=length, batch_size=1000, **options).trajectories,
            ids,
        )
        for name, options in how.items()
    }


def writing_out(policy: Policy, ids: np.ndarray) -> dict[str, Record]:
    """A network that writes its search out, greedily; a puzzle that takes more tokens than a limit is not solved within it."""
    prompts, answers = _asked(ids)
    room, length = TRACE_CONTEXT - PROMPT - 1, len(answers[0])
    done = policy.generate(
        prompts, max_new_tokens=room, temperature=0.0, backspace_bias=-math.inf, batch_size=1000
    ).trajectories
    found: dict[str, Record] = {}
    for limit in [*(length + n for n in EXTRA if length + n < room), room]:
        right, runs = [], []
        for trajectory, answer in zip(done, answers, strict=True):
            written = list(trajectory.final_parts[1])
            is_solved = not trajectory.truncated and answer_of(written) == answer
            right.append(is_solved and len(written) <= limit)
            runs.append(contexts(trajectory)[:limit])
        found[f"greedy, {limit} tokens"] = recorded(policy, right, runs)
    return found


def predicting(policy: Policy, questions: Questions) -> dict[str, Record]:
    """Next-token prediction: beam search, best of n by likelihood or by an oracle, and a search with a threshold."""
    ids = questions.test
    prompts, answers = _asked(ids)
    length = len(answers[0])
    found: dict[str, Record] = {}
    for beams in (1, *COUNTS):
        right = peers.beam_search(policy, prompts, answers, beams).right
        name = f"beam search, {beams} beams" if beams > 1 else "greedy"
        found[name] = recorded(policy, right, [beams * list(range(PROMPT + 1, PROMPT + length + 1))] * len(ids))
    for count, drawn in _samples(policy, prompts, length):
        runs = [_run_for(row) for row in drawn]
        found[f"best of {count} by likelihood"] = recorded(policy, peers.best_of(drawn, answers).right, runs)
        tried = [
            until_right(row, answer, random.Random(n))
            for n, (row, answer) in enumerate(zip(drawn, answers, strict=True))
        ]
        right = peers.best_by_oracle(drawn, answers).right
        found[f"best of {count} by an oracle"] = recorded(policy, right, [_run_for(row) for row in tried])

    tuned = _asked(questions.tune)
    by_threshold = {least: peers.searching_below(policy, *tuned, least).accuracy for least in THRESHOLDS}
    least = max(THRESHOLDS, key=lambda threshold: by_threshold[threshold])
    for limit in (length + 1 + n for n in EXTRA):
        done = peers.searching_below(policy, prompts, answers, least, max_actions=limit).trajectories
        found[f"search below p = {least:g}, {limit} actions"] = _rolled(policy, done, ids)
    return found


def judging(writer: Policy, judge: Policy, ids: np.ndarray) -> dict[str, Record]:
    """Samples of one network, of which another picks the one in which it would delete least. It reads all of them."""
    prompts, answers = _asked(ids)
    found: dict[str, Record] = {}
    for count, drawn in _samples(writer, prompts, len(answers[0])):
        doubt = peers.doubts(judge, [sample for row in drawn for sample in row])
        right = peers.best_of(drawn, answers, lambda trajectory: -doubt[trajectory]).right  # noqa: B023
        found[f"best of {count} judged"] = recorded(writer, right, [2 * _run_for(row) for row in drawn])
    return found


def _samples(policy: Policy, prompts: Sequence[Tokens], length: int) -> Iterator[tuple[int, list[list[Trajectory]]]]:
    for count in COUNTS:
        yield count, peers.samples(policy, prompts, length, count, seed=0)


def until_right(drawn: Sequence[Trajectory], answer: Tokens, rng: random.Random) -> list[Trajectory]:
    """Samples in random order up to the first that is right: an oracle needs no others."""
    order = rng.sample(drawn, len(drawn))
    first = next((place for place, sample in enumerate(order) if is_right(sample, answer)), len(order))
    return order[: first + 1]


def _run_for(trajectories: Iterable[Trajectory]) -> list[int]:
    return [context for trajectory in trajectories for context in contexts(trajectory)]


def solver(ids: np.ndarray) -> dict[str, float]:
    """Digits that a depth-first search of legal digits in random order writes per puzzle, and its tokens when written out."""
    found = [trace(as_puzzle(row).cells, random.Random(number)) for number, row in enumerate(ids.tolist())]
    return {"digits": mean(sum(map(bool, steps)) for steps in found), "tokens": mean(map(len, found))}


# States


def decisive_states(row: list[int], rng: random.Random) -> dict[str, list[int]]:
    """A puzzle's states at which a search must know what to do, by kind; wrong ones where some wrong digit looks legal.

    `right`: some of its cells, filled right. `wrong digit`: the same, and a wrong digit that looks legal. `right grid`: all
    cells. `wrong grid`: all cells, of which that one is wrong.
    """
    legal = legal_digits(as_puzzle(row))
    choices = [
        (PROMPT + cell, ZERO + digit)
        for cell, digits in enumerate(legal)
        for digit in digits
        if ZERO + digit != row[PROMPT + cell]
    ]
    if not choices:
        return {"right grid": row}
    place, wrong = rng.choice(choices)
    return {
        "right": row[:place],
        "wrong digit": [*row[:place], wrong],
        "right grid": row,
        "wrong grid": [*row[:place], wrong, *row[place + 1 :]],
    }


@torch.no_grad()
def probabilities(policy: Policy, ids: np.ndarray) -> dict[str, dict[str, float]]:
    """Mean p(`<bkspc>`) and p(`<eos>`) in each kind of `decisive_states`, and in full grids that the policy itself filled wrongly.

    `own wrong grid` is left out if there are none. Its digits fit each other better than one wrong digit among right ones does.
    """
    prompts, answers = _asked(ids)
    options: dict[str, Any] = {"temperature": 0.0, "backspace_bias": -math.inf, "batch_size": 1000}
    done = policy.generate(prompts, max_new_tokens=len(answers[0]), **options).trajectories
    written = [list(trajectory.final_state.tokens[:-1]) for trajectory in done]
    own = [grid for grid, row in zip(written, ids.tolist(), strict=True) if len(grid) == len(row) and grid != row]
    states: dict[str, list[list[int]]] = {"own wrong grid": own} if own else {}
    for number, row in enumerate(ids.tolist()):
        for kind, state in decisive_states(row, random.Random(number)).items():
            states.setdefault(kind, []).append(state)
    return {kind: _mean_chances(policy, of_kind) for kind, of_kind in states.items()}


def _mean_chances(policy: Policy, states: Sequence[list[int]]) -> dict[str, float]:
    width = max(map(len, states))
    chances = []
    for first in range(0, len(states), 1000):
        part = states[first : first + 1000]
        ids = torch.tensor([state + [0] * (width - len(state)) for state in part], device=policy.device)
        hidden = policy.base.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        last = hidden[torch.arange(len(part)), [len(state) - 1 for state in part]]
        chances.append(policy.action_logits(last).float().softmax(-1).cpu())
    chance = torch.cat(chances).mean(0)
    return {"<bkspc>": float(chance[policy.space.bkspc]), "<eos>": float(chance[policy.space.eos])}
