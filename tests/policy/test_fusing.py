"""Fewer kernels, the same results: norms and adapters on a CPU. Rotations are a GPU's, see `test_cuda.py`."""

import copy
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from sequencematch.core.encoding import encode
from sequencematch.core.mdp import Trajectory
from sequencematch.core.objectives import bc_loss
from sequencematch.policy import Policy
from sequencematch.policy.fusing import Fusion, _rotated, fused, fusions
from tests.policy.test_adapters import adapted, logits
from tests.policy.tiny_models import ARCHITECTURES, exact_llama, llama, tiny


def strict(found: list[Fusion]) -> list[Fusion]:
    """The same, but nothing may fall back to the model's own."""

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("fell back to the model's own")

    return [replace(fusion, own=refuse) for fusion in found]


def kinds(found: list[Fusion]) -> dict[str, int]:
    """How many of each class there are."""
    return dict(Counter(type(fusion.owner).__name__ for fusion in found))


def results(policy: Policy, found: list[Fusion], *, is_autocast: bool = False, seed: int = 0) -> list[Tensor]:
    """Values, and all gradients of a loss."""
    space = policy.space
    rows = [((5,), (6, 7, space.bkspc, 8, 9, space.eos)), ((7, 5), (6, space.eos))]
    encoding = encode([Trajectory.rollout(space, prompt, actions) for prompt, actions in rows])
    trained = [p for p in policy.parameters() if p.requires_grad]
    torch.manual_seed(seed)
    with fused(found), torch.autocast("cpu", torch.bfloat16) if is_autocast else nullcontext():
        scores = policy(encoding)
        gradients = torch.autograd.grad(bc_loss(scores), trained, allow_unused=True)
    return [scores.value.detach(), torch.cat([g.flatten().double() for g in gradients if g is not None])]


@pytest.mark.parametrize("changes", [{}, {"lora_dropout": 0.3}, {"use_rslora": True, "lora_alpha": 3}], ids=str)
def test_a_fused_adapter_computes_what_pefts_does(changes: dict[str, Any]) -> None:
    policy = adapted(exact_llama(), **changes).double().train()
    found = fusions(policy.base)
    assert kinds(found) == {"Linear": sum(hasattr(module, "lora_A") for module in policy.modules())}
    for ours, own in zip(results(policy, strict(found)), results(policy, []), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-12, atol=1e-12)


def test_an_adapter_of_a_convolution_is_fused_too() -> None:
    """GPT-2's layers give views, and have biases."""
    policy = adapted(tiny("GPT-2"), fan_in_fan_out=True).double().train()
    found = fusions(policy.base)
    assert kinds(found) == {"Linear": 8}
    for ours, own in zip(results(policy, strict(found)), results(policy, []), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-6, atol=1e-6)


