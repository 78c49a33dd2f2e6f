"""Networks on path-star graphs: who finds the way, by which training and which decoding?   (docs/results/search.md)

Each cell trains one network from scratch on graphs with right paths alone and measures it under several ways to decode. A cell
writes one JSON file; finished cells are not run again, and several cells can share a GPU as processes of their own.
"""

import itertools
import json
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from sequencematch.data.files import write_files
from sequencematch.data.spelling import check_choice
from sequencematch.evaluation import evaluate
from sequencematch.experiments import path_star_peers as peers
from sequencematch.experiments import path_star_report as report
from sequencematch.policy import Policy
from sequencematch.tasks.path_star import PathStar, Star, read_star
from sequencematch.tasks.vocabulary import word_tokenizer
from sequencematch.training import SequenceMatchConfig, SequenceMatchTrainer


@dataclass(frozen=True)
class Budget:
    """The size of a network, how long it is trained, and on how many graphs it is tested. The same for all cells."""

    layers: int = 4
    width: int = 256
    steps: int = 2000
    batch_size: int = 256
    learning_rate: float = 1e-3
    test_graphs: int = 2000


GPU = Budget()
CPU = Budget(layers=2, width=64, steps=60, batch_size=32, test_graphs=60)
BUDGETS: Mapping[str, Budget] = MappingProxyType({"gpu": GPU, "cpu": CPU})


@dataclass(frozen=True)
class Method:
    """A way to train: settings of the trainer, and on which rows. With `noise_ends` half of all bursts of noise end in the goal."""

    settings: Mapping[str, Any]
    rows: str = "paths"
    noise_ends: bool = False

    @property
    def deletes(self) -> bool:
        """Whether the network has `<bkspc>`."""
        return bool(self.settings["objective"] != "mle")


_MLE = MappingProxyType({"objective": "mle"})
_UNIFORM = MappingProxyType({"noise_rate": 0.15})
#: Bursts of up to four nodes of the graph.
_BURSTS = MappingProxyType({"noise_rate": 0.15, "noise_source": "tokens", "noise_burst": 4})


def _sequencematch(alpha: float, gamma: float, noise: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"objective": "sequencematch", "alpha": alpha, "gamma": gamma, **noise, **more}


#: Ways to train, by name.
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "mle": Method(_MLE),
        "mle, reversed": Method(_MLE, rows="reversed"),
        "mle, traces": Method(_MLE, rows="traces"),
        "mle, teacherless": Method(_MLE, rows="teacherless"),
        "bc": Method({"objective": "bc", **_UNIFORM}),
        "bc, bursts": Method({"objective": "bc", **_BURSTS}),
        "bc, bursts to the goal": Method({"objective": "bc", **_BURSTS}, noise_ends=True),
        "bc, corrected": Method({"objective": "bc", **_UNIFORM, "correction_rate": 0.5}),
        "bc, bursts, corrected": Method({"objective": "bc", **_BURSTS, "correction_rate": 0.5}),
        **{
            f"sequencematch α {alpha:g} γ {gamma:g}": Method(_sequencematch(alpha, gamma, _UNIFORM))
            for alpha in (0.1, 0.3, 0.5)
            for gamma in (0.9, 0.99, 0.998)
        },
        "sequencematch α 0.5 γ 0.99, bursts to the goal": Method(_sequencematch(0.5, 0.99, _BURSTS), noise_ends=True),
    }
)
#: The word for going back in written-out walks, and the input of teacherless training.
BACK = "."
#: Thresholds to tune the search of a model without `<bkspc>` with.
THRESHOLDS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
#: Ways to decode. Without memory: greedily, and sampled with many actions, so that a row can leave a dead end again and again.
DECODINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "plain": {"protect_prompt": True},
        "sampled": {"protect_prompt": True, "temperature": 1.0, "max_actions": 400},
        "ban": {"protect_prompt": True, "ban_deleted": True, "max_actions": 400},
        "search": {"search": True},
    }
)


@dataclass(frozen=True)
class Cell:
    """One network: how it is trained, on which graphs, with which seed."""

    method: str
    seed: int
    arms: int = 3
    length: int = 4

    @property
    def file(self) -> str:
        """The name of its result."""
        words = self.method.replace("α ", "a").replace("γ ", "g").replace(",", "").replace(" ", "_")
        return f"d{self.arms}_l{self.length}_{words}_{self.seed}.json"

    @property
    def task(self) -> PathStar:
        """Its graphs: 30 node names, or as many as the graph needs."""
        return PathStar(arms=self.arms, length=self.length, names=max(30, self.arms * self.length + 1))


class Rows(Dataset[Mapping[str, Any]]):
    """Training rows as token ids, kept as arrays: all graphs of a task have the same number of tokens."""

    def __init__(self, ids: np.ndarray, nodes: np.ndarray, completion: int, *, noise_ends: bool) -> None:
        """`ids` [row, token]: prompt and completion, of which the last `completion` tokens; `nodes` [row, node]."""
        self.ids, self.nodes, self.noise_ends = ids, nodes, noise_ends
        self.mask = [0] * (ids.shape[1] - completion) + [1] * completion

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.ids)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """A row as the trainer reads it."""
        ids = self.ids[row].tolist()
        found = {"input_ids": ids, "completion_mask": self.mask, "noise_tokens": self.nodes[row].tolist()}
        return found | ({"noise_ends": ids[-1:]} if self.noise_ends else {})


