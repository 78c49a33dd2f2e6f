"""The cost model of `sequencematch plan` beside recorded measurements, as a Markdown table.

python -m benchmarks.plan_check
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sequencematch.training.planning import HARDWARE, SHAPES, Workload, plan
from sequencematch.training.planning.costs import generation_seconds, state_bytes, step_bytes, step_flops, step_seconds

RESULTS = Path(__file__).parents[1] / "results"
STEPS, LENGTHS = "bench/h200/step_decoding.json", "bench/h200/bench.json"
#: The steps of a run that is so small that starting kernels takes all its time.
SMALL_STEPS = 300


@dataclass(frozen=True)
class Check:
    """A number that the model predicts and a file records, in the same unit.

    `fitted` if a constant was chosen with the measurement in view. `tolerance` is how far off the ratio may be.
    """

    name: str
    unit: str
    predicted: float
    measured: float
    file: str
    fitted: bool = False
    tolerance: float = 0.12

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    def row(self) -> str:
        """A row of the Markdown table."""
        kind = "modelled, fitted" if self.fitted else "modelled"
        cells = (
            self.name,
            f"{self.predicted:.3g} {self.unit}",
            f"{self.measured:.3g} {self.unit}",
            f"{self.ratio:.2f}",
            kind,
            f"`{self.file}`",
        )
        return f"| {' | '.join(cells)} |"


def checks() -> Iterator[Check]:
    """All checks, on an H200: Llama-2-7b with LoRA of rank 64 and checkpointing, and SmolLM2-135M."""
    gpu, large, small = HARDWARE["H200"], SHAPES["Llama-2-7b"], SHAPES["SmolLM2-135M"]
    work = Workload(large, context=1024, prompt=64, completion=960, batch_size=8, rank=64)
    short, shared = replace(work, completion=576), replace(work, context=60, prompt=1, completion=15, batch_size=64)
    ms = _detail(STEPS, "A/A control: MLE / MLE")["ms"]
    compiled = _detail(STEPS, "SequenceMatch compiled / MLE, step alone, rollouts as long as the data")["ms"]
    yield Check(
        "7B, step, rollouts as long as the data", "s", step_seconds(work, 1, gpu), ms["equal"] / 1e3, STEPS, fitted=True
    )
    yield Check(
        "7B, step, rollouts of 640 nodes", "s", step_seconds(short, 1, gpu), ms["short"] / 1e3, STEPS, fitted=True
    )
    yield Check(
        "7B, step, shared prompts", "s", step_flops(shared) / gpu.train_flops, ms["shared"] / 1e3, STEPS, fitted=True
    )
    mle = step_seconds(replace(work, rollouts=False), 1, gpu)
    yield Check("7B, step of MLE, layers compiled", "s", mle, compiled["MLE, compiled"] / 1e3, STEPS)
    step = step_seconds(work, 1, gpu)
    yield Check(
        "7B, step over compiled MLE's", "×", step / mle, compiled["compiled"] / compiled["MLE, compiled"], STEPS
    )
    for kind, rank in (("full", None), ("lora", 16)):
        run = _read(f"h200/finetuning_{kind}.json")
        seconds = (run["seconds"] - run["seconds_in_rollouts"]) / SMALL_STEPS
        floor = step_seconds(Workload(small, 64, 32, 32, 32, rank=rank), 1, gpu)
        name, file = f"135M, {kind}, small steps of older code", f"h200/finetuning_{kind}.json"
        yield Check(name, "s", floor, seconds, file, fitted=rank is None, tolerance=0.3)
    equal = _detail(STEPS, "SequenceMatch / MLE, sampling amortised, rollouts as long as the data")
    inline = (ms["equal"] / 1e3 + equal["generation_s"] / 64) / (compiled["MLE, compiled"] / 1e3)
    yield Check("7B, the same with rollouts in turn", "×", plan(work, 1, gpu).inline.step_s / mle, inline, STEPS)
    lengths = _detail(LENGTHS, "A/A control: MLE / MLE at 512")["ms"]
    for length in (512, 2048, 8192):
        quarter = Workload(replace(large, layers=8), length, 1, length - 1, 8192 // length, rank=64)
        seconds = step_seconds(quarter, 1, gpu)
        yield Check(
            f"8 layers of 7B, step at length {length}",
            "s",
            seconds,
            lengths[f"ours, {length}"] / 1e3,
            LENGTHS,
            fitted=True,
        )
    held = _detail(STEPS, "peak memory, ours / MLE")
    beyond = _detail(STEPS, "peak memory beyond weights and optimizer, ours / MLE")
    measured_state = (held["equal"] - beyond["equal"]) / 1e9
    yield Check("7B, weights and optimizer", "GB", state_bytes(work, 1) / 1e9, measured_state, STEPS)
    yield Check("7B, peak of a step", "GB", step_bytes(work, 1, gpu) / 1e9, held["equal"] / 1e9, STEPS, fitted=True)
    read = 2 * (large.used_weights + 64 * (64 + 961 / 2) * large.cache_numbers) / 1e9
    measured_read = _detail(STEPS, "share of the memory-bandwidth roofline, batch 64")["gb_per_step"]
    yield Check("7B, bytes of a decoding step", "GB", read, measured_read, STEPS)
    yield Check(
        "7B, 64 rollouts of 960 tokens", "s", generation_seconds(work, gpu), equal["generation_s"], STEPS, fitted=True
    )
    rest = _detail(STEPS, "SequenceMatch / MLE, sampling amortised, rollouts of 640 nodes")["generation_s"]
    yield Check("7B, 64 rollouts of 576 tokens", "s", generation_seconds(short, gpu), rest, STEPS, fitted=True)
    few = _detail(STEPS, "SequenceMatch / MLE, sampling amortised, shared prompts, 45 of 60 tokens")["generation_s"]
    yield Check(
        "7B, 64 rollouts of 16 tokens",
        "s",
        generation_seconds(replace(work, prompt=45, completion=16), gpu),
        few,
        STEPS,
        fitted=True,
    )
    for name, file, shape in (("7B", "serving/engine_7b.json", large), ("135M", "serving/engine_135m.json", small)):
        made = Workload(shape, 1024, 32, 128, 64)
        rate = _read(file)["actions_per_s"]["Policy.generate"]
        yield Check(
            f"{name}, 64 rollouts of 128 tokens", "s", generation_seconds(made, gpu), 64 * 128 / rate, file, fitted=True
        )


def table() -> str:
    """All checks as Markdown."""
    head = "| what | predicted | measured | ratio | the prediction is | measured in `results/` |\n|---|---:|---:|---:|---|---|\n"
    return head + "\n".join(check.row() for check in checks())


def _read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text())


def _detail(file: str, name: str) -> Any:
    return next(row["detail"] for row in _read(file)["rows"] if row["name"] == name)


if __name__ == "__main__":
    print(table())
