"""The offset head's own learning rate and gradient norm: its groups, its effect, and what is refused."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from sequencematch.training import SequenceMatchTrainer
from sequencematch.training.callbacks import NonFiniteError
from sequencematch.training.optimizer import clip, partition, split_off
from tests.training.tiny_run import config, policy, rows, trainer


def small() -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    first, second, third = (nn.Parameter(torch.tensor([value])) for value in (1.0, 2.0, 3.0))
    return first, second, third


def test_each_group_is_split_and_keeps_its_options() -> None:
    """SGD with learning rate 0.1, ten times that for b and c; gradients of 1: 1 − 0.1, 2 − 1 and 3 − 1."""
    a, b, c = small()
    optimizer = torch.optim.SGD([{"params": [a, b], "weight_decay": 0.0}, {"params": [c], "momentum": 0.5}], lr=0.1)
    split_off(optimizer, [b, c], 10.0)
    found = [(group["params"], group["lr"], group["momentum"]) for group in optimizer.param_groups]
    assert [(len(params), lr, momentum) for params, lr, momentum in found] == [
        (1, 0.1, 0),
        (0, 0.1, 0.5),
        (1, 1.0, 0),
        (1, 1.0, 0.5),
    ]
    for parameter in (a, b, c):
        parameter.grad = torch.ones(1)
    optimizer.step()
    assert [p.item() for p in (a, b, c)] == pytest.approx([0.9, 1.0, 2.0])


def test_tensors_are_told_apart_by_identity_and_not_by_value() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    own, rest = partition([a, b], [b])
    assert (own[0] is b, rest[0] is a, len(own), len(rest)) == (True, True, 1, 1)


def test_a_norm_above_the_limit_is_scaled_to_it() -> None:
    """Gradients 3 and 4 have the norm 5; at most 1 leaves 0.6 and 0.8, up to the 1e-6 that torch adds to the norm."""
    a, b, _ = small()
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip([a, b], math.inf).item() == 5
    assert (a.grad.item(), b.grad.item()) == (3, 4)
    assert clip([a, b], 1.0).item() == 5
    assert (a.grad.item(), b.grad.item()) == pytest.approx((0.6, 0.8), rel=1e-6)


def names_of(run: SequenceMatchTrainer) -> list[tuple[float, set[str]]]:
    """Every group of a run's optimizer: its learning rate at the start, and the names of its parameters."""
    known = {id(p): name for name, p in run.model.named_parameters()}
    groups = run.create_optimizer().param_groups
    return [(group["lr"], {known[id(p)] for p in group["params"]}) for group in groups]


HEAD = {f"backspace.offset_{layer}.{kind}" for layer in ("in", "out") for kind in ("weight", "bias")}


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")])
def test_the_offset_head_has_groups_of_its_own_unless_its_learning_rate_is_that_of_all(
    lora: Any, tmp_path: Path
) -> None:
    def run(multiplier: float) -> SequenceMatchTrainer:
        args = config(tmp_path, learning_rate=1e-3, offset_lr_multiplier=multiplier)
        return SequenceMatchTrainer(policy(), args, rows(), peft_config=lora)

    plain, apart = names_of(run(1.0)), names_of(run(50.0))
    assert [lr for lr, _ in plain] == [1e-3, 1e-3]
    assert [lr for lr, _ in apart] == pytest.approx([1e-3, 1e-3, 5e-2, 5e-2])
    assert [names for _, names in apart[:2]] == [names - HEAD for _, names in plain]
    assert apart[2][1] | apart[3][1] == HEAD
    assert any("lora_" in name for name in apart[0][1]) == (lora is not None)


def moved(folder: Path, multiplier: float, **changes: Any) -> dict[str, Tensor]:
    """How far one step of SGD moves each parameter."""
    learner = policy()
    with torch.no_grad():
        learner.backspace.offset_out.weight.fill_(0.1)  # so that the head's first layer has a gradient, too
    before = {name: p.detach().clone() for name, p in learner.named_parameters()}
    settings = {"max_steps": 1, "optim": "sgd", "learning_rate": 1e-2, "lr_scheduler_type": "constant", "alpha": 0.3}
    trainer(folder, learner, offset_lr_multiplier=multiplier, **(settings | changes)).train()
    return {name: p.detach() - before[name] for name, p in learner.named_parameters()}


