"""Adapters that are merged for decoding leave no trace, and adapters whose inputs are not cast compute the same."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from sequencematch.core.encoding import encode
from sequencematch.core.mdp import Trajectory
from sequencematch.policy import Policy
from sequencematch.policy.adapters import merged, output_weight, with_adapter, without_input_casts, without_trained_rows
from sequencematch.policy.changes import changed
from tests.policy.tiny_models import HIDDEN, exact_llama, llama


def adapted(model: Any, **changes: Any) -> Policy:
    """With an adapter that does something."""
    torch.manual_seed(1)
    policy = Policy.from_pretrained(model, peft_config=peft.LoraConfig(r=4, target_modules="all-linear", **changes))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return policy


def logits(policy: Policy) -> Tensor:
    with torch.no_grad():
        return policy.model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits


def multiplications(policy: Policy) -> int:
    with torch.profiler.profile() as profile:
        logits(policy)
    return sum(event.count for event in profile.key_averages() if event.key == "aten::linear")


def test_a_merged_adapter_gives_the_same_logits_with_one_product_a_layer() -> None:
    policy = adapted(exact_llama()).double()
    apart, products = logits(policy), multiplications(policy)
    layers = sum(hasattr(module, "lora_A") for module in policy.modules())
    with merged(policy):
        torch.testing.assert_close(logits(policy), apart, rtol=1e-12, atol=1e-12)
        assert multiplications(policy) == products - 2 * layers
    assert not torch.equal(logits(Policy(exact_llama())), apart)  # the adapter does something


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_afterwards_every_bit_is_as_before(dtype: torch.dtype) -> None:
    policy = adapted(llama().to(dtype))
    before = copy.deepcopy(policy.state_dict())
    with pytest.raises(KeyboardInterrupt), merged(policy):
        raise KeyboardInterrupt
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert not any(getattr(module, "merged", False) for module in policy.modules())


def test_what_is_no_plain_adapter_stays_as_it_is() -> None:
    policy = adapted(llama(), use_dora=True)
    with merged(policy):
        assert not any(getattr(module, "merged", False) for module in policy.modules())
    with merged(Policy(llama())):
        pass


def test_without_casts_autocast_gives_the_same_loss_and_gradients_bit_by_bit() -> None:
    policy = adapted(llama().bfloat16())
    assert {p.dtype for p in policy.model.parameters() if p.requires_grad} == {torch.float32}
    encoding = encode([Trajectory.rollout(policy.space, (5,), (6, 7, 8, policy.space.eos))])
    trained = [p for p in policy.parameters() if p.requires_grad]

    def gradients() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            value = policy(encoding).value.sum()
        return [value, *torch.autograd.grad(value, trained, allow_unused=True)]

    cast = gradients()
    with changed(without_input_casts(policy)):
        uncast = gradients()
        with pytest.raises(RuntimeError, match="same dtype"):
            policy(encoding)  # control: the casts are off
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(cast, uncast, strict=True))
    policy(encoding)


def trained_rows(model: Any, ends: tuple[int, ...], **changes: Any) -> list[str]:
    """What is trained besides LoRA's matrices, as name and shape."""
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **changes)
    found = with_adapter(model, config, ends)
    trained = [
        (name, tuple(p.shape)) for name, p in found.named_parameters() if p.requires_grad and "lora_" not in name
    ]
    return [f"{name.removeprefix('base_model.model.')} {shape}" for name, shape in trained]


def test_the_rows_of_end_tokens_are_trained_unless_the_config_says_what_is() -> None:
    rows = "token_adapter.trainable_tokens_delta.default"
    assert trained_rows(llama(), (1, 7)) == [f"lm_head.{rows} (2, {HIDDEN})"]
    assert trained_rows(llama(tie_word_embeddings=True), (1,)) == [f"lm_head.{rows} (1, {HIDDEN})"]
    assert trained_rows(llama(), (1,), trainable_token_indices={}) == []
    wrong = peft.LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="`peft_config` must leave the output layer alone"):
        Policy(with_adapter(llama(), wrong, (1,)))
    (whole,) = trained_rows(llama(), (1,), modules_to_save=["lm_head"])
    assert whole.startswith("lm_head.modules_to_save.default.weight (")


@pytest.mark.parametrize("tied", [False, True])
def test_a_trained_row_is_scored_decoded_saved_and_exported(tied: bool, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    plain = Policy(with_adapter(llama(tie_word_embeddings=tied), config, (2,)))
    policy = Policy(with_adapter(llama(tie_word_embeddings=tied), config, (2,)), None, plain.backspace)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(0.3)
    options: dict[str, Any] = {"max_new_tokens": 12, "seed": 3}
    prompts = [[5, 6], [7, 8, 9], [10]] * 4
    wanted = policy.generate(prompts, **options)
    assert [t.chosen for t in plain.generate(prompts, **options).trajectories] != [
        t.chosen for t in wanted.trajectories
    ]
    base = llama(tie_word_embeddings=tied)
    base.save_pretrained(tmp_path / "base")
    policy.base.name_or_path = policy.model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    policy.save_pretrained(tmp_path / "saved")
    policy.export(tmp_path / "exported")
    for folder in ("saved", "exported"):
        found = Policy.from_pretrained(tmp_path / folder).generate(prompts, **options)
        assert [t.chosen for t in found.trajectories] == [t.chosen for t in wanted.trajectories], folder


def test_the_weight_with_trained_rows_and_its_gradient_are_those_of_peft() -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    layer = with_adapter(llama(), config, (2, 5)).get_output_embeddings()
    (rows,) = layer.token_adapter.trainable_tokens_delta.values()
    with torch.no_grad():
        rows.add_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)))
    found = []
    for weight in (output_weight(layer), layer.weight):
        rows.grad = None
        (weight * torch.arange(weight.numel()).view_as(weight)).sum().backward()
        found.append((weight.detach(), rows.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(found[0][0], without_trained_rows(layer).weight)