def test_under_autocast_fused_norms_and_adapters_err_at_most_twice_as_much() -> None:
    model = tiny("Llama")
    for norm in (module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"):
        torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    policy = adapted(model.bfloat16()).train()
    found = fusions(policy.base)
    assert kinds(found) == {"LlamaRMSNorm": 5, "Linear": 14}
    exact = results(copy.deepcopy(policy).double(), [])
    ours, own = (results(policy, which, is_autocast=True) for which in (strict(found), []))
    for truth, a, b in zip(exact, ours, own, strict=True):
        error, allowed = (float((x.double() - truth).norm() / truth.norm()) for x in (a, b))
        print(f"relative error {error:.2e} fused, {allowed:.2e} not")
        assert 0 < error <= 2 * allowed


def test_a_fused_norm_runs_outside_autocast_and_leaves_another_dtype_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rms_norm, is_autocast = llama().bfloat16(), torch.nn.functional.rms_norm, list[bool]()
    x = torch.randn(3, model.config.hidden_size, dtype=torch.bfloat16)

    def record(*args: Any) -> Tensor:
        is_autocast.append(torch.is_autocast_enabled("cpu"))
        return rms_norm(*args)

    found = strict(fusions(model))
    monkeypatch.setattr(torch.nn.functional, "rms_norm", record)
    with fused(found), torch.autocast("cpu", torch.bfloat16):
        assert model.model.norm(x).dtype == torch.bfloat16
        assert is_autocast == [False]
        with pytest.raises(AssertionError, match="fell back"):
            model.model.norm(x.float())


def test_a_function_of_a_file_is_put_back() -> None:
    file = SimpleNamespace(turn=str)
    with fused([Fusion(file, "turn", str, lambda own, x: own(x) + "!")]):
        assert file.turn(1) == "1!"
    assert file.turn is str


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("angles", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_autocast", [True, False])
def test_angles_in_float32_are_rounded_under_autocast_alone(
    dtype: torch.dtype, angles: torch.dtype, is_autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without autocast the model's own function gives float32 there. The kernel is not run: only the choice is a CPU's."""
    kernel = SimpleNamespace(can_rotate=lambda *_: True, rotate=lambda x, *_: x)
    monkeypatch.setitem(sys.modules, "sequencematch.policy.rotation", kernel)
    q, cos = torch.ones(1, 2, 3, 8, dtype=dtype), torch.ones(1, 3, 8, dtype=angles)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        turned, _ = _rotated(lambda q, k, *_: (q.float() + 1, k), q, q, cos, cos)
    is_fused = dtype != torch.float32 and (is_autocast or angles == dtype)
    assert (turned is q) == is_fused


def test_adapters_in_another_dtype_stay_as_they_are_without_autocast() -> None:
    """PEFT computes them in float32 then, which is more exact."""
    policy = adapted(llama().bfloat16())
    adapters = [fusion for fusion in fusions(policy.base) if hasattr(fusion.owner, "lora_A")]
    assert len(adapters) == 14
    for ours, own in zip(results(policy, adapters), results(policy, []), strict=True):
        assert torch.equal(ours, own)


def test_what_is_not_plain_is_left_out() -> None:
    assert not fusions(adapted(llama(), use_dora=True).base)
    assert not fusions(adapted(llama(), lora_bias=True).base)
    assert not fusions(llama())  # on a CPU, norms in float32 stay as they are
    assert not kinds(fusions(tiny("Gemma 3").bfloat16()))  # its norms have 1 + w
    hooked = adapted(llama())
    hooked.base.model.layers[0].mlp.up_proj.base_layer.register_forward_hook(lambda *_: None)
    assert kinds(fusions(hooked.base)) == {"Linear": 13}
    biased = llama().bfloat16()
    biased.model.norm.register_parameter("bias", torch.nn.Parameter(torch.zeros(biased.config.hidden_size)))
    assert kinds(fusions(biased)) == {"LlamaRMSNorm": 4}


@pytest.mark.parametrize("change", ["none", "disabled", "merged", "switched", "both", "deleted"])
def test_adapters_that_change_while_fused_compute_what_pefts_do(change: str) -> None:
    policy = adapted(exact_llama()).double()
    tuner = policy.model.base_model
    policy.model.add_adapter("other", peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    found = fusions(policy.double().base)
    assert kinds(found) == {"Linear": 14}
    before = logits(policy)
    changes: dict[str, Callable[[], Any]] = {
        "disabled": tuner.disable_adapter_layers,
        "merged": tuner.merge_adapter,
        "switched": lambda: tuner.set_adapter("other"),
        "both": lambda: tuner.set_adapter(["default", "other"]),
        "deleted": lambda: policy.model.delete_adapter("default"),
    }
    changes.get(change, lambda: None)()
    own = logits(policy)
    assert torch.allclose(own, before) == (change in ("none", "merged"))
    with fused(found):
        torch.testing.assert_close(logits(policy), own, rtol=1e-12, atol=1e-12)


def test_the_model_is_as_it_was_afterwards() -> None:
    model = llama().bfloat16()
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = forward  # someone's own, which stays
    found = fusions(model)
    with fused(found):
        assert sum("forward" in vars(module) for module in model.modules()) == len(found) + 1
        assert not fusions(model)  # nothing is fused twice
    with pytest.raises(KeyboardInterrupt), fused(found):
        raise KeyboardInterrupt
    assert [module for module in model.modules() if "forward" in vars(module)] == [model.model.layers[0].mlp]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_model_in_bfloat16_gives_the_same_but_for_rounding(name: str) -> None:
    model = tiny(name).bfloat16()
    tokens = torch.arange(5, 17)[None]
    found = fusions(model)
    with torch.no_grad():
        own = model(tokens, use_cache=False).logits
        with fused(found):
            ours = model(tokens, use_cache=False).logits
    assert float((ours - own).norm() / own.norm()) < (0.05 if found else 1e-9)
