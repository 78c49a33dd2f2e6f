"""On a GPU: a run as it is meant to be made, against the same run done plainly."""

import math
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from sequencematch.policy import Policy
from sequencematch.training import SequenceMatchTrainer
from tests.policy.test_cuda import divisions, replays
from tests.training.tiny_run import WORDS, config, policy

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("error:A decoding step of .* can't be captured"),
]
TEXTS = [" ".join(WORDS[n * m % len(WORDS)] for m in range(1, 200)) for n in range(1, 9)]
#: Prompts so long that rows with rollouts are divided, too.
ROWS = [{"prompt": text[: 520 + n], "completion": text[520 + n : 580 + 2 * n]} for n, text in enumerate(TEXTS)]
ROLLOUTS = 8
SETTINGS: dict[str, Any] = {
    "use_cpu": False,
    "max_steps": 5,
    "learning_rate": 1e-3,
    "max_length": 640,
    "max_completion_length": 16,
    "generation_batch_size": ROLLOUTS,
    "replay_reuse": 1.0,  # four are drawn a step, so they are made in the first, the third and the fifth
}
AS_MEANT: dict[str, Any] = {"bf16": True, "gradient_checkpointing": True}


def finished(folder: Path, **changes: Any) -> SequenceMatchTrainer:
    """A run of a model that starts on the CPU, with an adapter that isn't zero at first."""
    from peft import LoraConfig

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    learner = policy(initializer_range=0.05, max_position_embeddings=1024, **sizes)
    assert learner.device.type == "cpu"
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    args = config(folder, **SETTINGS, **changes)
    run = SequenceMatchTrainer(model=learner, args=args, train_dataset=ROWS, peft_config=lora)
    run.train()
    assert {parameter.device.type for parameter in run.model.parameters()} == {"cuda"}
    assert run.on_policy.buffer.made == 3 * ROLLOUTS
    entries = logged(run)
    assert len(entries) == 5
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in entries)
    return run


def logged(run: SequenceMatchTrainer) -> list[dict[str, float]]:
    return [entry for entry in run.state.log_history if "loss" in entry]


def assert_start_alike(ours: SequenceMatchTrainer, plain: SequenceMatchTrainer) -> None:
    """In the first step: rollouts until rounding decides, the loss to bfloat16's eight bits, its gradient's norm to fewer."""
    made, expected = (
        [rollout.trajectory.chosen for rollout in run.on_policy.buffer.rollouts[:ROLLOUTS]] for run in (ours, plain)
    )
    pairs = [zip(a, b, strict=False) for a, b in zip(made, expected, strict=True)]
    same = sum(1 for pair in pairs for _ in takewhile(lambda actions: actions[0] == actions[1], pair))
    shared = same / sum(map(len, expected))
    print(f"{shared:.0%} of the actions are the same")
    assert shared > 0.3  # without the adapter it would be 1%
    for name, rounding in (("loss", 2**-8), ("grad_norm", 0.03)):
        got, truth = logged(ours)[0][name], logged(plain)[0][name]
        print(f"{name} {got:.4f}, plainly {truth:.4f}")
        assert got == pytest.approx(truth, rel=rounding)


def test_a_run_as_it_is_meant_starts_like_one_in_float32_without_checkpoints_graphs_fusions_or_divided_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided, is_replayed = divisions(monkeypatch), replays(monkeypatch)
    ours = finished(tmp_path / "ours", **AS_MEANT)
    assert ours.model.base.is_gradient_checkpointing
    assert ours.fusions
    assert max(divided) >= 256
    assert len(is_replayed) >= 3
    assert all(is_replayed)
    monkeypatch.setattr("sequencematch.policy.generation.can_capture", lambda *_: False)
    monkeypatch.setattr("sequencematch.training.trainer.fusions", lambda _: [])
    monkeypatch.setattr(Policy, "reorders_from", 10**9)
    divided.clear()
    is_replayed.clear()
    plain = finished(tmp_path / "plain")
    assert max(divided, default=0) < 16  # of the probe of a policy
    assert not is_replayed
    assert_start_alike(ours, plain)


def test_a_run_with_compiled_layers_starts_like_one_without(tmp_path: Path) -> None:
    torch.compiler.reset()
    counters.clear()
    plain = finished(tmp_path / "plain", **AS_MEANT)
    assert counters["stats"]["unique_graphs"] == 0
    compiled = finished(tmp_path / "compiled", **AS_MEANT, compile_layers=True)
    assert counters["stats"]["unique_graphs"] > 0
    assert_start_alike(compiled, plain)
