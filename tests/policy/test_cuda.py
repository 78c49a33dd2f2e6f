"""On a GPU: FlexAttention, decoding, and the head, against the same thing done plainly."""

from typing import Any

import pytest
import torch

from sequencematch.core.encoding import encode
from sequencematch.core.mdp import Trajectory
from sequencematch.core.objectives import sequencematch_loss
from sequencematch.policy import Policy
from tests.policy.tiny_models import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def long_batch(policy: Policy) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in (400, 300, 350, 200):
        actions = torch.randint(2, policy.space.vocab_size, (length,), generator=generator)
        actions[torch.rand(length, generator=generator) < 0.2] = policy.space.bkspc
        made.append(Trajectory.rollout(policy.space, (5, 6, 7), (*actions.tolist(), policy.space.eos)))
    return made


def loss_and_gradients(name: str, implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
    model = tiny(name, **SIZES)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.06, generator=torch.Generator().manual_seed(parameter.numel()))
    model = model.to(device="cuda", dtype=dtype)
    model.set_attn_implementation(implementation)
    policy = Policy.from_pretrained(model)
    encoding = encode(long_batch(policy), row_length=768, device="cuda")
    scores = policy(encoding)
    loss = sequencematch_loss(scores[:2], scores[2:], alpha=0.1, gamma=0.99).loss
    parameters = list(policy.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [scores.value, torch.cat([g.float().flatten() for g in gradients if g is not None])]


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_flex_attention_errs_at_most_twice_as_much_as_dense_attention_in_bfloat16(name: str) -> None:
    exact = loss_and_gradients(name, "sdpa", torch.float32)
    dense = loss_and_gradients(name, "sdpa", torch.bfloat16)
    flex = loss_and_gradients(name, "flex_attention", torch.bfloat16)
    for part, truth, plain, ours in zip(("values", "gradients"), exact, dense, flex, strict=True):
        error, allowed = (float((x - truth).norm() / truth.norm()) for x in (ours, plain))
        print(f"{name} {part}: relative error {error:.2e} with FlexAttention, {allowed:.2e} dense")
        assert error <= 2 * allowed


def test_decoding_chooses_the_same_actions_as_on_the_cpu() -> None:
    """In float64, where rounding can't change a choice, also where scoring uses FlexAttention."""
    prompts = [[5, 6, 7], [8], [9, 10]] * 5
    options: dict[str, Any] = {"max_new_tokens": 24, "seed": 1, "backspace_bias": 5.0}
    cpu = Policy.from_pretrained(tiny("Llama").double()).generate(prompts, **options)
    gpu = Policy.from_pretrained(tiny("Llama").double(), device="cuda").generate(prompts, **options)
    assert [t.chosen for t in gpu.trajectories] == [t.chosen for t in cpu.trajectories]
    assert any(t.space.bkspc in t.chosen for t in gpu.trajectories)
