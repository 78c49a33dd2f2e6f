"""QLoRA: a policy whose base is in 4 bits is scored, trained, saved and exported like any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from sequencematch.core.encoding import encode
from sequencematch.policy import Policy
from tests.policy.test_policy import batch, check_close, loss, same, slow_scores
from tests.policy.tiny_models import VOCAB, tiny

bitsandbytes = pytest.importorskip("bitsandbytes")
HIDDEN = 64  # a block of 4-bit weights


def four_bit(**changes: Any) -> BitsAndBytesConfig:
    """As in QLoRA, but computing in float32, so that rounding explains little."""
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    return BitsAndBytesConfig(load_in_4bit=True, **(options | changes))


def lora() -> LoraConfig:
    return LoraConfig(r=64, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def save_tiny(folder: Path, hidden: int = HIDDEN, **changes: Any) -> Path:
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "head_dim": hidden // 4}
    tiny("Llama", **sizes, **changes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"), tie_word_embeddings=request.param)


def trainable(policy: Policy) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}


def qlora(base: Path) -> Policy:
    """Nothing that trains is at its start, where some gradients are zero."""
    made = Policy.from_pretrained(base, quantization_config=four_bit(), device="cpu", peft_config=lora())
    torch.manual_seed(1)
    for parameter in trainable(made).values():
        torch.nn.init.normal_(parameter, std=0.1)
    return made


def four_bit_weights(policy: Policy) -> list[Tensor]:
    return [layer.weight for layer in policy.modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)]


def gradients(policy: Policy) -> dict[str, Tensor]:
    policy.zero_grad()
    loss(policy(encode(batch(policy)))).backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}


def test_every_layer_is_in_four_bits_but_the_output_layer_which_has_a_row_for_backspace(base: Path) -> None:
    made = Policy.from_pretrained(base, quantization_config=four_bit(), device="cpu", peft_config=lora())
    weights = four_bit_weights(made)
    assert len(weights) == 2 * 7  # query, key, value, output, gate, up and down, in two layers
    assert {weight.dtype for weight in weights} == {torch.uint8}
    rows = made.unembedding().weight
    assert (rows.dtype, rows.shape) == (torch.float32, (VOCAB, HIDDEN))
    assert made.space.bkspc == VOCAB
    torch.testing.assert_close(made.backspace.row, rows.mean(0))


@torch.no_grad()
def test_scores_equal_every_state_run_alone(base: Path) -> None:
    """To float32 rounding, in eval mode and in training."""
    made = qlora(base)
    encoding = encode(batch(made))
    for is_training in (False, True):
        made.train(is_training)
        got, expected = made(encoding), slow_scores(made, batch(made), encoding)
        torch.testing.assert_close(got.action_logit, expected.action_logit, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.value, expected.value, rtol=1e-4, atol=1e-5)
    # The control: in full precision it would be another model.
    full = Policy.from_pretrained(base, peft_config=lora())
    full.load_state_dict(trainable(made), strict=False)
    assert float((full(encoding).value - got.value).abs().max()) > 1e-2


def test_gradients_are_those_of_the_same_adapter_on_the_weights_the_bits_stand_for(base: Path) -> None:
    """Also behind decoding, which runs in eval mode."""
    made = qlora(base)
    made.generate([[5, 6]], max_new_tokens=4, seed=0)
    got = gradients(made)
    assert got.keys() == trainable(made).keys()
    assert all("lora" in name or name.startswith("backspace.") for name in got)
    assert all(float(gradient.norm()) > 0 for gradient in got.values())

    written_out = AutoModelForCausalLM.from_pretrained(base, quantization_config=four_bit()).dequantize()
    plain = Policy.from_pretrained(written_out, peft_config=lora())
    plain.load_state_dict(trainable(made), strict=False)
    expected = gradients(plain)
    assert got.keys() == expected.keys()
    check_close(list(got.values()), list(expected.values()), 1e-4)  # float32 rounding, as in full precision


def train(policy: Policy) -> None:
    optimizer = torch.optim.AdamW(trainable(policy).values(), lr=1e-2)
    gradients(policy)
    optimizer.step()


def test_a_step_lowers_the_loss_and_leaves_the_bits_alone(base: Path) -> None:
    made = qlora(base)
    bits = [weight.clone() for weight in four_bit_weights(made)]
    encoding = encode(batch(made))
    before = float(loss(made(encoding)).detach())
    train(made)
    assert float(loss(made(encoding)).detach()) < before - 0.1
    assert all(torch.equal(now, then) for now, then in zip(four_bit_weights(made), bits, strict=True))


def test_saved_and_loaded_in_four_bits_it_is_the_same_and_holds_no_weight_of_the_base(
    base: Path, tmp_path: Path
) -> None:
    made = qlora(base)
    train(made)
    made.save_pretrained(tmp_path / "saved")
    loaded = Policy.from_pretrained(tmp_path / "saved", quantization_config=four_bit(), device="cpu")
    assert four_bit_weights(loaded)
    assert same(made, loaded)
    assert trainable(loaded).keys() == trainable(made).keys()
    assert not same(qlora(base), loaded)  # the control: training did change it

    names = {path.name for path in (tmp_path / "saved").glob("*.safetensors")}
    assert names == {"adapter_model.safetensors", "sequencematch.safetensors"}
    adapter = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert all(".lora_A." in name or ".lora_B." in name for name in adapter)


@torch.no_grad()
def assert_exported(policy: Policy, folder: Path) -> None:
    """In full precision, with the policy's probabilities to float32 rounding."""
    exported = Policy.from_pretrained(folder)
    assert not four_bit_weights(exported)
    encoding = encode(batch(policy))
    torch.testing.assert_close(exported(encoding).log_prob(), policy(encoding).log_prob(), rtol=1e-4, atol=1e-4)


