"""A row reordered with its causal prefix first: every node attends to the same nodes as before."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sequencematch.core.encoding import Encoding, Layout, attend, encode
from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.core.objectives import sequencematch_loss
from sequencematch.policy import Policy
from sequencematch.policy.causal_prefix import (
    CAUSAL_PREFIX,
    causal_prefix_attention,
    causal_prefix_order,
    reordered_mask,
)
from tests.policy.tiny_models import exact_llama, tiny

SPACE = ActionSpace(vocab_size=48, eos=1)


def rollout(length: int, backspaces: float, seed: int, prompt: tuple[int, ...] = (5, 6, 7)) -> Trajectory:
    generator = torch.Generator().manual_seed(seed)
    actions = torch.randint(2, 48, (length,), generator=generator)
    actions[torch.rand(length, generator=generator) < backspaces] = SPACE.bkspc
    return Trajectory.rollout(SPACE, prompt, (*actions.tolist(), 1))


def whole_mask(order: Tensor, length: int, deleted_at: Tensor) -> Tensor:
    """The mask of a reordered row, causal up to `length`."""
    rows, nodes = order.shape
    causal = torch.ones(length, nodes, dtype=torch.bool).tril().expand(rows, -1, -1)
    return torch.cat([causal, reordered_mask(deleted_at, order, length)], dim=1)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    backspaces=st.sampled_from([0.0, 0.1, 0.4]),
    row_length=st.sampled_from([None, 100]),
    layout=st.sampled_from(["tree", "paper"]),
    seed=st.integers(0, 99),
)
def test_every_node_attends_to_the_same_nodes_as_before(
    lengths: list[int], backspaces: float, row_length: int | None, layout: Layout, seed: int
) -> None:
    trajectories = [rollout(n, backspaces, seed + n) for n in lengths]
    encoding = encode(trajectories, layout=layout, row_length=row_length, share_prompts=row_length is not None)
    found = causal_prefix_order(encoding.deleted_at)
    if found is None:
        return
    order, length = found
    assert order.sort(1).values.eq(torch.arange(order.shape[1])).all()
    expected = attend(encoding.deleted_at)
    for row in range(len(order)):
        mask = whole_mask(order, length, encoding.deleted_at)[row]
        assert torch.equal(mask, expected[row][order[row]][:, order[row]])


def test_a_causal_prefix_by_hand() -> None:
    """5 6 7, then 8, 9, delete 9, 10, <eos>: node 4 is deleted, all others are the causal prefix."""
    encoding = encode([Trajectory.rollout(SPACE, (5, 6, 7), (8, 9, SPACE.bkspc, 10, 1))])
    found = causal_prefix_order(encoding.deleted_at)
    assert found is not None
    order, length = found
    assert order.tolist() == [[0, 1, 2, 3, 5, 6, 4]]
    assert length == 6
    assert reordered_mask(encoding.deleted_at, order, length).tolist() == [[[True] * 4 + [False, False, True]]]


def test_without_deletions_nothing_needs_a_mask_and_where_most_is_deleted_all_of_it_has_one() -> None:
    plain = causal_prefix_order(encode([rollout(13, 0.0, 0)]).deleted_at)
    assert plain is not None
    assert plain[1] == 17  # of 17 nodes
    assert (
        causal_prefix_order(encode([Trajectory.rollout(SPACE, (5,), (*[6, SPACE.bkspc] * 20, 1))]).deleted_at) is None
    )


def test_the_causal_prefix_of_a_shared_row_is_that_of_its_longest_trajectory() -> None:
    """Here the first of three that share a prompt; the last is short."""
    sharing = [rollout(60, 0.0, 1), rollout(4, 0.0, 2), rollout(2, 0.0, 3)]
    encoding = encode(sharing, row_length=80, share_prompts=True)
    assert encoding.tokens.shape == (1, 80)
    found = causal_prefix_order(encoding.deleted_at)
    assert found is not None
    assert found[1] == 60  # of 3 + 60 + 1, a multiple of 80 / 16


def test_the_causal_prefix_is_the_deepest_stack_not_the_last() -> None:
    """Twenty tokens of which the last fifteen are deleted again."""
    deleting = Trajectory.rollout(SPACE, (5,), (*[6] * 20, *[SPACE.bkspc] * 15, 1))
    found = causal_prefix_order(encode([deleting]).deleted_at)
    assert found is not None
    assert found[1] == 21


def scored(policy: Policy, encoding: Encoding) -> list[Tensor]:
    scores = policy(encoding)
    loss = sequencematch_loss(scores[:1], scores[1:], alpha=0.1, gamma=0.99).loss
    trained = [p for p in policy.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return [scores.value.detach(), loss.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize(
    ("lengths", "row_length"), [((40, 30, 35, 50), None), ((70, 30, 65, 28), 110)], ids=["a row each", "packed"]
)
@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_scores_and_gradients_are_those_of_a_dense_mask(
    lengths: tuple[int, ...], row_length: int | None, has_checkpoints: bool
) -> None:
    """In float64. With gradient checkpointing layers run again in the backward pass, with the same attention."""
    policy = Policy(exact_llama()).double()
    if has_checkpoints:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
    batch = [rollout(n, 0.2, n) for n in lengths]
    encoding = encode(batch, row_length=row_length)
    assert policy.base.config._attn_implementation == CAUSAL_PREFIX
    assert causal_prefix_order(encoding.deleted_at) is not None
    ours = scored(policy, encoding)
    policy.base.config._attn_implementation = "sdpa"
    for mine, dense in zip(ours, scored(policy, encoding), strict=True):
        torch.testing.assert_close(mine, dense, rtol=1e-9, atol=1e-11)


def test_queries_in_the_causal_prefix_are_given_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, Any]] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def record(query: Tensor, *args: Any, attn_mask: Any = None, **options: Any) -> Tensor:
        calls.append((query.shape[2], None if attn_mask is None else tuple(attn_mask.shape[2:])))
        return sdpa(query, *args, **{"attn_mask": attn_mask, **options})

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    policy, encoding = Policy(exact_llama()), encode([rollout(60, 0.1, 3)])
    calls.clear()
    policy(encoding)
    found, nodes = causal_prefix_order(encoding.deleted_at), encoding.tokens.shape[1]
    assert found is not None
    assert nodes > found[1] > nodes / 2
    layers = policy.base.config.num_hidden_layers
    assert calls == [(found[1], None), (nodes - found[1], (nodes - found[1], nodes))] * layers


def test_a_mask_for_all_queries_is_sdpas() -> None:
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    module = torch.nn.Module()
    for given_mask in (mask, None):
        seen, _ = causal_prefix_attention(module, query, key, value, given_mask, scaling=0.5)
        options: dict[str, Any] = {"attn_mask": mask} if given_mask is not None else {"is_causal": True}
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.5, **options)
        torch.testing.assert_close(seen, expected.transpose(1, 2))


def test_the_model_itself_writes_and_scores_as_before() -> None:
    model = tiny("Llama")
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model.generate(ids, max_new_tokens=8, do_sample=False), model(input_ids=ids).logits
    Policy(model)
    assert model.config._attn_implementation == CAUSAL_PREFIX
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), before[0])
    torch.testing.assert_close(model(input_ids=ids).logits, before[1])


def test_a_model_that_takes_a_mask_only_for_all_queries_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sequencematch.policy.masks.reordered_mask", lambda deleted_at, *_: attend(deleted_at))
    policy = Policy(exact_llama())  # a wrong mask: the probe notices
    assert policy.base.config._attn_implementation == "sdpa"
