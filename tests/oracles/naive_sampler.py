"""Sampling with deletions the slow way: one row at a time, a Python list for a stack, a fresh forward pass for every action.

Only the random numbers and their use (`uniforms`, `choose`) are the library's: no cache, no mask, no batch, no positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sequencematch.policy import Policy, Sampling
from sequencematch.policy.decoding.choice import choose, uniforms
from sequencematch.policy.decoding.search import REMEMBERED


@dataclass(frozen=True)
class Step:
    """One action: the state it was chosen in, the logits it was chosen from, and the random number that chose it."""

    state: tuple[int, ...]
    logits: list[float]
    value: float
    uniform: float | None
    chosen: int
    executed: int

    @property
    def log_prob(self) -> float:
        """log p(a|s) under the logits it was chosen from."""
        return self.logits[self.chosen] - log_sum_exp(self.logits)

    def margin(self, action: int) -> float:
        """How little is missing for `action` to be chosen: in logits if greedy, else in the random number."""
        if self.uniform is None:
            return max(self.logits) - self.logits[action]
        weights = softmax(self.logits)
        below = sum(weights[:action])
        return max(below - self.uniform, self.uniform - below - weights[action], 0.0)


def log_sum_exp(logits: list[float]) -> float:
    """log Σ exp ℓ, with the largest taken out."""
    largest = max(logits)
    return largest + math.log(sum(math.exp(logit - largest) for logit in logits))


def softmax(logits: list[float]) -> list[float]:
    """Probabilities."""
    total = log_sum_exp(logits)
    return [math.exp(logit - total) for logit in logits]


def fresh_logits(policy: Policy, state: list[int]) -> list[float]:
    """The model's own logits of a state, from its tokens alone, and behind them h·w of the `<bkspc>` row."""
    with torch.no_grad():
        output = policy.model(input_ids=torch.tensor([state]), output_hidden_states=True, use_cache=False)
        hidden = output.hidden_states[-1][0, -1].double()
        return [*output.logits[0, -1].double().tolist(), float(hidden @ policy.backspace.row.double())]


def warp(logits: list[float], sampling: Sampling) -> list[float]:
    """Temperature, then the k likeliest, then the smallest set of mass p, then what is within a factor of the likeliest."""
    if sampling.temperature:
        logits = [logit / sampling.temperature for logit in logits]
    if sampling.top_k is not None:
        least = sorted(logits)[-min(sampling.top_k, len(logits))]
        logits = [logit if logit >= least else -math.inf for logit in logits]
    if sampling.top_p is not None:
        weights, kept, mass = softmax(logits), set[int](), 0.0
        for action in sorted(range(len(logits)), key=lambda action: -weights[action]):
            if mass >= sampling.top_p:
                break
            kept.add(action)
            mass += weights[action]
        logits = [logit if action in kept else -math.inf for action, logit in enumerate(logits)]
    if sampling.min_p is not None and not sampling.search:
        weights = softmax(logits)
        least = sampling.min_p * max(weights)
        logits = [logit if weight >= least else -math.inf for logit, weight in zip(logits, weights, strict=True)]
    return logits


def searched(
    logits: list[float], closed: set[int], policy: Policy, sampling: Sampling, *, may_delete: bool, only_ends: bool
) -> tuple[list[float], bool]:
    """What a depth-first search may choose: tokens not tried yet that are likely enough, and `<bkspc>`; and if nothing is left."""
    bkspc, ends = policy.space.bkspc, policy.space.ends | set(sampling.stop_tokens)
    least = max(logits[:bkspc]) + math.log(0.05 if sampling.min_p is None else sampling.min_p)
    possible = [token for token in range(bkspc) if logits[token] > -math.inf]
    tokens = [token for token in possible if token not in closed and (token in ends or not only_ends)]
    found = [-math.inf] * len(logits)
    if may_delete:
        tokens = [token for token in tokens if logits[token] >= least]
        found[bkspc] = logits[bkspc] if tokens else 0.0
    is_stuck = not may_delete and not tokens
    if is_stuck:
        tokens = [token for token in possible if token in closed]
        if not tokens:
            found[policy.space.eos] = 0.0
    for token in tokens:
        found[token] = logits[token]
    return found, is_stuck


def naive_rollout(
    policy: Policy,
    prompt: list[int],
    row: int,
    sampling: Sampling,
    logits_of: Callable[[Policy, list[int]], list[float]] = fresh_logits,
) -> list[Step]:
    """Every action of row number `row`, until it ends. `logits_of` gives the logits of a state."""
    eos, ends, bkspc = policy.space.eos, policy.space.ends, policy.space.bkspc
    floor = len(prompt) if sampling.protect_prompt else 1
    stack, steps, deepest = list(prompt), list[Step](), len(prompt)
    banned: dict[tuple[int, ...], set[int]] = {}
    while True:
        logits = logits_of(policy, stack)
        value = log_sum_exp(logits)
        logits[bkspc] += sampling.backspace_bias
        if sampling.hold_back is not None:
            floor = max(floor, deepest - sampling.hold_back)
        if len(stack) <= floor and not sampling.self_loops:
            logits[bkspc] = -math.inf
        if sampling.min_new_tokens and len(stack) - len(prompt) < sampling.min_new_tokens:
            for end in (*ends, *sampling.stop_tokens):
                logits[end] = -math.inf
        if sampling.ban_deleted:
            for token in banned.get(tuple(stack), set()):
                logits[token] = -math.inf
        if sampling.logits_processor is not None:
            processed = sampling.logits_processor(torch.tensor([stack]), torch.tensor([logits], dtype=torch.float64))
            logits = processed[0].tolist()
        logits = warp(logits, sampling)
        written, left = len(stack) - len(prompt), sampling.action_limit - len(steps)
        closed = banned.get(tuple(stack), set())
        stays = False
        if sampling.search:
            is_full = len(closed) >= REMEMBERED
            may_delete = len(stack) > floor and left >= sampling.max_new_tokens - written + 3
            only_ends = written == sampling.max_new_tokens or (is_full and may_delete)
            logits, is_stuck = searched(logits, closed, policy, sampling, may_delete=may_delete, only_ends=only_ends)
            stays = is_stuck or is_full
        uniform = None
        if not sampling.greedy:
            assert sampling.seed is not None
            uniform = float(uniforms(sampling.seed, row, len(steps) + 1)[-1])
        drawn = None if uniform is None else torch.tensor([uniform], dtype=torch.float64)
        chosen = int(choose(torch.tensor([logits], dtype=torch.float64), drawn)[0])
        executed = chosen
        is_full = len(stack) == len(prompt) + sampling.max_new_tokens and chosen != bkspc
        is_cut = is_full or chosen in sampling.stop_tokens or len(steps) + 1 == sampling.action_limit
        if is_cut and chosen not in ends:
            executed = eos
        steps.append(Step(tuple(stack), logits, value, uniform, chosen, executed))
        if executed in ends:
            return steps
        if executed != bkspc:
            floor += stays and len(stack) == floor
            stack.append(executed)
            banned.pop(tuple(stack), None)  # entered anew
            deepest = max(deepest, len(stack))
        elif len(stack) > floor:
            token = stack.pop()
            banned.setdefault(tuple(stack), set()).add(token)
