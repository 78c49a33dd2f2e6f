"""However a step's examples are spread over batches and processes, the loss and the update are the same.

Two processes, started by `accelerate launch`, run on the CPU over gloo: replicated by DDP, and sharded by FSDP2. (Given an FSDP
configuration, `accelerate launch` silently runs DDP on a CPU.)
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sequencematch.core.integral_metrics import INTEGRAL_METRICS
from sequencematch.policy import Policy
from sequencematch.training import SequenceMatchTrainer
from tests import programs
from tests.training.distributed_run import CASES, HOW, MAIN, RUNS, STEPS, WORDS, Result, policy, run, run_name

ROOT = Path(__file__).parents[2]
#: How far two runs may be apart, in units of their dtype's rounding: a step's loss is a sum of about a hundred terms in
#: another order, and weights are of order one, rounded at every step. Seen were at most 3 and 2.
LOSS_EPS, WEIGHT_EPS = 8, 8
#: Gradients after the first step are taken at weights that differ in their last digit already. Seen were at most 26.
NORM_EPS = 128
# With --cpu accelerate leaves it to MPI to start processes, and so starts one; --multi_gpu is torchrun.
LAUNCHER = (
    "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 --mixed_precision no "
    "--dynamo_backend no --no_python"
)

Reference = Callable[..., Result]


@dataclass(frozen=True)
class Launched:
    """What two processes found, and where they saved it."""

    how: str
    folder: Path
    results: dict[str, Result]
    refusal: str
    said: list[list[str]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Runs in this process, each once."""

    @cache
    def remembered(case: str, layout: tuple[int, int] = (8, 1), **changes: Any) -> Result:
        return run(tmp_path_factory.mktemp("alone"), case, layout, **changes)

    return remembered


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Launched]:
    """All cases in two processes, started once; a process that waits for the other gives up after half an hour."""
    folder = tmp_path_factory.mktemp("launched")
    program = [sys.executable, "-S", programs.__file__, "-m", "tests.training.distributed_run", str(folder)]
    done = programs.run("-m", *LAUNCHER.split(), *program, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]
    found = torch.load(folder / "found.pt", weights_only=True)
    results = {how: {name: Result(**values) for name, values in found[how]["results"].items()} for how in HOW}
    return {how: Launched(how, folder / how, results[how], found[how]["refusal"], found[how]["said"]) for how in HOW}


@pytest.fixture(scope="module", params=HOW)
def launched(request: pytest.FixtureRequest, both: Mapping[str, Launched]) -> Launched:
    return both[request.param]


def check_same(result: Result, expected: Result) -> None:
    """Equal losses and gradient norms at every step, equal rollouts, and in the end equal weights, up to rounding."""
    eps = torch.finfo(torch.float32).eps
    assert result.rollouts == expected.rollouts
    assert result.losses == pytest.approx(expected.losses, rel=LOSS_EPS * eps)
    assert result.grad_norms == pytest.approx(expected.grad_norms, rel=NORM_EPS * eps)
    assert result.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        difference = (result.weights[name] - weight).abs().max()
        assert difference <= WEIGHT_EPS * torch.finfo(weight.dtype).eps, name


def update(result: Result, case: str) -> torch.Tensor:
    before = policy(CASES[case]).state_dict()
    return torch.cat([(after - before[name]).flatten() for name, after in result.weights.items()])


def test_the_runs_that_are_compared_delete_end_early_and_change_the_weights(alone: Reference) -> None:
    result = alone("sequencematch")
    space = policy(CASES["sequencematch"]).space
    assert len(result.losses) == STEPS
    assert len({len(prompt) for prompt, _ in result.rollouts}) > 1
    assert len({len(actions) for _, actions in result.rollouts}) > 2
    assert any(space.bkspc in actions for _, actions in result.rollouts)
    assert update(result, "sequencematch").abs().max() > 1e-3
    assert result.losses != pytest.approx(alone("bc").losses, rel=1e-3)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, id=run_name(case, layout))
        for case in CASES
        for layout in [(1, 8), (2, 4)]
        if layout == (2, 4) or case in MAIN
    ],
)
def test_accumulated_small_batches_give_the_update_of_one_large_batch(
    alone: Reference, case: str, layout: tuple[int, int]
) -> None:
    check_same(alone(case, layout), alone(case))


