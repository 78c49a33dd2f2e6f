"""A run whose rollout workers are killed every few seconds must end bit for bit like one that nothing happened to.

python -m tests.training.rollout_kills --rollouts process --seconds 60

Every few seconds a worker that has started gets SIGKILL, or every fourth time SIGSTOP, which only its time limit reveals. After
`--seconds` the run ends with its step. Then the same number of steps is trained without faults, and the two are compared. With ray,
run it in a network namespace with loopback alone; the command makes one where it may.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.alone import be_alone
from sequencematch.training import SequenceMatchConfig, SequenceMatchTrainer
from tests.training.rollout_runs import Outcome, outcome, pool_of

MODEL = "sequencematch/arithmetic-base"
STEPS = 100_000


def rows() -> list[dict[str, str]]:
    """Sums of two numbers up to 99."""
    pairs = [(a, b) for a in range(10, 100, 7) for b in range(10, 100, 11)]
    return [{"prompt": f"In base 10, what is {a} + {b}? Solution:", "completion": f" {a + b}"} for a, b in pairs]


class Until(TrainerCallback):
    """Ends a run after so many seconds, or after so many steps, and keeps what its pool has counted."""

    def __init__(self, trainer: SequenceMatchTrainer, seconds: float, steps: int) -> None:
        self.trainer, self.end, self.steps = trainer, time.monotonic() + seconds, steps
        self.counted: dict[str, Any] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        pool = pool_of(self.trainer)
        if time.monotonic() > self.end or state.global_step == self.steps:
            control.should_training_stop = True
            pool.tend()
            self.counted = {**vars(pool.counts), "reported": pool.reported, "waiting": pool.depth}


def kill(pool: Any, every_s: float, over: threading.Event, done: list[int]) -> None:
    """Send signals until it is over. A worker that is stopped already is left alone."""
    chance = random.Random(0)
    stopped: set[int] = set()
    while not over.wait(every_s):
        alive = [process for process in pool().alive if process not in stopped]
        if alive:
            number = signal.SIGSTOP if len(done) % 4 == 3 else signal.SIGKILL
            process = chance.choice(alive)
            stopped |= {process} if number == signal.SIGSTOP else set()
            os.kill(process, number)
            done.append(number)


def train(place: str, seconds: float, steps: int, every_s: float) -> tuple[Outcome, dict[str, Any], int, list[int]]:
    """A run with faults every `every_s` seconds, or without if that is 0."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        args = SequenceMatchConfig(
            folder,
            rollouts=place,
            rollout_workers=2,
            rollout_timeout_s=10,
            max_steps=STEPS,
            per_device_train_batch_size=16,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            bc_steps=0,
            bc_anneal_steps=0,
            generation_batch_size=64,
            replay_reuse=2,
            max_completion_length=24,
            max_length=96,
            save_strategy="no",
            logging_steps=1000,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = SequenceMatchTrainer(MODEL, args, rows())
        until = Until(trainer, seconds, steps)
        trainer.add_callback(until)
        over, done = threading.Event(), list[int]()
        source: Any = trainer.on_policy.source
        killer = threading.Thread(target=kill, args=(lambda: source.pool, every_s, over, done), daemon=True)

        class Begin(TrainerCallback):
            """The pool is there when training begins."""

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                if every_s:
                    killer.start()

        trainer.add_callback(Begin())
        trainer.train()
        over.set()
        return outcome(trainer), until.counted, trainer.state.global_step, done


def main() -> int:
    """Train with faults and without, and say whether all is well."""
    parser = argparse.ArgumentParser(prog="python -m tests.training.rollout_kills", description=__doc__)
    parser.add_argument("--rollouts", default="process", help="process or ray")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two faults")
    args = parser.parse_args()
    if args.rollouts == "ray":
        be_alone("tests.training.rollout_kills", sys.argv[1:])
    disturbed, counted, steps, signals = train(args.rollouts, args.seconds, 0, args.every)
    killed, stopped = signals.count(signal.SIGKILL), signals.count(signal.SIGSTOP)
    print(f"{steps} steps, {killed} workers killed, {stopped} stopped; {counted}", flush=True)
    expected, plain, _, _ = train(args.rollouts, float("inf"), steps, 0)
    print(f"without faults: {plain}", flush=True)
    is_same = disturbed.equals(expected)
    is_counted = counted["received"] == counted["reported"] and not counted["duplicates"]
    print(f"equal bit for bit: {is_same}; received = reported, no duplicate: {is_counted}")
    return 0 if is_same and is_counted and killed else 1


if __name__ == "__main__":
    sys.exit(main())
