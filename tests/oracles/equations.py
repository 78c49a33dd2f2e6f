"""Eq. 4, its χ²-mixture term and the baselines as plain loops over trajectories, time and actions, from raw logits.

Numbers are Python floats, or float64 scalars of torch where a gradient is wanted: one at a time either way.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def exp(x: Any) -> Any:
    return x.exp() if hasattr(x, "exp") else math.exp(x)


def log(x: Any) -> Any:
    return x.log() if hasattr(x, "log") else math.log(x)


PHI: dict[str, Callable[[Any], Any]] = {
    "reverse_kl": lambda x: 1 - exp(-x),
    "forward_kl": lambda x: log(1 + x) if x >= -0.99 else math.log(0.01) + 100 * (x + 0.99),
    "js": lambda x: (
        log(2 - exp(-x))
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

    logits: list[list[Any]]
    actions: list[int]
    policy_chosen: list[bool]


def value(logits: list[Any]) -> Any:
    """V(s) = log Σ_a exp ℓ(a|s)."""
    total = 0.0
    for logit in logits:
        total = total + exp(logit)
    return log(total)


def sequencematch_terms(
    data: list[Raw], model: list[Raw], name: str, alpha: float, gamma: float, *, value_of_data: bool = False
) -> dict[str, Any]:
    """The five sums of Eq. 4 and the loss, normalised by the data's decisions and by rollouts per data trajectory.

    With `value_of_data` the model's value sum is half of V at the data's first states, by telescoping.
    """
    phi = PHI[name]
    a: Any = 0.0
    b: Any = 0.0
    c: Any = 0.0
    d: Any = 0.0
    e: Any = 0.0
    decisions = 0
    for raw in data:
        steps = len(raw.actions)
        decisions += steps
        for t in range(steps):
            now, after = value(raw.logits[t]), value(raw.logits[t + 1])
            a = a + gamma**t / alpha * phi(alpha * raw.logits[t][raw.actions[t]] - gamma * alpha * after)
            b = b + gamma**t / 2 * (now - gamma * after)
        final = value(raw.logits[steps])
        b = b + gamma**steps / 2 * final
        c = c + gamma**steps / (alpha * (1 - gamma)) * phi(alpha * (1 - gamma) * final)
    for raw in model:
        steps = len(raw.actions)
        for t in range(steps):
            now, after = value(raw.logits[t]), value(raw.logits[t + 1])
            d = d + gamma**t / 2 * (now - gamma * after)
            if raw.policy_chosen[t] and name == "chi2_mixture":
                e = e + gamma**t * (alpha * raw.logits[t][raw.actions[t]] - gamma * alpha * after) ** 2 / alpha / 4
        final = value(raw.logits[steps])
        d = d + gamma**steps / 2 * final
        if name == "chi2_mixture":
            e = e + gamma**steps / (1 - gamma) * (alpha * (1 - gamma) * final) ** 2 / alpha / 4
    ratio = len(data) / len(model)
    terms = {"data_reward": a, "data_tail": c, "data_value": b, "model_value": ratio * d, "model_penalty": ratio * e}
    if value_of_data:
        terms["model_value"] = sum(value(raw.logits[0]) / 2 for raw in data)
    terms = {term: total / decisions for term, total in terms.items()}
    gains, costs = ("data_reward", "data_tail"), ("data_value", "model_value", "model_penalty")
    return terms | {"loss": -(sum(terms[g] for g in gains) - sum(terms[k] for k in costs))}


def negative_log_likelihood(data: list[Raw]) -> Any:
    """−(1/N) Σ_t [ℓ(a_t|s_t) − V(s_t)]."""
    total: Any = 0.0
    decisions = 0
    for raw in data:
        for t, action in enumerate(raw.actions):
            total = total + raw.logits[t][action] - value(raw.logits[t])
            decisions += 1
    return -total / decisions


def token_unlikelihood(data: list[Raw], contexts: list[list[int]]) -> Any:
    """−(1/N) Σ_t Σ_{c ∈ C^t} log(1 − p(c|s_t)), C^t being what the context of s_t holds other than x_t."""
    total: Any = 0.0
    decisions = 0
    for raw, tokens in zip(data, contexts, strict=True):
        prompt = len(tokens) - len(raw.actions)
        for t, action in enumerate(raw.actions):
            decisions += 1
            for candidate in set(tokens[: prompt + t]) - {action}:
                total = total + log(1 - exp(raw.logits[t][candidate] - value(raw.logits[t])))
    return -total / decisions
