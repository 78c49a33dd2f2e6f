"""The experiment `thinking`: accuracy against what is spent at test time. Not in the paper.

A model that deletes can be made to think twice: by `backspace_bias`, by a ban on tokens that it deleted, by a search. A model that
does not can answer several times; the likeliest answer counts. The models are those of `mistakes`, and the question can't be
deleted.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sequencematch.core.mdp import Trajectory
from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.evaluation.cases import read_cases
from sequencematch.evaluation.generations import digest, digest_of_weights, generations
from sequencematch.evaluation.registry import Evidence
from sequencematch.experiments import peers
from sequencematch.experiments.fine_tuning import thinking_report as report
from sequencematch.experiments.fine_tuning.cells import Cell
from sequencematch.experiments.fine_tuning.mistakes import on_each_model
from sequencematch.experiments.fine_tuning.questions import Questions
from sequencematch.experiments.fine_tuning.training import saved
from sequencematch.metrics import Measure, accuracy, own_errors
from sequencematch.metrics.cost import per_right
from sequencematch.metrics.measure import mean_of
from sequencematch.policy import Policy, Sampling

#: Names of their own: the folder may hold the results of `arithmetic`, whose models are used again.
RESULTS, FIGURE, TABLE = "thinking.json", "thinking.png", "thinking.md"
BIASES = (-math.inf, -2.0, 0.0, 1.0, 2.0, 4.0, 6.0)
#: Most actions of a search, in multiples of the longest answer.
BUDGETS_OF_SEARCH = (2, 4, 8, 32)
SAMPLES = (1, 2, 4, 8)
#: Rows that are generated at a time.
BATCH = 256


@dataclass(frozen=True)
class Way:
    """A way to decode: its kind, a name in `report.KINDS`, how much of it, and options of `Sampling`, or a number of samples."""

    kind: str
    dose: str
    options: dict[str, Any] = field(default_factory=dict)
    samples: int | None = None


def ways(longest: int, *, deletes: bool) -> list[Way]:
    """All ways to decode answers of up to `longest` tokens. A model that can't delete is greedy, or answers several times."""
    found = []
    for kind, drawn in {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "seed": 0}}.items():
        for ban in (False, True):
            for bias in BIASES if deletes else (-math.inf,):
                if not (ban and bias == -math.inf):  # nothing is deleted
                    options = {**drawn, "backspace_bias": bias, "ban_deleted": ban, "protect_prompt": True}
                    found.append(Way(f"{kind}, banned" if ban else kind, f"bias {bias:g}", options))
    if deletes:
        limits = [times * longest + 1 for times in BUDGETS_OF_SEARCH]
        found += [Way("search", f"{limit} actions", {"search": True, "max_actions": limit}) for limit in limits]
    return [*found, *(Way("best of n", f"n = {count}", samples=count) for count in SAMPLES)]


def run(folder: Path, command: str, *, preset: str = "cpu", jobs: int = 1, model: str | None = None) -> None:
    """Fine-tune the models of a preset, `jobs` at a time, decode each of them in all ways, and collect what they did."""
    found = on_each_model(_think, folder, "thinking", preset, jobs, model)
    write_files(folder, {RESULTS: json_text({"command": command, "models": found})})


def _think(cell: Cell, questions: Questions, folder: Path) -> dict[str, Any]:
    """What a fine-tuned model answers in every way, and what it spends: measures by way."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = Policy.from_pretrained(saved(cell, folder), device=device).eval()
    task = questions.task
    rows, longest = task.test(), task.max_new_tokens
    assert longest is not None
    evidence = Evidence(policy, task, read_cases(policy, task, rows), BATCH)
    known = ways(longest, deletes=cell.method != "mle")
    return {
        "weights": digest_of_weights(policy),
        "data": digest(rows),
        "ways": [asdict(way) | {"measures": [asdict(m) for m in measured(evidence, way)]} for way in known],
    }


def measured(evidence: Evidence, way: Way) -> list[Measure]:
    """Accuracy and cost of a way to decode; and, of one that deletes, the shares of wrong and of right tokens deleted."""
    policy, cases, longest = evidence.policy, evidence.cases, evidence.task.max_new_tokens
    prompts = [case.prompt for case in cases]
    assert longest is not None
    if way.samples is not None:
        drawn = peers.samples(policy, prompts, longest, way.samples, seed=0)
        return _costs(evidence.are_right([row[0] for row in drawn]), drawn)
    made = generations(policy, prompts, Sampling(max_new_tokens=longest, **way.options), BATCH)
    deleted = own_errors(made, [case.prompt + case.reference for case in cases])
    return [*_costs(evidence.are_right(made), [[one] for one in made]), *deleted]


def _costs(right: Sequence[bool], drawn: Sequence[Sequence[Trajectory]]) -> list[Measure]:
    """Accuracy, and actions and forward passes per question and per right answer, of questions answered once or more.

    They are counted as in `metrics.cost`: a token that is written takes a forward pass. A question takes one, too, however many
    answers are drawn.
    """
    spent = {
        "actions": [sum(map(len, row)) for row in drawn],
        "forward passes": [
            1 + sum(action != t.space.bkspc for t in row for action in t.executed[:-1]) for row in drawn
        ],
    }
    numbers = {name: np.array(counts, dtype=np.float64) for name, counts in spent.items()}
    is_right = np.array(right, dtype=np.float64)
    return [
        accuracy(right),
        *(mean_of(f"{name} per question", counts, {}) for name, counts in numbers.items()),
        *(per_right(f"{name} per right answer", counts, is_right) for name, counts in numbers.items()),
    ]


def draw(folder: Path) -> None:
    """The figure and the table, from the results alone."""
    points = report.points(json.loads((folder / RESULTS).read_text())["models"])
    write_files(folder, {TABLE: report.table(points)})
    report.draw(points, folder / FIGURE)
