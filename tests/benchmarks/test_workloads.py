"""Workloads have the nodes that the ratios are about."""

import pytest
import torch

from benchmarks.shapes import CPU, H200, QUICK, TINY, Scale, build
from benchmarks.workloads import of_step, prompted, space_of, text

SPACE = space_of(64)


def test_data_and_rollouts_of_equal_length_are_twice_the_nodes_of_maximum_likelihood() -> None:
    work = text(SPACE, batch=3, context=32, nodes=32)
    assert work.clean.shape == (3, 32)
    assert [t.num_nodes for t in work.trajectories] == [32] * 6
    assert work.encode(512).tokens.numel() == 6 * 32


def test_a_short_rollout_shares_a_row_with_data_and_nothing_is_padded() -> None:
    work = text(SPACE, batch=3, context=32, nodes=24)
    assert work.encode(512).tokens.shape == (3, 56)


def test_noise_is_cut_to_the_context_and_deletes() -> None:
    work = text(SPACE, batch=8, context=32, nodes=None, noise=0.2)
    assert max(t.num_nodes for t in work.data) <= 32
    assert sum(t.executed.count(SPACE.bkspc) for t in work.data) > 8
    assert not work.rollouts


def test_a_tenth_of_a_rollouts_actions_delete() -> None:
    work = text(SPACE, batch=50, context=100, nodes=100)
    actions = [action for t in work.rollouts for action in t.chosen]
    assert 0.08 < actions.count(SPACE.bkspc) / len(actions) < 0.12


def test_a_shared_prompt_is_laid_once() -> None:
    work = prompted(SPACE, batch=8, prompt=12, completion=4)
    assert work.clean.shape == (8, 16)
    assert work.encode(512).tokens.numel() <= 8 * (12 + 4 + 4 + 12)


@pytest.mark.parametrize("scale", [CPU, H200, QUICK], ids=["cpu", "h200", "quick"])
def test_the_floor_of_every_published_workload_is_below_its_target(scale: Scale) -> None:
    for name, bound in {"equal": 2.0, "short": 1.7, "shared": 1.3}.items():
        work = of_step(scale)[name]
        nodes = work.encode(scale.step.hidden).tokens.numel()
        assert nodes / work.clean.numel() <= bound, name


def test_a_model_is_built_in_its_dtype_and_leaves_the_default_alone() -> None:
    model = build(TINY, "cpu", is_lora=True)
    assert torch.get_default_dtype() == torch.float32
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert model.is_gradient_checkpointing
