"""The demo's training with rollouts made inline and by workers: accuracy, and how long training waits for rollouts."""

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.alone import be_alone
from benchmarks.timing import provenance, write_json
from sequencematch.evaluation import evaluate
from sequencematch.experiments import demo
from sequencematch.training import SequenceMatchTrainer

#: Steps between two log lines.
EVERY = 10


def train(place: str, workers: int, budget: demo.Budget, seed: int) -> dict[str, Any]:
    """One run of the demo's SequenceMatch, and its measures."""
    questions = demo.task(budget)
    with tempfile.TemporaryDirectory() as folder:
        config = demo.config("sequencematch", budget, seed, folder)
        config.logging_steps = EVERY
        if place != "inline":
            config.rollouts, config.rollout_workers = place, workers
        trainer = SequenceMatchTrainer(demo.BASE, config, questions.train())
        began, own_s = time.perf_counter(), time.process_time()
        trainer.train()
        seconds, own_s = time.perf_counter() - began, time.process_time() - own_s
    record = evaluate(trainer.model.eval(), questions, batch_size=256, scorer=demo.BASE)
    accuracy = next(measure for measure in record.measures if measure.name == "accuracy")
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "rollouts": place,
        "seed": seed,
        "accuracy": accuracy.value,
        "interval": (accuracy.low, accuracy.high),
        "seconds": seconds,
        "process_seconds": own_s,
        **waiting(lines),
    }


def waiting(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The share of time spent waiting for rollouts, making them included, once warm: after the line that drew the first batch."""
    drawing = [line for line in lines if "rollouts/seconds" in line]
    warm = drawing[1:]
    if not warm:
        return {}
    steps = [after["step"] - before["step"] for before, after in itertools.pairwise(drawing)]
    seconds = sum(line["step_seconds"] * count for line, count in zip(warm, steps, strict=True))
    on_rollouts = sum(line["rollouts/seconds"] * count for line, count in zip(warm, steps, strict=True))
    found: dict[str, Any] = {"share_on_rollouts": on_rollouts / seconds}
    names = ("wait_share", "staleness", "staleness_max", "sync_seconds", "queue", "workers", "per_second")
    for name in names:
        values = [line[f"rollouts/{name}"] for line in warm if f"rollouts/{name}" in line]
        if values:
            found[name] = sum(values) / len(values)
    for name in ("replaced", "dropped_stale", "duplicates"):
        values = [line[f"rollouts/{name}"] for line in lines if f"rollouts/{name}" in line]
        if values:
            found[name] = sum(values)
    return found


def main() -> int:
    """Train with every seed, inline and by workers in turn; print a line for each run, and write all down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_rollouts", description=__doc__)
    parser.add_argument("--rollouts", default="ray", help="ray, in a network namespace with loopback alone, or process")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="200 steps instead of 1,000")
    parser.add_argument("--out", type=Path, default=Path("out/demo_rollouts.json"), help="where the numbers go")
    args = parser.parse_args()
    try:
        if args.rollouts == "ray":
            be_alone("benchmarks.demo_rollouts", sys.argv[1:])
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    provenance()  # of the commit that is measured, whatever is committed meanwhile
    runs = []
    for seed in range(args.seeds):
        for place in ("inline", args.rollouts):
            runs.append(train(place, args.workers, demo.QUICK if args.quick else demo.FULL, seed))
            print({name: round(v, 4) if isinstance(v, float) else v for name, v in runs[-1].items()}, flush=True)
    write_json(args.out, {"runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
