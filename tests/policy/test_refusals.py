"""Models that can't be policies are refused when they are loaded, with the reason."""

from pathlib import Path
from typing import Any

import pytest
from peft import PromptTuningConfig, get_peft_model
from transformers import LlamaConfig

from sequencematch.policy import Policy, storage
from sequencematch.policy.attention import windows
from sequencematch.policy.probe import probe
from tests.policy.tiny_models import llama


def test_virtual_tokens_have_no_place_on_the_stack() -> None:
    prompt_tuning = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"`peft_config` must not add virtual tokens: .* Use LoRA or the like\."):
        Policy(get_peft_model(llama(), prompt_tuning))


def test_layers_that_do_not_attend_are_named() -> None:
    config = LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "full_attention"])
    assert windows(config) == {"full_attention": None}
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"llama has layers of type linear_attention, which can't leave out deleted"):
        windows(config)


def test_a_model_that_takes_no_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes like any Llama, as long as it isn't told what to leave out."""
    policy = Policy(llama())
    probe(policy)  # the control
    own = policy.base.model.forward

    def without_masks(*args: Any, attention_mask: Any = None, **options: Any) -> Any:
        if attention_mask is not None:
            raise TypeError("no masks here")
        return own(*args, **options)

    monkeypatch.setattr(policy.base.model, "forward", without_masks)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM can't be given a mask with .* \(no masks here\)"):
        probe(policy)


def test_weights_are_restored_from_a_saved_policy_alone(tmp_path: Path) -> None:
    policy = Policy(llama())
    with pytest.raises(
        ValueError, match=r"`folder` must hold a saved policy\. Got .*, which has no sequencematch\.json"
    ):
        storage.restore(policy.model, policy.backspace, tmp_path)


def test_throughput_counts_deletions() -> None:
    generation = Policy(llama()).generate([[2, 3], [4]], max_new_tokens=3, max_actions=12, seed=0, backspace_bias=9.0)
    actions = sum(len(trajectory.chosen) for trajectory in generation.trajectories)
    assert generation.actions_per_second == pytest.approx(actions / generation.seconds)
    assert any(policy_action == t.space.bkspc for t in generation.trajectories for policy_action in t.chosen)
