"""A step of SequenceMatch, with rollouts made inline and by a worker process, over an equally lean step of MLE; and weight sync.

python -m benchmarks.rollouts step --device cuda --shape Llama-2-7b --layers 8 --lora --compile --out results/rollouts/step.json
python -m benchmarks.rollouts sync --device cuda --shape Llama-2-7b --out results/rollouts/sync.json

`step` trains until the second generation batch is used up, and times the steps that use it: as in a long run, the worker makes the
third batch meanwhile. Variants take turns, each with a new trainer on the same policy; MLE is trained twice as an A/A control, for
a few steps each, since all its steps are alike. Rows are plain
text as long as the context, and rollouts are as long as rows, up to the few that end by themselves: the mean length is written
down. The worker is on the same device as training. `sync` times a publication of all weights and of LoRA's alone: into memory that
processes share, and from there into a copy of the policy.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from benchmarks.shapes import CPU_LLAMA, FIRST, LLAMA_2_7B, SMALL, SMOLLM2_135M, TINY, Shape, build
from benchmarks.timing import measured, paired, write_json
from sequencematch.policy import Policy
from sequencematch.training import SequenceMatchConfig, SequenceMatchTrainer
from sequencematch.training.callbacks import ProgressLines, RolloutWarnings
from sequencematch.training.rollouts.copies import take_apart
from sequencematch.training.rollouts.processes import ProcessEngine
from sequencematch.training.rollouts.weights import pack, unpack

SHAPES: Mapping[str, Shape] = {s.name: s for s in (LLAMA_2_7B, SMOLLM2_135M, CPU_LLAMA, SMALL, TINY)}
MLE, CONTROL, INLINE, WORKER = "MLE", "MLE again", "SequenceMatch, inline", "SequenceMatch, worker process"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    MLE: {"objective": "mle"},
    INLINE: {},
    CONTROL: {"objective": "mle"},
    WORKER: {"rollouts": "process"},
}
#: Steps of MLE that are timed.
MLE_STEPS = 16
#: Logged numbers that are kept of the timed part.
KEPT = (
    "completions/mean_length",
    "rollouts/seconds",
    "rollouts/wait_share",
    "rollouts/sync_seconds",
    "rollouts/staleness",
    "rollouts/per_second",
    "rollouts/dropped_stale",
)


class StopAfterTwoLines(TrainerCallback):
    """Ends training at the second line of the log, while a worker is at work on a third batch."""

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the lines that have a loss."""
        del args
        control.should_training_stop = sum("loss" in line for line in state.log_history) >= 2


def _shape(options: argparse.Namespace) -> Shape:
    shape = SHAPES[options.shape]
    return shape if options.layers is None else replace(shape, layers=options.layers)


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def free(device: str) -> None:
    """Give memory back that is no longer used."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def config(options: argparse.Namespace, folder: str, own: Mapping[str, Any], steps: int) -> SequenceMatchConfig:
    """Past cloning, with a line of the log for each generation batch, and a learning rate that changes nothing that is seen."""
    cloning: dict[str, Any] = {} if own.get("objective") == "mle" else {"bc_steps": 0, "bc_anneal_steps": 0}
    return SequenceMatchConfig(
        folder,
        max_steps=3 * steps,
        logging_steps=steps,
        per_device_train_batch_size=options.batch,
        max_length=options.context,
        learning_rate=1e-9,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not options.device.startswith("cuda"),
        bf16=options.device.startswith("cuda"),
        gradient_checkpointing=options.lora,
        compile_layers=options.compile,
        noise_rate=0.0,
        generation_batch_size=options.generation_batch,
        replay_size=max(1000, options.generation_batch),
        replay_reuse=options.reuse,
        max_prompt_length=1,
        max_completion_length=options.context - 2,
        **cloning,
        **own,
    )


def line_of(options: argparse.Namespace, policy: Policy, rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """The log line of the second generation batch of a run."""
    steps = max(1, round(options.generation_batch * options.reuse / options.batch))
    if VARIANTS[name].get("objective") == "mle":
        steps = min(steps, MLE_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SequenceMatchTrainer(policy, config(options, folder, VARIANTS[name], steps), rows)
        for callback in (ProgressLines, RolloutWarnings):
            trainer.remove_callback(callback)
        trainer.add_callback(StopAfterTwoLines())
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {"step_seconds": lines[1]["step_seconds"], **{key: lines[1][key] for key in KEPT if key in lines[1]}}


def step(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of each variant, as ratios within a round."""
    shape = _shape(options)
    policy = Policy.from_pretrained(build(shape, options.device, is_lora=options.lora))
    tokens = torch.randint(FIRST, shape.vocab, (64, options.context - 2), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row} for row in tokens.tolist()]
    names = [name for name in VARIANTS if not (options.without_inline and name in (INLINE, CONTROL))]
    lines: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            lines[name].append(line_of(options, policy, rows, name))
            free(options.device)
            print(f"round {number + 1} of {options.rounds}: {name} {lines[name][-1]}", flush=True)
    seconds = {name: [line["step_seconds"] for line in of] for name, of in lines.items()}
    ratios = {name: measured("rollouts", name, paired(seconds, name, MLE)) for name in names if name != MLE}
    return {
        "floor": 2.0,
        "ratios": {name: {"median": m.value, "middle": m.middle} for name, m in ratios.items()},
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "lines": lines,
    }


