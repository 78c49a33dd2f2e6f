"""Decoding by replayed steps, with graphs emulated on a CPU and without kernels: what it keeps, counts and falls back to."""

from typing import Any

import pytest
import torch

from sequencematch.policy import Policy, Sampling
from sequencematch.policy.decoding import cuda_graphs
from sequencematch.policy.decoding.cuda_graphs import GraphDecoder, why_not_as_it_is
from sequencematch.policy.generation import rollouts
from tests.policy.emulated_graphs import emulate, without_kernels
from tests.policy.test_generation import MODELS, SETTINGS, case_of, first_differences, naive, with_row
from tests.policy.tiny_models import tiny

#: The settings that need nothing from the host at a step.
REPLAYED = [name for name, options in SETTINGS.items() if "logits_processor" not in options]
EIGHT: dict[str, Any] = {"max_new_tokens": 8, "seed": 1}


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    without_kernels(monkeypatch)


@pytest.fixture
def policy() -> Policy:
    """One that has decoded nothing yet."""
    return with_row(MODELS["float64"]())


@pytest.mark.parametrize("setting", REPLAYED)
def test_replayed_steps_equal_the_naive_sampler_action_for_action(policy: Policy, setting: str) -> None:
    """With four slots they are filled again while other rows run on."""
    case = case_of("float64", setting)
    result = policy.generate(case.prompts[:10], batch_size=4, **case.options)
    assert not first_differences(result, naive("float64", setting)[:10])
    ((_, decoder),) = policy.decoders.idle
    assert decoder.graph is not None


def test_rows_that_reach_their_limit_together_are_not_stepped_past_it(policy: Policy) -> None:
    result = policy.generate([[5, 6]] * 4, max_new_tokens=9, seed=0, backspace_bias=-1e4)
    assert {len(t) for t in result.trajectories} == {10}  # nine tokens, and one too many: an <eos> in its place
    assert result.forward_passes == 1 + 10


def test_a_decoder_is_kept_for_the_next_call_and_while_it_is_busy_another_one_is_made(policy: Policy) -> None:
    policy.generate([[5, 6]] * 4, **EIGHT)
    ((_, first),) = policy.decoders.idle
    policy.generate([[7]] * 4, **EIGHT)
    assert [decoder for _, decoder in policy.decoders.idle] == [first]
    stream = rollouts(policy, [[5, 6]] * 8, Sampling(**EIGHT), 4)
    next(stream)
    alone = policy.generate([[5, 6]] * 4, **EIGHT)
    assert len(policy.decoders.idle) == 1
    del stream  # nobody asks for the rest
    assert len(policy.decoders.idle) == 2
    assert policy.generate([[5, 6]] * 4, **EIGHT).trajectories == alone.trajectories


def test_another_setting_or_other_weights_take_another_decoder(policy: Policy) -> None:
    for options in (EIGHT, EIGHT | {"temperature": 0.7}):
        policy.generate([[5, 6]] * 4, **options)
    assert len(policy.decoders.idle) == 2
    policy.base.lm_head.weight = torch.nn.Parameter(policy.base.lm_head.weight * 2)
    policy.generate([[5, 6]] * 4, **EIGHT)
    assert len(policy.decoders.idle) == 3


def test_a_decoder_made_under_autocast_or_in_inference_mode_is_not_kept(policy: Policy) -> None:
    with torch.inference_mode():
        inside = policy.generate([[5, 6]] * 4, **EIGHT).trajectories
    assert not policy.decoders.idle
    assert inside == policy.generate([[5, 6]] * 4, **EIGHT).trajectories


def test_idle_decoders_hold_no_more_than_their_share_of_memory(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.generate([[5, 6]] * 4, **EIGHT)
    ((_, first),) = policy.decoders.idle
    monkeypatch.setattr(cuda_graphs, "POOL_BYTES", 1.5 * first.cache_bytes())
    policy.generate([[5, 6]] * 4, **EIGHT | {"temperature": 0.7})
    assert len(policy.decoders.idle) == 1
    assert policy.decoders.idle[0][1] is not first


def test_a_step_that_cannot_be_captured_is_run_as_it_is(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: GraphDecoder) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    replayed = policy.generate([[5, 6]] * 4, **EIGHT).trajectories
    policy.decoders.idle.clear()
    monkeypatch.setattr(GraphDecoder, "_captured", fails)
    with pytest.warns(UserWarning, match=r"of LlamaForCausalLM can't be captured .* \(RuntimeError: operation not"):
        assert policy.generate([[5, 6]] * 4, **EIGHT).trajectories == replayed
    assert not policy.decoders.idle


def test_a_gpu_that_is_full_while_a_step_is_captured_is_an_error(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: GraphDecoder) -> None:
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(GraphDecoder, "_captured", fails)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        policy.generate([5, 6], **EIGHT)


def test_what_keeps_a_models_step_from_being_captured_is_named() -> None:
    def reason(name: str, attention: str = "sdpa", **changes: Any) -> str | None:
        model = tiny(name, **changes)
        model.config._attn_implementation = attention
        return why_not_as_it_is(model)

    assert reason("Llama") is None
    assert reason("Llama", "eager") == "attention is 'eager'"
    assert reason("Gemma 2") == "the model's attention is more than softmax(qk)v"
    turned = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    read_on_host = "rotary embeddings of type dynamic read positions on the host"
    assert reason("Llama", rope_parameters=turned) == read_on_host
    hooked = tiny("Llama")
    hooked.get_input_embeddings().register_forward_hook(lambda *_: None)
    assert why_not_as_it_is(hooked) is None
    hooked.model.layers[0].register_forward_pre_hook(lambda *_: None)
    assert why_not_as_it_is(hooked) == "the model has forward hooks, which a graph would not call"