def load(cell: Cell, budget: Budget, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and nodes of all training rows, [row, token] and [row, node]; drawn once for all cells with these graphs."""
    task, count = cell.task, budget.steps * budget.batch_size
    path = folder / "data" / f"d{cell.arms}_l{cell.length}_{count}.npz"
    if not path.exists():
        tokenizer = word_tokenizer(task.words())
        rows = replace(task, train_size=count).train()
        texts = (row["prompt"] + row["completion"] for row in rows)
        ids = [tokenizer(list(part))["input_ids"] for part in _batched(texts, 10_000)]
        nodes = [tokenizer.convert_tokens_to_ids(row["noise_tokens"]) for row in rows]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(partial, ids=np.concatenate(ids).astype(np.uint8), nodes=np.array(nodes, dtype=np.uint8))
        partial.rename(path)
    stored = np.load(path)
    return stored["ids"], stored["nodes"]


def _batched(texts: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    texts = iter(texts)
    while part := tuple(itertools.islice(texts, size)):
        yield part


def new_model(budget: Budget, tokenizer: Any) -> LlamaForCausalLM:
    """A Llama with random weights."""
    heads = max(1, budget.width // 64)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=budget.width,
            intermediate_size=4 * budget.width,
            num_hidden_layers=budget.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=256,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def config(cell: Cell, budget: Budget, folder: str, **changes: Any) -> SequenceMatchConfig:
    """The same settings for every method but its own."""
    own = dict(METHODS[cell.method].settings)
    if own["objective"] == "sequencematch":
        own |= {"bc_steps": budget.steps // 4, "bc_anneal_steps": budget.steps // 4}
    if own["objective"] == "sequencematch" or "correction_rate" in own:
        own |= {
            "generation_batch_size": 2 * budget.batch_size,
            "replay_size": 16 * budget.batch_size,
            "max_completion_length": cell.length,
            "protect_prompt": True,
        }
    settings: dict[str, Any] = {
        "seed": cell.seed,
        "max_steps": budget.steps,
        "per_device_train_batch_size": budget.batch_size,
        "learning_rate": budget.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": budget.steps // 20,
        "adam_beta2": 0.98,
        "max_length": 160,
        "logging_steps": max(budget.steps // 20, 1),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "tf32": torch.cuda.is_available() or None,
    }
    return SequenceMatchConfig(folder, **{**settings, **own, **changes})


def run_cell(cell: Cell, budget: Budget, folder: Path, **changes: Any) -> dict[str, Any]:
    """Train a network and measure it; `changes` are settings of the trainer. Returns, and writes, its result."""
    path = folder / "cells" / cell.file
    if path.exists():
        return dict(json.loads(path.read_text()))
    task, method, began = cell.task, METHODS[cell.method], time.perf_counter()
    tokenizer = word_tokenizer([*task.words(), BACK])
    ids, nodes = load(cell, budget, folder)
    set_seed(cell.seed)
    model = new_model(budget, tokenizer)
    rows: dict[str, Callable[[], Dataset[Mapping[str, Any]]]] = {
        "paths": lambda: Rows(ids, nodes, cell.length, noise_ends=method.noise_ends),
        "reversed": lambda: peers.ReversedRows(ids, cell.length),
        "traces": lambda: peers.TraceRows(ids, cell.length, tokenizer.convert_tokens_to_ids(BACK)),
    }
    log: list[dict[str, Any]] = []
    if method.rows in rows:
        with tempfile.TemporaryDirectory() as scratch:
            args = config(cell, budget, scratch, **changes)
            trainer = SequenceMatchTrainer(model, args, train_dataset=rows[method.rows](), processing_class=tokenizer)
            trainer.train()
        policy, log = trainer.model.eval(), trainer.state.log_history
    else:
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        marks = {"dummy": tokenizer.convert_tokens_to_ids(BACK), "eos": tokenizer.eos_token_id}
        sizes: dict[str, Any] = {"steps": budget.steps, "batch": budget.batch_size, "lr": budget.learning_rate}
        peers.teacherless(model, ids, cell.length, **marks, **sizes)
        policy = Policy(model.eval(), tokenizer)
    found = {
        "cell": asdict(cell),
        "budget": asdict(budget),
        "train_seconds": time.perf_counter() - began,
        "log": log,
        **measure(policy, cell, budget),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seconds": time.perf_counter() - began,
    }
    policy.save_pretrained(folder / "policies" / path.stem)
    write_files(path.parent, {path.name: json.dumps(found, indent=1, ensure_ascii=False) + "\n"})
    return found


def measure(policy: Policy, cell: Cell, budget: Budget) -> dict[str, Any]:
    """What a network does: a network that deletes under each way to decode, the others as their training asks."""
    task, method = cell.task, METHODS[cell.method]
    tokenizer: Any = policy.tokenizer
    if method.deletes:
        metrics = ("accuracy", "own_errors", "cost", "backspace_rate")
        options: dict[str, Any] = {"limit": budget.test_graphs, "batch_size": 1000, "progress": False}
        records = {name: evaluate(policy, task, metrics=metrics, **options, **how) for name, how in DECODINGS.items()}
        return {
            "decodings": {name: [asdict(found) for found in record.measures] for name, record in records.items()},
            "states": probabilities(policy, task, budget.test_graphs),
        }
    rows = task.test()[: budget.test_graphs]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    answers = [tokenizer(row["completion"], add_special_tokens=False)["input_ids"] for row in rows]
    back = tokenizer.convert_tokens_to_ids(BACK)
    if method.rows == "reversed":
        found = {"greedy": peers.reversed_answers(policy, prompts, answers)}
    elif method.rows == "traces":
        found = {"greedy": peers.traced_answers(policy, prompts, answers, back, cell.arms)}
    elif method.rows == "teacherless":
        found = {"at once": peers.teacherless_answers(policy.base, prompts, answers, back, policy.space.eos)}
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
        tuning = PathStar(arms=cell.arms, length=cell.length, names=task.names, seed=1, test_size=100).test()
        asked = [tokenizer(row["prompt"])["input_ids"] for row in tuning]
        wanted = [tokenizer(row["completion"], add_special_tokens=False)["input_ids"] for row in tuning]
        by_threshold = {t: peers.searching_below(policy, asked, wanted, t).accuracy for t in THRESHOLDS}
        best = max(by_threshold, key=lambda threshold: by_threshold[threshold])
        found[f"search, deleting below p = {best:g}"] = peers.searching_below(policy, prompts, answers, best)
    return {"peers": {name: {"accuracy": x.accuracy, "passes": x.passes} for name, x in found.items()}}


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


def run_cells(cells: Sequence[Cell], budget: Budget, folder: Path, jobs: int) -> list[dict[str, Any]]:
    """Every cell that has no result yet, `jobs` at a time in processes of their own. Returns all results, in order."""
    for cell in {(cell.arms, cell.length): cell for cell in cells}.values():
        load(cell, budget, folder)
    if jobs == 1:
        return [run_cell(cell, budget, folder) for cell in tqdm(cells, unit="network")]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        waiting = [pool.submit(run_cell, cell, budget, folder) for cell in cells]
        for done in tqdm(as_completed(waiting), total=len(cells), unit="network"):
            done.result()
    return [run_cell(cell, budget, folder) for cell in cells]


# The experiment `sequencematch reproduce path_star`.

RESULTS, FIGURE = "results.json", "path_star.png"
#: Peers that are trained on other rows, fewer seeds of which say enough.
_PEERS = ("mle, reversed", "mle, traces", "mle, teacherless")


def study(preset: str) -> list[Cell]:
    """The networks of a preset: five seeds of every method, three of the peers, and larger stars for the best recipes."""
    check_choice("--preset", preset, BUDGETS)
    if preset == "cpu":
        return [Cell(method, 0, arms=2, length=2) for method in ("mle", "bc", "bc, corrected")]
    cells = [Cell(method, seed) for seed in range(5) for method in METHODS if seed < 3 or method not in _PEERS]
    larger = [(2, 6), (5, 4), (5, 5)]
    methods = ("mle", "bc, corrected", "bc, bursts, corrected", "sequencematch α 0.5 γ 0.99")
    return cells + [Cell(method, seed, *shape) for shape in larger for seed in range(5) for method in methods]


def run(folder: Path, command: str, *, preset: str = "cpu", jobs: int = 1) -> None:
    """Train and measure the networks of a preset, `jobs` at a time, and collect what they found."""
    run_cells(study(preset), BUDGETS[preset], folder, jobs)
    collect(folder, command)


def collect(folder: Path, command: str) -> None:
    """Write `results.json` from the finished cells, without their learning curves."""
    found = [json.loads(path.read_text()) for path in (folder / "cells").glob("*.json")]
    order = list(METHODS)
    found.sort(
        key=lambda r: [
            *(r["cell"][name] for name in ("arms", "length")),
            order.index(r["cell"]["method"]),
            r["cell"]["seed"],
        ]
    )
    short = [{name: value for name, value in cell.items() if name != "log"} for cell in found]
    for cell, whole in zip(short, found, strict=True):
        losses = [entry["loss"] for entry in whole["log"] if "loss" in entry]
        cell["final_loss"] = losses[-1] if losses else None
    text = json.dumps({"command": command, "cells": short}, indent=1, ensure_ascii=False) + "\n"
    write_files(folder, {RESULTS: text})


def draw(folder: Path) -> None:
    """The figure, from `results.json` alone: the shape of graphs with the most networks."""
    found = report.ways(json.loads((folder / RESULTS).read_text())["cells"])
    shape = Counter((way.arms, way.length) for way in found).most_common(1)[0][0]
    report.draw(found, *shape, folder / FIGURE)
