"""Prompts to begin with, made for the model that is served."""

from typing import Any

from sequencematch.serving.settings import Served
from sequencematch.tasks.path_star import as_row, graphs, read_star

#: Graphs that are shown.
GRAPHS = 6
_ARITHMETIC = (
    "In base 7, what is 25 + 14? Solution:",
    "In base 5, what is 432 - 24? Solution:",
    "In base 9, what is -7 - -381? Solution:",
    "In base 2, what is 10110 + 11? Solution:",
    "In base 6, what is 2031 + 5? Solution:",
)
_GENERIC = ("Once upon a time", "The capital of France is", "In the morning,")


def examples(served: Served, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts with settings that suit them. Whether a model knows graphs or sums is read from its tokens."""
    words = set(served.policy.tokenizer.get_vocab()) if served.policy.tokenizer is not None else set()
    if {"|", "/", "=", "0", "29"} <= words and len(words) < 100:
        drawn = graphs(arms=3, length=4, names=30, seed=seed)
        return [_graph(str(as_row(next(drawn))["prompt"])) for _ in range(GRAPHS)]
    if {"In base", "? Solution:"} <= words:
        return [{"prompt": prompt, "settings": {"max_tokens": 32, "temperature": 0}} for prompt in _ARITHMETIC]
    return [{"prompt": prompt, "settings": {"max_tokens": 64}} for prompt in _GENERIC]


def _graph(prompt: str) -> dict[str, Any]:
    star = read_star(prompt)
    drawn = {"centre": star.centre, "goal": star.goal, "arms": [list(arm) for arm in star.arms]}
    return {"prompt": prompt, "star": drawn, "settings": {"max_tokens": 4, "search": True}}
