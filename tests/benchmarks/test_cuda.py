"""On a GPU: a whole step as it is measured and trained, with adapters, autocast and recomputed activations."""

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import Shape, build
from benchmarks.step import our_step
from benchmarks.workloads import text
from sequencematch.policy import Policy
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX
from sequencematch.policy.modes import compile_layers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_compiled_step_has_the_gradients_of_one_that_is_not() -> None:
    """In rows whose survivors come first: that attention, compiled too, gave other gradients, or infinite ones."""
    policy = Policy.from_pretrained(build(Shape("small", 256, 688, 2, 4, 4, 1000, 4096), "cuda", is_lora=True))
    policy.train()
    assert policy.base.config._attn_implementation == CAUSAL_PREFIX
    work = text(policy.space, 8, 1024, 1024)

    def gradients(*, is_compiled: bool = False) -> Tensor:
        policy.zero_grad()
        our_step(policy, work, lambda: None, is_compiled=is_compiled)()
        return torch.cat([p.grad.float().flatten() for p in policy.parameters() if p.grad is not None])

    plain = gradients()
    compile_layers(policy)
    error = float((gradients(is_compiled=True) - plain).norm() / plain.norm())
    print(f"relative difference {error:.1e}")
    assert 0 < error < 0.05
