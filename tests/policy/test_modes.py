"""Modes are left as they were entered. Compiled layers score; decoding, whose shapes change, calls them uncompiled."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

import sequencematch
from sequencematch.core.encoding import encode
from sequencematch.core.mdp import Trajectory
from sequencematch.policy import Policy
from sequencematch.policy.changes import Change, changed
from sequencematch.policy.modes import compile_layers
from tests.policy.test_generation import MODELS, with_row
from tests.policy.test_threads import is_free

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "seed": 1}


def layers(policy: Policy) -> list[Any]:
    return [layer for layer in policy.modules() if isinstance(layer, GradientCheckpointingLayer)]


def compiled_calls(policy: Policy) -> list[Any]:
    """Every call from now on that a compiled layer gets; nothing is compiled for it."""
    called: list[Any] = []

    def record(layer: Any) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            called.append(layer)
            return layer._call_impl(*args, **options)

        return call

    for layer in layers(policy):
        layer._compiled_call_impl = record(layer)
    return called


@pytest.fixture
def policy() -> Iterator[Policy]:
    made = with_row(MODELS["float64"]())
    assert layers(made)
    yield made
    assert all(layer._compiled_call_impl is not None for layer in layers(made))  # whatever was done meanwhile


def score(policy: Policy) -> None:
    policy(encode([Trajectory.rollout(policy.space, (5, 6), (7, policy.space.bkspc, 8, policy.space.eos))]))


def test_every_layer_is_compiled_and_scoring_calls_them_so(policy: Policy) -> None:
    compile_layers(policy)
    assert all(layer._compiled_call_impl is not None for layer in layers(policy))
    called = compiled_calls(policy)
    score(policy)
    assert called == layers(policy)


def test_generating_calls_no_compiled_layer(policy: Policy) -> None:
    before = policy.generate([[5, 6]] * 8, **OPTIONS).trajectories
    called = compiled_calls(policy)
    assert policy.generate([[5, 6]] * 8, **OPTIONS).trajectories == before
    assert not called


def test_between_two_actions_of_a_stream_layers_are_compiled(policy: Policy) -> None:
    called = compiled_calls(policy)
    actions = 0
    for _ in policy.stream([5, 6], **OPTIONS):
        actions += 1
        score(policy)
    assert actions > 1
    assert called == layers(policy) * actions


def test_the_models_own_generate_calls_none_either_when_it_backtracks(policy: Policy) -> None:
    called = compiled_calls(policy)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "bkspc_token_id": 9}
    policy.base.generate(torch.tensor([[5, 6]]), custom_generate=sequencematch.generate, **options)
    assert not called


def test_a_pass_that_fails_leaves_layers_compiled(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    compiled_calls(policy)
    monkeypatch.setattr(layers(policy)[0].mlp, "forward", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        policy.generate([5, 6], **OPTIONS)


def test_modes_nest_and_each_is_left_as_it_was_entered(policy: Policy) -> None:
    compiled_calls(policy)
    policy.train()
    frozen = layers(policy)[0].mlp
    frozen.eval()  # a part that its owner keeps in evaluation mode
    with policy.for_rollouts():
        assert not policy.training
        with policy.for_training(), policy.for_scoring():
            assert not any(module.training for module in policy.modules())
            assert all(layer._compiled_call_impl is None for layer in layers(policy))
        assert not policy.training
    assert policy.training
    assert not frozen.training


def test_an_error_leaves_no_mode_behind(policy: Policy) -> None:
    compiled_calls(policy)
    before = [module.training for module in policy.modules()]
    for mode in (policy.for_training, policy.for_scoring, policy.for_rollouts):
        with pytest.raises(KeyboardInterrupt), mode():
            raise KeyboardInterrupt
        assert [module.training for module in policy.modules()] == before
        assert is_free(policy)


def test_attributes_are_put_back_in_reverse_and_absent_ones_removed() -> None:
    thing = SimpleNamespace(held=1)
    with changed([Change(thing, "held", 2), Change(thing, "held", 3), Change(thing, "new", 4)]):
        assert vars(thing) == {"held": 3, "new": 4}
    assert vars(thing) == {"held": 1}
    with pytest.raises(TypeError), changed([Change(thing, "held", 2), Change(object(), "new", 4)]):
        pass
    assert vars(thing) == {"held": 1}
