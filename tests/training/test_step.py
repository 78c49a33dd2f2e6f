"""A step in several forward passes is the step in one: every trajectory once, gradients and losses summed."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from sequencematch.core.divergences import CHI2_MIXTURE
from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.policy import Policy
from sequencematch.training.losses import OBJECTIVES, Batch, Weights
from sequencematch.training.signals import Signals
from sequencematch.training.step import accumulate_gradients, encode_parts, node_budget, num_passes
from tests.policy.tiny_models import DECODED, llama
from tests.training.tiny_run import policy as tiny_policy

SPACE = ActionSpace(DECODED["vocab_size"], eos=2, bos=1)
#: <bos>, two tokens and <eos>: four nodes each.
DATA = [Trajectory.demonstration(SPACE, (1,), (5 + n, 6 + n)) for n in range(3)]
#: The same with a token that is deleted again: five nodes each.
ROLLOUTS = [Trajectory.rollout(SPACE, (1,), (7, 8 + n, SPACE.bkspc, 9, 2)) for n in range(3)]
WEIGHTS = Weights(CHI2_MIXTURE, alpha=0.1, gamma=0.9, bc_weight=0.3)


def test_a_pass_may_have_the_nodes_of_the_data_and_on_a_gpu_as_many_as_saturate_it() -> None:
    assert node_budget(100, "cpu") == 100
    assert [node_budget(nodes, "cuda") for nodes in (100, 10_000)] == [8192, 10_000]


@pytest.mark.parametrize(("budget", "count"), [(27, 1), (26, 2), (14, 2), (13, 3), (9, 3), (1, 3)])
def test_passes_are_as_many_as_fit_the_budget_but_each_has_data_and_rollouts(budget: int, count: int) -> None:
    assert sum(t.num_nodes for t in (*DATA, *ROLLOUTS)) == 3 * 4 + 3 * 5
    assert num_passes(DATA, ROLLOUTS, budget) == count
    assert num_passes(DATA, ROLLOUTS[:1], budget) == 1
    assert num_passes(DATA, [], budget) == min(3, -(-12 // budget))


def test_every_trajectory_is_in_one_part_with_the_denominators_of_the_step() -> None:
    first, second = encode_parts(DATA, ROLLOUTS, 2, 9, None)
    assert (first.num_data, len(first.encoding.length)) == (2, 4)
    assert (second.num_data, len(second.encoding.length)) == (1, 2)
    assert (first.num_items, first.model_weight, second.num_items, second.model_weight) == (9, 1.0, 9, 1.0)
    assert [part.model_weight for part in encode_parts(DATA, [], 2, 9, None)] == [None, None]
    seen = [part.encoding.tokens[row].tolist() for part in (first, second) for row in range(part.num_data)]
    assert sorted(tokens[:4] for tokens in seen) == [[1, 5, 6, 2], [1, 6, 7, 2], [1, 7, 8, 2]]


def loss_and_gradients(policy: Policy, data: list[Trajectory], count: int, hidden_size: int | None) -> list[Tensor]:
    policy.zero_grad()

    def forward_backward(part: Batch) -> Tensor:
        loss, _ = OBJECTIVES["sequencematch"].loss(policy, part, WEIGHTS)
        loss.backward()
        return loss.detach()

    parts = encode_parts(data, ROLLOUTS, count, sum(map(len, DATA)), hidden_size)
    loss = accumulate_gradients(policy, parts, forward_backward, [], is_autocast=False)
    return [loss, *(p.grad for p in policy.parameters() if p.grad is not None)]


@pytest.mark.parametrize("hidden_size", [None, 16], ids=["a row each", "packed"])
def test_losses_and_gradients_of_the_parts_add_up_to_those_of_one_pass(hidden_size: int | None) -> None:
    policy = tiny_policy(exact=True)
    whole = loss_and_gradients(policy, DATA, 1, hidden_size)
    for count in (2, 3):
        parts = loss_and_gradients(policy, DATA, count, hidden_size)
        torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)  # float64 rounding
    fewer = loss_and_gradients(policy, DATA[:2], 2, hidden_size)
    assert abs(float(fewer[0] - whole[0])) > 1e-3  # the control: without a trajectory it is another loss


def test_values_of_ends_are_averaged_over_right_and_over_wrong_rollouts() -> None:
    """Of three rollouts the first is right, the second unknown, the third wrong: in one pass or two, the same numbers."""
    policy = tiny_policy(exact=True)
    ends = [Trajectory.rollout(SPACE, (1,), (7 + n, 2)) for n in range(3)]
    final = policy(encode_parts(ends, [], 1, 9, None)[0].encoding).final_value.detach()
    assert len(set(final.tolist())) == 3
    for count in (1, 2):
        signals = Signals()
        for part in encode_parts(DATA, ends, count, 9, None, right=[True, None, False]):
            signals.add(OBJECTIVES["sequencematch"].loss(policy, part, WEIGHTS)[1])
        logged = signals.flush(lambda moments: moments)
        assert logged["values/rollouts/final"] == pytest.approx(float(final.mean()), rel=1e-6)
        assert logged["values/rollouts/final_right"] == pytest.approx(float(final[0]), rel=1e-6)
        assert logged["values/rollouts/final_wrong"] == pytest.approx(float(final[2]), rel=1e-6)
    (part,) = encode_parts(DATA, ends, 1, 9, None)
    signals.add(OBJECTIVES["sequencematch"].loss(policy, part, WEIGHTS)[1])
    assert not {name for name in signals.flush(lambda moments: moments) if "final_" in name}  # none is known


@pytest.mark.parametrize("is_autocast", [True, False])
def test_adapters_cast_no_inputs_under_autocast_and_do_again_after_an_error(is_autocast: bool) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    policy = Policy.from_pretrained(llama(), peft_config=lora)
    layers: list[Any] = [layer for layer in policy.modules() if hasattr(layer, "cast_input_dtype_enabled")]
    assert layers

    def fail(_: Batch) -> Tensor:
        assert all(layer.cast_input_dtype_enabled is not is_autocast for layer in layers)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        accumulate_gradients(policy, encode_parts(DATA, [], 1, 9, None), fail, [], is_autocast=is_autocast)
    assert all(layer.cast_input_dtype_enabled for layer in layers)
