"""The steps that are timed beside each other have the same gradients: those of Eq. 4, or of behavioural cloning."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.step import ALPHA, GAMMA, our_step, paper_step
from benchmarks.timing import Call
from benchmarks.workloads import space_of, text
from sequencematch.core.objectives import bc_loss, sequencematch_loss
from sequencematch.policy import Policy
from tests.benchmarks.known import policy


def gradients(ours: Policy, backward: Callable[[], object]) -> Tensor:
    ours.zero_grad()
    backward()
    return torch.cat([p.grad.flatten() for p in ours.parameters() if p.grad is not None])


def check(ours: Policy, step: Call, loss: Tensor) -> None:
    expected, found = gradients(ours, loss.backward), gradients(ours, step)
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < 1e-4  # float32 rounding of other sums


def test_our_step_and_the_papers_have_the_gradients_of_eq_4() -> None:
    ours, work = policy(), text(space_of(64), batch=3, context=32, nodes=24)
    assert len(work.parts(16, "cpu")) == 2
    scores = ours(work.encode(16))
    loss = sequencematch_loss(scores[:3], scores[3:], alpha=ALPHA, gamma=GAMMA).loss
    check(ours, our_step(ours, work, lambda: None), loss)
    scores = ours(work.encode(16))
    loss = sequencematch_loss(scores[:3], scores[3:], alpha=ALPHA, gamma=GAMMA).loss
    check(ours, paper_step(ours, work, 32, lambda: None), loss)


def test_a_step_without_rollouts_clones_behaviour() -> None:
    ours, work = policy(), text(space_of(64), batch=3, context=32, nodes=None, noise=0.2)
    check(ours, our_step(ours, work, lambda: None), bc_loss(ours(work.encode(16))))