def sync(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to publish weights, and to take them, for all weights and for LoRA's alone."""
    found = {}
    for name, is_lora in (("full", False), ("lora", True)):
        policy = Policy.from_pretrained(build(_shape(options), options.device, is_lora=is_lora))
        blueprint, trained, _ = take_apart(policy)
        empty = [torch.empty_like(tensor) for tensor in trained]
        engine, published, taken = ProcessEngine(), [], []
        for _ in range(options.rounds + 1):
            block = engine.block(blueprint.trained.size)
            synchronize(options.device)
            times = [time.perf_counter()]
            pack(trained, blueprint.trained, block)
            times.append(time.perf_counter())
            unpack(block, blueprint.trained, empty)
            synchronize(options.device)
            times.append(time.perf_counter())
            engine.publish(block)
            published.append(times[1] - times[0])
            taken.append(times[2] - times[1])
        assert all(torch.equal(a, b) for a, b in zip(trained, empty, strict=True))
        engine.stop()
        found[name] = {
            "bytes": blueprint.trained.size,
            "first_publish_seconds": published[0],
            "publish_seconds": statistics.median(published[1:]),
            "take_seconds": statistics.median(taken[1:]),
        }
        print(name, found[name], flush=True)
        del policy, trained, empty, block
        free(options.device)
    return found


def main() -> int:
    """Measure, print a line for each number, and write all down."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollouts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("step", "sync"))
    parser.add_argument("--device", default="cpu", help="cpu, on one thread, or cuda")
    parser.add_argument("--shape", choices=SHAPES, default=TINY.name)
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    parser.add_argument("--context", type=int, default=None, help="tokens of a row. Default: 1024 on a GPU, else 64")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument(
        "--generation-batch", type=int, default=None, help="rollouts at a time. Default: 64 on a GPU, else 16"
    )
    parser.add_argument("--reuse", type=float, default=8.0, help="draws of each rollout")
    parser.add_argument("--lora", action="store_true", help="LoRA on all layers, activations checkpointed")
    parser.add_argument("--compile", action="store_true", help="compile_layers for all variants")
    parser.add_argument("--without-inline", action="store_true", help="MLE and the worker alone, without the control")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="where the numbers go")
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda")
    options.context = options.context or (1024 if on_gpu else 64)
    options.generation_batch = options.generation_batch or (64 if on_gpu else 16)
    if not on_gpu:
        torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    result = {"step": step, "sync": sync}[options.what](options)
    if options.what == "step":
        print({name: round(ratio["median"], 3) for name, ratio in result["ratios"].items()})
    write_json(options.out, {"settings": {k: str(v) for k, v in vars(options).items()}, **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