def test_the_offset_head_moves_so_many_times_as_far_and_nothing_else_does(tmp_path: Path) -> None:
    """Without clipping a step of SGD is the learning rate times the gradient. Tolerance: float32 rounding of p + Δp."""
    once, times = (moved(tmp_path / str(m), m, max_grad_norm=0.0) for m in (1.0, 8.0))
    for name in once:
        torch.testing.assert_close(times[name], (8 if name in HEAD else 1) * once[name], rtol=1e-3, atol=1e-7)
    assert all(float(once[name].norm()) > 1e-6 for name in HEAD)


def test_each_gradient_is_clipped_by_its_own_norm(tmp_path: Path) -> None:
    """A multiplier of almost 1 moves both as far as the limit allows: 0.01 · 0.001. Clipped together they share that."""
    for multiplier, apart in ((1.0, False), (1 + 1e-6, True)):
        found = moved(tmp_path / str(multiplier), multiplier, max_grad_norm=1e-3, learning_rate=1.0)
        head = math.hypot(*(float(found[name].norm()) for name in HEAD))
        rest = math.hypot(*(float(tensor.norm()) for name, tensor in found.items() if name not in HEAD))
        assert math.hypot(head, rest) == pytest.approx(1e-3 * (math.sqrt(2) if apart else 1), rel=1e-2)
        assert (head == pytest.approx(1e-3, rel=1e-2)) == apart


def test_both_norms_are_logged_and_a_scheduler_moves_both_learning_rates(tmp_path: Path) -> None:
    for limit in (0.0, 1e-3):  # the norms are those before clipping
        run = trainer(tmp_path / str(limit), offset_lr_multiplier=4.0, max_grad_norm=limit, warmup_steps=2)
        run.train()
        lines = [line for line in run.state.log_history if "loss" in line]
        assert all(line["grad_norm"] > 1e-3 for line in lines)
        assert all(line["grad_norm/offset"] > 1e-3 for line in lines)
        whole = trainer(tmp_path / f"{limit}-whole", max_grad_norm=limit, warmup_steps=2)
        whole.train()
        first = whole.state.log_history[0]["grad_norm"]
        assert first == pytest.approx(math.hypot(lines[0]["grad_norm"], lines[0]["grad_norm/offset"]), rel=1e-5)
        assert "grad_norm/offset" not in whole.state.log_history[0]
    rates = [group["lr"] for group in run.optimizer.param_groups]
    assert rates[2:] == pytest.approx([4 * rate for rate in rates[:2]])


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_run_stops_at_a_gradient_of_the_offset_head_that_is_not_finite(tmp_path: Path, limit: float) -> None:
    learner = policy()
    run = trainer(tmp_path, learner, offset_lr_multiplier=2.0, max_grad_norm=limit)
    learner.backspace.offset_out.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match="step 1"):
        run.train()
    assert all(bool(parameter.isfinite().all()) for parameter in learner.parameters())


def test_a_learning_rate_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    learner = policy()
    given = torch.optim.SGD(learner.parameters(), lr=1e-3)
    with pytest.raises(
        ValueError,
        match=re.escape(
            "`offset_lr_multiplier` would be ignored: `optimizers` brings its own learning rates. Got 2.0;"
        ),
    ):
        SequenceMatchTrainer(learner, config(tmp_path, offset_lr_multiplier=2.0), rows(), optimizers=(given, None))
    SequenceMatchTrainer(learner, config(tmp_path), rows(), optimizers=(given, None))
    for objective in ("bc", "mle"):
        with pytest.raises(
            ValueError, match=f"`offset_lr_multiplier` would be ignored: the loss of objective '{objective}' does not"
        ):
            config(tmp_path, objective=objective, offset_lr_multiplier=2.0)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"`offset_lr_multiplier` must be positive and finite: .* Got "):
            config(tmp_path, offset_lr_multiplier=wrong)