def test_an_export_is_in_full_precision_and_leaves_the_policy_in_four_bits(base: Path, tmp_path: Path) -> None:
    made = qlora(base)
    made.export(tmp_path / "plain")
    assert_exported(made, tmp_path / "plain")
    assert four_bit_weights(made)


def test_a_checkpoint_in_four_bits_is_loaded_trained_and_exported_too(base: Path, tmp_path: Path) -> None:
    quantized = Policy.from_pretrained(base, quantization_config=four_bit(), device="cpu")
    quantized.save_pretrained(tmp_path / "quantized")
    assert same(quantized, Policy.from_pretrained(tmp_path / "quantized", device="cpu"))
    made = Policy.from_pretrained(tmp_path / "quantized", device="cpu", peft_config=lora())
    assert four_bit_weights(made)
    train(made)
    made.export(tmp_path / "plain")
    assert_exported(made, tmp_path / "plain")


def test_layers_that_compute_in_half_precision_are_probed_with_its_rounding(tmp_path: Path) -> None:
    wide = save_tiny(tmp_path / "wide", hidden=512)
    config = four_bit(bnb_4bit_compute_dtype=torch.float16, bnb_4bit_use_double_quant=False)
    assert Policy.from_pretrained(wide, quantization_config=config, device="cpu").base.dtype == torch.float32


def test_an_output_layer_in_four_bits_is_refused(base: Path) -> None:
    config = four_bit(llm_int8_skip_modules=["q_proj"])  # replaces the default, which is the output layer
    with pytest.raises(ValueError, match=r"`quantization_config` must leave the output layer alone.* Got a Linear4bit"):
        Policy.from_pretrained(base, quantization_config=config, device="cpu")


@pytest.mark.skipif(not bitsandbytes.functional.has_avx512bf16(), reason="bitsandbytes repacks on newer CPUs only")
def test_a_model_whose_weights_were_repacked_before_is_refused(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=four_bit()).eval()
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6]]))
    with pytest.raises(ValueError, match="`model` must not have run on the CPU in eval mode: bitsandbytes has rounded"):
        Policy.from_pretrained(model)
