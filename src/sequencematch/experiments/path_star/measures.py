"""What a trained network does on new graphs: under each way to decode, beside its peers, and in the states that decide."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.evaluation import evaluate
from sequencematch.experiments import peers
from sequencematch.experiments.networks import START, Budget
from sequencematch.experiments.path_star import rows
from sequencematch.experiments.path_star.cells import BACK, METHODS, Cell
from sequencematch.policy import Policy
from sequencematch.tasks.path_star import PathStar, Star, read_star

#: Thresholds to tune the search of a model without `<bkspc>` with.
THRESHOLDS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
#: Tokens that a rollout may write beyond a whole path, in training and where it is sampled without memory.
ROOM = 2
#: Ways to decode. Without memory: greedily, and sampled with many actions, so that a row can leave a dead end again and again.
DECODINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "plain": {"protect_prompt": True},
        "sampled": {"protect_prompt": True, "temperature": 1.0, "max_actions": 400},
        "ban": {"protect_prompt": True, "ban_deleted": True, "max_actions": 400},
        "search": {"search": True},
    }
)


def measure(policy: Policy, cell: Cell, budget: Budget) -> dict[str, Any]:
    """What a network does: a network that deletes under each way to decode, the others as their training asks."""
    task, method = cell.task, METHODS[cell.method]
    tokenizer: Any = policy.tokenizer
    if method.deletes:
        metrics = ("accuracy", "own_errors", "cost", "backspace_rate")
        options: dict[str, Any] = {"limit": budget.test_rows, "batch_size": 1000, "progress": False}
        roomy = replace(task, max_new_tokens=cell.length + ROOM)
        records = {
            name: evaluate(policy, roomy if name == "sampled" else task, metrics=metrics, **options, **how)
            for name, how in DECODINGS.items()
        }
        return {
            "decodings": {name: [asdict(found) for found in record.measures] for name, record in records.items()},
            "states": probabilities(policy, task, budget.test_rows),
        }
    prompts, answers = _questions(task, tokenizer, budget.test_rows)
    back = tokenizer.convert_tokens_to_ids(BACK)
    if method.rows == "reversed":
        found = {"greedy": rows.reversed_answers(policy, prompts, answers)}
    elif method.rows == "traces":
        found = {"greedy": rows.traced_answers(policy, prompts, answers, back, cell.arms)}
    elif method.rows == "teacherless":
        found = {"at once": rows.teacherless_answers(policy.base, prompts, answers, back, policy.space.eos)}
    elif cell.method == START:
        found = {"greedy": peers.beam_search(policy, prompts, answers, 1)}
    else:
        found = {"greedy": peers.beam_search(policy, prompts, answers, 1)}
        for count in (2, 3, 5):
            drawn = peers.samples(policy, prompts, cell.length, count, seed=0)
            found |= {
                f"beam search, {count} beams": peers.beam_search(policy, prompts, answers, count),
                f"best of {count} by likelihood": peers.best_of(drawn, answers),
                f"best of {count} by an oracle": peers.best_by_oracle(drawn, answers),
            }
        # The threshold is tuned on other graphs than those of the test.
        asked, wanted = _questions(replace(task, seed=1), tokenizer, 100)
        by_threshold = {t: peers.searching_below(policy, asked, wanted, t).accuracy for t in THRESHOLDS}
        best = max(by_threshold, key=lambda threshold: by_threshold[threshold])
        found[f"search, deleting below p = {best:g}"] = peers.searching_below(policy, prompts, answers, best)
    return {"peers": _recorded(found)}


def judge(cell: Cell, by: Cell, budget: Budget, folder: Path) -> None:
    """Samples of a network without `<bkspc>`, of which another network picks the one in which it would delete least.

    The judge's passes count. Both networks must be finished. The result is written beside theirs, as a cell of the first network.
    """
    path = folder / "cells" / f"judged_{cell.file}"
    if path.exists():
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    writer, other = (
        Policy.from_pretrained(folder / "policies" / Path(c.file).stem, device=device).eval() for c in (cell, by)
    )
    prompts, answers = _questions(cell.task, writer.tokenizer, budget.test_rows)
    found = {}
    for count in (2, 3, 5):
        drawn = peers.samples(writer, prompts, cell.length, count, seed=0)
        doubt = peers.doubts(other, [sample for row in drawn for sample in row])
        best = peers.best_of(drawn, answers, lambda t: -doubt[t])  # noqa: B023
        found[f"best of {count} judged"] = replace(best, passes=2 * best.passes)  # the judge reads every sample, too
    record = {"cell": asdict(cell), "judge": asdict(by), "budget": asdict(budget), "log": [], "peers": _recorded(found)}
    write_files(path.parent, {path.name: json_text(record)})


def _questions(task: PathStar, tokenizer: Any, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of test prompts, and of their answers."""
    asked = task.test()[:count]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in asked]
    return prompts, [tokenizer(row["completion"], add_special_tokens=False)["input_ids"] for row in asked]


def _recorded(found: Mapping[str, peers.Outcome]) -> dict[str, dict[str, float]]:
    return {name: {"accuracy": outcome.accuracy, "passes": outcome.passes} for name, outcome in found.items()}


def decisive_states(star: Star) -> dict[str, list[tuple[str, ...]]]:
    """The paths at whose end a search must know what to do, by kind.

    `goal`: the right arm. `dead end`: a whole wrong arm. `false goal`: a wrong arm with the goal in place of its last node.
    """
    wrong = [arm for arm in star.arms if arm[-1] != star.goal]
    return {
        "goal": [arm for arm in star.arms if arm[-1] == star.goal],
        "dead end": wrong,
        "false goal": [(*arm[:-1], star.goal) for arm in wrong],
    }


@torch.no_grad()
def probabilities(policy: Policy, task: PathStar, count: int) -> dict[str, dict[str, float]]:
    """Mean p(`<bkspc>`) and p(`<eos>`) in each kind of `decisive_states`, over the first `count` test graphs."""
    tokenizer: Any = policy.tokenizer
    states: dict[str, list[list[int]]] = {}
    for row in task.test()[:count]:
        for kind, paths in decisive_states(read_star(row["prompt"])).items():
            texts = [" ".join([row["prompt"], *path]) for path in paths]
            states.setdefault(kind, []).extend(tokenizer(text)["input_ids"] for text in texts)
    found = {}
    for kind, ids in states.items():
        parts = []
        for part in torch.tensor(ids, device=policy.device).split(1000):
            hidden = policy.base.base_model(input_ids=part).last_hidden_state[:, -1]
            parts.append(policy.action_logits(hidden).float().softmax(-1))
        chance = torch.cat(parts).mean(0)
        found[kind] = {"<bkspc>": float(chance[policy.space.bkspc]), "<eos>": float(chance[policy.space.eos])}
    return found
