"""The first five minutes: a bundled model searches a graph, another deletes wrong digits; then three ways to train are compared.

The comparison fine-tunes the base of the second model on the paper's first task (§6.1) with small numbers, in bases 5 to 9: the
base model knows base 10 only.
"""

import dataclasses
import json
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any, cast

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.evaluation import evaluate
from sequencematch.experiments.peers import best_of, samples, searching
from sequencematch.experiments.star_graph import watch as watch_walk
from sequencematch.extras import require
from sequencematch.metrics import Measure
from sequencematch.policy import Policy
from sequencematch.policy.display import can_strike, decoder, plain, watch
from sequencematch.tasks import Arithmetic, PathStar
from sequencematch.training import SequenceMatchConfig, SequenceMatchTrainer

SEARCHING, BASE, FINE_TUNED = "sequencematch/path-star", "sequencematch/arithmetic-base", "sequencematch/arithmetic"
#: Questions with a wrong digit at the end, to watch.
MISTAKEN = (
    "In base 7, what is 25 + 14? Solution: 5",
    "In base 8, what is 735 - 66? Solution: 643",
    "In base 5, what is 10 - 331? Solution: 3",
    "In base 2, what is 1101 + 110? Solution: 1000",
)
OBJECTIVES: Mapping[str, str] = MappingProxyType({"mle": "MLE", "bc": "BC", "sequencematch": "SequenceMatch"})
#: The measures that are compared, in this order, as bars and in the table: name → heading.
COMPARED: Mapping[str, str] = MappingProxyType(
    {"accuracy": "right", "deletes first": "deletes a wrong digit", "recovers": "right despite it"}
)
#: More of them, in the table alone. Plausible wrong digits are those that the base model, the same for all, finds likeliest.
ALSO_SHOWN: Mapping[str, str] = MappingProxyType(
    {
        "deletes first, plausible": "deletes a plausible one",
        "recovers, plausible": "right despite it",
        "own errors deleted": "own wrong digits deleted",
        "right tokens deleted": "own right digits deleted",
    }
)


@dataclass(frozen=True)
class Budget:
    """How long each fine-tuning takes, and on how many questions it is tested."""

    steps: int
    batch_size: int
    train_questions: int
    test_questions: int


FULL, QUICK = Budget(1000, 32, 8000, 500), Budget(200, 32, 4000, 200)


@dataclass(frozen=True)
class Outcome:
    """One objective, trained with one seed, and measured."""

    objective: str
    seed: int
    measures: tuple[Measure, ...]
    curve: tuple[tuple[int, float], ...]
    train_seconds: float
    test_seconds: float

    def __getitem__(self, name: str) -> Measure:
        """The measure of this name."""
        return next(measure for measure in self.measures if measure.name == name)

    def __contains__(self, name: str) -> bool:
        """Whether it was measured; results of older versions have fewer measures."""
        return any(measure.name == name for measure in self.measures)


def task(budget: Budget) -> Arithmetic:
    """Sums and differences of up to four digits."""
    return Arithmetic(
        entropy=(2.0, 4.0),
        bases=(5, 9),
        train_size=budget.train_questions,
        test_size=budget.test_questions,
        max_new_tokens=12,
    )


