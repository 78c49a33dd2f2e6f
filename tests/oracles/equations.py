"""Eq. 4 and the χ²-mixture term as plain loops over trajectories, time and actions, from raw logits. Python floats only."""

import math
from collections.abc import Callable
from dataclasses import dataclass

PHI: dict[str, Callable[[float], float]] = {
    "reverse_kl": lambda x: 1 - math.exp(-x),
    "forward_kl": lambda x: math.log(1 + x) if x >= -0.99 else math.log(0.01) + 100 * (x + 0.99),
    "js": lambda x: (
        math.log(2 - math.exp(-x))
        if x >= 0.01 - math.log(2)
        else math.log(2 - 2 * math.exp(-0.01)) + math.exp(-0.01) / (1 - math.exp(-0.01)) * (x + math.log(2) - 0.01)
    ),
    "hellinger": lambda x: x / (1 + x) if x >= -0.9 else -9 + 100 * (x + 0.9),
    "chi2": lambda x: x - x * x / 4,
    "chi2_mixture": lambda x: x - x * x / 4,
    "total_variation": lambda x: min(x, 0.5) if x >= -0.5 else -0.5 + 100 * (x + 0.5),
}


@dataclass
class Raw:
    """A trajectory's logits at each of its T + 1 states, its T actions, and which of them the policy chose."""

    logits: list[list[float]]
    actions: list[int]
    policy_chosen: list[bool]


def value(logits: list[float]) -> float:
    """V(s) = log Σ_a exp ℓ(a|s)."""
    total = 0.0
    for logit in logits:
        total += math.exp(logit)
    return math.log(total)


def sequencematch_terms(data: list[Raw], model: list[Raw], name: str, alpha: float, gamma: float) -> dict[str, float]:
    """The five sums of Eq. 4 and the loss, normalised by the data's decisions and by rollouts per data trajectory."""
    phi = PHI[name]
    a = b = c = d = e = 0.0
    decisions = 0
    for raw in data:
        steps = len(raw.actions)
        decisions += steps
        for t in range(steps):
            now, after = value(raw.logits[t]), value(raw.logits[t + 1])
            a += gamma**t / alpha * phi(alpha * raw.logits[t][raw.actions[t]] - gamma * alpha * after)
            b += gamma**t / 2 * (now - gamma * after)
        final = value(raw.logits[steps])
        b += gamma**steps / 2 * final
        c += gamma**steps / (alpha * (1 - gamma)) * phi(alpha * (1 - gamma) * final)
    for raw in model:
        steps = len(raw.actions)
        for t in range(steps):
            now, after = value(raw.logits[t]), value(raw.logits[t + 1])
            d += gamma**t / 2 * (now - gamma * after)
            if raw.policy_chosen[t] and name == "chi2_mixture":
                e += gamma**t * (alpha * raw.logits[t][raw.actions[t]] - gamma * alpha * after) ** 2 / alpha / 4
        final = value(raw.logits[steps])
        d += gamma**steps / 2 * final
        if name == "chi2_mixture":
            e += gamma**steps / (1 - gamma) * (alpha * (1 - gamma) * final) ** 2 / alpha / 4
    ratio = len(data) / len(model)
    terms = {"data_reward": a, "data_tail": c, "data_value": b, "model_value": ratio * d, "model_penalty": ratio * e}
    terms = {term: total / decisions for term, total in terms.items()}
    gains, costs = ("data_reward", "data_tail"), ("data_value", "model_value", "model_penalty")
    return terms | {"loss": -(sum(terms[g] for g in gains) - sum(terms[k] for k in costs))}


def negative_log_likelihood(data: list[Raw]) -> float:
    """−(1/N) Σ_t [ℓ(a_t|s_t) − V(s_t)]."""
    total, decisions = 0.0, 0
    for raw in data:
        for t, action in enumerate(raw.actions):
            total += raw.logits[t][action] - value(raw.logits[t])
            decisions += 1
    return -total / decisions
