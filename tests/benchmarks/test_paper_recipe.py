"""The paper's recipe computes what ours computes, only slower: losses, gradients, and what sampling sees."""

import pytest
import torch
from torch import Tensor

from benchmarks import paper_recipe
from benchmarks.workloads import Workload, prompted, space_of, text
from sequencematch.core.encoding import encode
from sequencematch.core.objectives import sequencematch_loss
from sequencematch.policy import Policy
from tests.benchmarks.known import policy

SPACE = space_of(64)
WORKLOADS = {
    "rollouts of 32 nodes": text(SPACE, batch=3, context=32, nodes=32),
    "rollouts of 20 nodes and noise": text(SPACE, batch=3, context=32, nodes=20, noise=0.2),
    "shared prompts": prompted(SPACE, batch=4, prompt=12, completion=6),
}


def gradients(policy: Policy, loss: Tensor) -> dict[str, Tensor]:
    policy.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("work", WORKLOADS.values(), ids=list(WORKLOADS))
def test_losses_and_gradients_are_those_of_alive_intervals(work: Workload) -> None:
    ours = policy()
    scores = ours(work.encode(16))
    count = len(work.data)
    expected = sequencematch_loss(scores[:count], scores[count:], alpha=0.1, gamma=0.9).loss
    found = paper_recipe.loss(ours, work.data, work.rollouts, 48, alpha=0.1, gamma=0.9)
    # float32 rounding over sums of a few hundred terms
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected_gradients, found_gradients = gradients(ours, expected), gradients(ours, found)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-5 * max(scale, 1e-3), msg=name)


def test_padding_to_a_longer_context_changes_nothing() -> None:
    work = WORKLOADS["shared prompts"]
    short, long = (paper_recipe.loss(policy(), work.data, work.rollouts, n, alpha=0.1, gamma=0.9) for n in (1, 100))
    torch.testing.assert_close(short, long, rtol=1e-5, atol=1e-6)


def test_sampling_sees_the_logits_of_the_state_it_is_in() -> None:
    ours = policy().eval()
    generator = torch.Generator().manual_seed(0)
    seen: list[Tensor] = []

    def choose(logits: Tensor) -> Tensor:
        seen.append(logits)
        tokens = torch.randint(3, 64, (len(logits),), generator=generator)
        return tokens.masked_fill(torch.rand(len(logits), generator=generator) < 0.4, ours.space.bkspc)

    prompts = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    trajectories = paper_recipe.sample(ours, prompts, 24, choose)
    assert sum(t.chosen.count(ours.space.bkspc) for t in trajectories) > 20
    assert any(len(state.tokens) < 3 for t in trajectories for state in t.states())  # into the prompt
    encoding = encode(trajectories)
    hidden = ours.encoded_hidden_states(encoding, encoding.visit[:, :-1])
    torch.testing.assert_close(torch.stack(seen, 1), ours.action_logits(hidden).detach(), rtol=1e-4, atol=1e-5)


def test_sampling_ends_a_row_at_eos_and_all_when_every_row_has_ended() -> None:
    ours, eos = policy().eval(), 2
    chosen = iter([[7, eos], [8, 9], [eos, 9], [9, 9]])
    first, second = paper_recipe.sample(ours, [[5], [6]], 9, lambda _: torch.tensor(next(chosen)))
    assert (first.chosen, second.chosen) == ((7, 8, eos), (eos,))
    assert next(chosen) == [9, 9]