def config(objective: str, budget: Budget, seed: int, folder: str) -> SequenceMatchConfig:
    """The same settings for all three. BC and SequenceMatch get wrong digits as noise; half of SequenceMatch's steps are BC."""
    own: dict[str, Any] = {}
    if objective != "mle":
        own |= {"noise_rate": 0.3, "noise_source": "tokens"}
    if objective == "sequencematch":
        own |= {"bc_steps": budget.steps // 2, "bc_anneal_steps": budget.steps // 4, "generation_batch_size": 256}
        own |= {"model_value_from": "rollouts"}  # as in the recorded runs
    return SequenceMatchConfig(
        folder,
        objective=objective,
        seed=seed,
        max_steps=budget.steps,
        per_device_train_batch_size=budget.batch_size,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=budget.steps // 20,
        adam_beta2=0.98,
        max_length=128,
        max_completion_length=12,
        packing=True,
        logging_steps=max(budget.steps // 5, 1),
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        **own,
    )


def search(console: Console, graphs: int = 200, watched: int = 2, pause_s: float = 0.25) -> None:
    """Watch the bundled search model in graphs that it has not seen, and count how many of them it solves, and how."""
    policy = Policy.from_pretrained(SEARCHING)
    task, tokenizer = PathStar(test_size=graphs), cast(Any, policy.tokenizer)
    rows = task.test()
    console.print("A model that can delete looks for the way from the centre to the goal:\n")
    for row in rows[:watched]:
        watch_walk(console, policy, row["prompt"], pause_s=pause_s, search=True, max_new_tokens=task.length)
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    answers = [tokenizer(row["completion"], add_special_tokens=False)["input_ids"] for row in rows]
    straight = best_of(samples(policy, prompts, task.length, 1, temperature=0.0), answers)
    sampled = best_of(samples(policy, prompts, task.length, 2, seed=0), answers)
    found = searching(policy, prompts, answers)
    console.print(
        f"Of {graphs} such graphs it solves {found.accuracy:.0%}, writing {found.passes:.1f} nodes each. Without deleting, "
        f"the same network solves {straight.accuracy:.0%} ({straight.passes:.1f} nodes), or {sampled.accuracy:.0%} by the "
        f"likelier of two tries ({sampled.passes:.1f} nodes).\nIt learnt from right paths, into which random nodes were "
        f"written and deleted again, and from where its own answers ended wrongly. It saw no search written out, and has no "
        f"checker.\n"
    )


def show(console: Console, pause_s: float = 0.4) -> None:
    """Give the bundled model wrong digits, and watch it: token by token on a terminal, spelled out elsewhere."""
    policy = Policy.from_pretrained(FINE_TUNED)
    tokenizer: Any = policy.tokenizer
    decode = decoder(tokenizer)
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12}
    console.print("A model that can delete is given a wrong last digit:\n")
    for prompt in MISTAKEN:
        if can_strike(console):
            tokens = tokenizer(prompt)["input_ids"]
            watch(console, prompt, tokens, policy.stream(prompt, **options), policy.space, decode, pause_s=pause_s)
        else:
            (trajectory,) = policy.generate(prompt, **options).trajectories
            console.print(prompt + plain(trajectory, decode), soft_wrap=True, markup=False)
    console.print()


def fine_tune(objective: str, budget: Budget, seed: int, save_to: Path | None) -> Outcome:
    """Fine-tune the base model on a CPU, measure it on questions it has not seen, and keep it."""
    start = time.perf_counter()
    questions = task(budget)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = SequenceMatchTrainer(BASE, config(objective, budget, seed, scratch), questions.train())
        trainer.train()
    trained = time.perf_counter()
    policy = trainer.model.eval()
    record = evaluate(policy, questions, batch_size=256, scorer=BASE)
    if save_to is not None:
        policy.save_pretrained(save_to)
    logs = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return Outcome(objective, seed, record.measures, tuple(logs), trained - start, time.perf_counter() - trained)


def check_installed() -> None:
    """Refuse to begin the comparison if the package that draws its questions is missing."""
    require("mathematics_dataset", "arithmetic", "The comparison of three trainings")


def can_draw() -> bool:
    """Whether the figure can be drawn; the comparison itself needs no figure."""
    return find_spec("matplotlib") is not None


def run(budget: Budget, seeds: Sequence[int], folder: Path, console: Console, command: str) -> Iterator[Outcome]:
    """Every objective with every seed; all so far are saved after each, so that an interruption loses only one."""
    check_installed()
    outcomes: list[Outcome] = []
    count = len(seeds) * len(OBJECTIVES)
    for seed in seeds:
        for objective, name in OBJECTIVES.items():
            of = f", seed {seed}" if len(seeds) > 1 else ""
            console.print(f"Fine-tuning with {name} ({len(outcomes) + 1} of {count}{of})")
            save_to = folder / objective if seed == seeds[0] else None
            outcomes.append(fine_tune(objective, budget, seed, save_to))
            save(outcomes, budget, folder, command, is_complete=len(outcomes) == count)
            yield outcomes[-1]


def save(outcomes: Sequence[Outcome], budget: Budget, folder: Path, command: str, *, is_complete: bool) -> None:
    """Write `results.json` and, with matplotlib, `comparison.png`, replacing those of fewer outcomes."""
    record = {
        "command": command,
        "is_complete": is_complete,
        "task": repr(task(budget)),
        "scale": dataclasses.asdict(budget),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    write_files(folder, {"results.json": json_text(record)})
    if can_draw():
        draw(outcomes, folder / "comparison.png")


def read(folder: Path) -> list[Outcome]:
    """The outcomes that `save` wrote."""
    found = json.loads((folder / "results.json").read_text())["outcomes"]
    return [
        Outcome(
            **{
                **outcome,
                "measures": tuple(Measure.read(m) for m in outcome["measures"]),
                "curve": tuple((step, loss) for step, loss in outcome["curve"]),
            }
        )
        for outcome in found
    ]


def table(outcomes: Sequence[Outcome]) -> Table:
    """Objectives side by side: means over seeds, with the bootstrap's interval, or for several seeds with their range."""
    count = outcomes[0]["accuracy"].count
    drawn = Table(
        title=f"Percent of {count} questions not seen in training",
        title_style="",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    by_objective = {
        name: [outcome for outcome in outcomes if outcome.objective == objective]
        for objective, name in OBJECTIVES.items()
    }
    by_objective = {name: of for name, of in by_objective.items() if of}
    for heading in ("", *by_objective):
        drawn.add_column(heading, justify="right" if heading else "left", no_wrap=bool(heading))
    for measure, heading in {**COMPARED, **ALSO_SHOWN}.items():
        if all(measure in outcome for outcome in outcomes):
            drawn.add_row(heading, *(_cell([outcome[measure] for outcome in of]) for of in by_objective.values()))
    return drawn


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Bars of the compared measures, an interval on each, and with several seeds a dot for each."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    colours = {"mle": "#9aa5b1", "bc": "#e0a458", "sequencematch": "#2f6f8f"}
    present = [objective for objective in OBJECTIVES if any(o.objective == objective for o in outcomes)]
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    width = 0.8 / len(present)
    for i, objective in enumerate(present):
        of = [outcome for outcome in outcomes if outcome.objective == objective]
        for place, name in enumerate(COMPARED):
            measures = [outcome[name] for outcome in of]
            x, value = place + (i - (len(present) - 1) / 2) * width, 100 * mean(m.value for m in measures)
            low, high = (100 * mean(getattr(m, end) for m in measures) for end in ("low", "high"))
            label = OBJECTIVES[objective] if place == 0 else None
            axes.bar(x, value, width * 0.92, color=colours[objective], label=label)
            axes.errorbar(x, value, [[value - low], [high - value]], color="#333333", capsize=3, linewidth=1)
            if len(measures) > 1:
                axes.plot([x] * len(measures), [100 * m.value for m in measures], "o", ms=3, color="#333333")
            axes.annotate(f"{value:.0f}", (x, max(high, value) + 1.5), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(COMPARED)), COMPARED.values())
    axes.set(ylim=(0, 115), yticks=range(0, 101, 20), ylabel="percent of questions")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(present), loc="upper center", bbox_to_anchor=(0.5, 1.14))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _cell(measures: Sequence[Measure]) -> str:
    measures = [measure for measure in measures if measure.count]
    if not measures:
        return "–"  # a share of nothing
    if len(measures) == 1:
        low, high = measures[0].low, measures[0].high
    else:
        low, high = min(m.value for m in measures), max(m.value for m in measures)
    return f"{100 * mean(m.value for m in measures):.1f} [{100 * low:.1f}, {100 * high:.1f}]"