def test_the_last_step_of_an_epoch_may_have_fewer_batches(alone: Reference) -> None:
    check_same(alone("sequencematch", (2, 4), words=WORDS[:12]), alone("sequencematch", words=WORDS[:12]))


@pytest.mark.parametrize("objective", ["sequencematch", "bc", "mle"])
def test_packing_changes_no_update(alone: Reference, objective: str) -> None:
    check_same(alone(f"{objective}, packed"), alone(objective))


def test_dividing_each_batch_by_its_own_count_gives_another_update(alone: Reference) -> None:
    class OwnCounts(SequenceMatchTrainer):
        """A mean of means: the average over batches of each batch's loss per decision."""

        def get_batch_samples(self, *arguments: Any) -> Any:
            batches, num_items = super().get_batch_samples(*arguments)
            parts = [part for batch in batches for part in batch["parts"]]
            assert len(parts) == len(batches)
            counts = [int(part.encoding.length[: part.num_data].sum()) for part in parts]
            own = [replace(part, num_items=n * len(parts)) for part, n in zip(parts, counts, strict=True)]
            assert sum(counts) == num_items
            return [{"parts": [part]} for part in own], num_items

    with pytest.raises(AssertionError):
        check_same(alone("bc", (2, 4), trainer_class=OwnCounts), alone("bc"))
    wrong, right = (update(result, "bc") for result in (alone("bc", (2, 4), trainer_class=OwnCounts), alone("bc")))
    assert (wrong - right).norm() > 0.01 * right.norm()
    check_same(alone("bc", (8, 1), trainer_class=OwnCounts), alone("bc"))


@pytest.mark.parametrize(
    ("how", "case", "layout"),
    [pytest.param(how, *each, id=f"{how}, {run_name(*each)}") for how in HOW for each in RUNS[how]],
)
def test_two_processes_give_the_losses_and_the_weights_of_one(
    both: Mapping[str, Launched], alone: Reference, how: str, case: str, layout: tuple[int, int]
) -> None:
    check_same(both[how].results[run_name(case, layout)], alone(case))


@pytest.mark.parametrize("metric", INTEGRAL_METRICS)
def test_an_integral_metric_trains_sharded_weights_as_replicated_ones(
    both: Mapping[str, Launched], alone: Reference, metric: str
) -> None:
    """Its points are drawn by each process for itself, so one process alone would see others."""
    replicated, sharded = (both[how].results[metric] for how in HOW)
    check_same(sharded, replicated)
    assert replicated.losses != pytest.approx(alone("sequencematch").losses, rel=1e-3)


def test_models_are_spread_over_two_processes_as_they_are_said_to_be(launched: Launched) -> None:
    is_sharded = launched.how == "fsdp"
    for result in launched.results.values():
        assert result.processes == 2
        assert result.is_sharded == is_sharded
        assert result.wrapper == ("FSDPPolicy" if is_sharded else "DistributedDataParallel")


def test_without_the_factor_for_processes_the_update_is_half(launched: Launched, alone: Reference) -> None:
    halved, whole = update(launched.results["without the factor"], "bc"), update(alone("bc", max_steps=1), "bc")
    torch.testing.assert_close(2 * halved, whole, rtol=0, atol=WEIGHT_EPS * torch.finfo(torch.float32).eps)
    assert whole.abs().max() > 1e-3


def test_a_policy_trained_in_two_processes_is_saved_whole(launched: Launched) -> None:
    for name, folder in {"sequencematch, 2x2": "run", "weights tied, saved, 2x2": f"run/checkpoint-{STEPS}"}.items():
        loaded = Policy.from_pretrained(launched.folder / name / folder).state_dict()
        expected = launched.results[name].weights
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[key], weight) for key, weight in expected.items())


@pytest.mark.parametrize("launched", ["fsdp"], indirect=True)
def test_a_sharded_policy_has_to_be_gathered_to_be_rolled_out(launched: Launched) -> None:
    assert "got mixed torch.Tensor and DTensor" in launched.refusal


@pytest.mark.parametrize("launched", ["ddp"], indirect=True)
def test_all_processes_stop_after_the_same_step_and_raise_what_the_first_one_refuses(launched: Launched) -> None:
    first, second = launched.said
    assert first == second
    stopped, refused = first
    assert stopped.startswith("Stopped after step 2, because SIGTERM came. The last checkpoint is ")
    assert refused.startswith("`resume_from_checkpoint` needs a complete checkpoint in ")
