"""Scoring trajectories, and policies on disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from sequencematch.core.encoding import Encoding, encode
from sequencematch.core.mdp import Trajectory
from sequencematch.core.objectives import Scores, sequencematch_loss
from sequencematch.policy import Policy, storage
from tests import programs
from tests.policy.tiny_models import HIDDEN, VOCAB, character_tokenizer, llama, tiny


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def policy(**options: Any) -> Policy:
    """A tiny Llama whose row and offset are not at their start, so that they matter."""
    made = Policy.from_pretrained(tiny("Llama"), **options)
    torch.manual_seed(1)
    for parameter in made.backspace.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def batch(policy: Policy) -> list[Trajectory]:
    bk, eos = policy.space.bkspc, policy.space.eos
    return [
        Trajectory.demonstration(policy.space, (5, 6, 7), (8, 9, 10)),
        Trajectory.rollout(policy.space, (5, 6, 7), (8, bk, bk, bk, bk, 9, 10, bk, 11, eos)),
        Trajectory.rollout(policy.space, (20,), (bk, 21, 22, 23)),
    ]


def slow_scores(policy: Policy, trajectories: list[Trajectory], encoding: Encoding) -> Scores:
    """Dense logits of every state run alone through the whole model, with the row and the offset added by hand."""
    rows = []
    for trajectory in trajectories:
        states = [list(state.tokens) for state in trajectory.states()]
        states += states[-1:] * (encoding.visit.shape[1] - len(states))
        logits = []
        for tokens in states:
            output = policy.model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
            hidden = output.hidden_states[-1][0, -1]
            offset = policy.backspace.offset(hidden, torch.tensor(len(tokens) - 1))
            logits.append(torch.cat([output.logits[0, -1], (hidden @ policy.backspace.row)[None]]) + offset)
        rows.append(torch.stack(logits))
    return Scores.from_logits(torch.stack(rows), encoding)


def loss(scores: Scores) -> Tensor:
    return sequencematch_loss(scores[:1], scores[1:], alpha=0.1, gamma=0.9).loss


def gradients(made: Policy, value: Tensor) -> list[Tensor]:
    parameters = [p for p in made.parameters() if p.requires_grad]
    return [g for g in torch.autograd.grad(value, parameters, allow_unused=True) if g is not None]


def check_close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert float((a - b).norm()) <= tolerance * (float(b.norm()) + 1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"row_length": 24}, {"row_length": 24, "share_prompts": True}, {"layout": "paper"}]
)
def test_scores_and_gradients_equal_every_state_run_alone(options: dict[str, Any]) -> None:
    """To float32 rounding: with padding, packed, with shared prompts, in the paper's layout."""
    made = policy()
    encoding = encode(batch(made), **options)
    got, expected = made(encoding), slow_scores(made, batch(made), encode(batch(made)))
    torch.testing.assert_close(got.action_logit, expected.action_logit, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.value, expected.value, rtol=1e-4, atol=1e-5)
    check_close(gradients(made, loss(got)), gradients(made, loss(expected)), 1e-4)


def test_without_backspace_the_value_sums_over_the_vocabulary() -> None:
    made = policy()
    encoding = encode(batch(made)[:1])
    got = made(encoding, backspace=False)
    with torch.no_grad():
        expected = torch.stack(
            [made.model(input_ids=torch.tensor([s.tokens])).logits[0, -1] for s in batch(made)[0].states()]
        )
    torch.testing.assert_close(
        got.log_prob()[0],
        expected[:-1].log_softmax(-1).gather(1, encoding.chosen[0][:, None]).squeeze(1),
        rtol=1e-4,
        atol=1e-5,
    )
    assert float((got.value - made(encoding).value).detach().abs().max()) > 1e-3


def test_the_offset_moves_the_value_and_not_the_policy() -> None:
    made = policy()
    encoding = encode(batch(made))
    before = made(encoding)
    with torch.no_grad():
        made.backspace.offset_out.bias.add_(5)
    after = made(encoding)
    torch.testing.assert_close(after.value, before.value + 5)
    torch.testing.assert_close(after.log_prob(), before.log_prob(), rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    made = policy()
    encoding = encode(batch(made))
    expected = gradients(made, loss(made(encoding)))
    made.model.train()
    made.model.gradient_checkpointing_enable()
    check_close(gradients(made, loss(made(encoding))), expected, 1e-5)


def test_autocast_is_near_and_keeps_float32_scores() -> None:
    made = policy()
    encoding = encode(batch(made))
    exact = made(encoding)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = made(encoding)
    assert cast.value.dtype == torch.float32
    assert 1e-5 < float(((cast.value - exact.value).norm() / exact.value.norm()).detach()) < 3e-2


def test_a_compiled_policy_has_the_same_loss_and_gradients() -> None:
    """In a process of its own: the run-time shape checker does not compile."""
    code = """
import torch
from sequencematch.core import Trajectory, encode, sequencematch_loss
from sequencematch.policy import Policy
from tests.policy.tiny_models import tiny

policy = Policy.from_pretrained(tiny("Llama", num_hidden_layers=1))
bk, eos = policy.space.bkspc, policy.space.eos
data = Trajectory.demonstration(policy.space, (5, 6), (8, 9, 10))
encoding = encode([data, Trajectory.rollout(policy.space, (5, 6), (8, bk, bk, 9, eos))], row_length=16)
results = []
for function in (policy, torch.compile(policy, backend="aot_eager")):
    scores = function(encoding)
    loss = sequencematch_loss(scores[:1], scores[1:], alpha=0.1, gamma=0.9).loss
    results.append([loss, *torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)])
for left, right in zip(*results, strict=True):
    assert (left is None) == (right is None)
    if left is not None:
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
"""
    run = programs.run("-c", code)
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_lora_policy_trains_its_adapter_row_and_offset_alone() -> None:
    made = policy(peft_config=lora())
    value = loss(made(encode(batch(made))))
    value.backward()
    trained = {name for name, parameter in made.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, p in made.named_parameters() if p.requires_grad}
    assert all("lora" in name or name.startswith("backspace.") for name in trained)
    assert any("lora" in name for name in trained)


def step(made: Policy) -> None:
    """One optimisation step on everything that trains."""
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):  # LoRA's B starts at zero, so A moves from the second step on
        optimizer.zero_grad()
        loss(made(encode(batch(made)))).backward()
        optimizer.step()


def same(left: Policy, right: Policy) -> bool:
    encoding = encode(batch(left))
    prompts = [[5, 6, 7], [8, 9], [20]]
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 0, "backspace_bias": 2.0}
    actions = [[t.chosen for t in p.generate(prompts, **options).trajectories] for p in (left, right)]
    with torch.no_grad():
        return actions[0] == actions[1] and torch.equal(left(encoding).value, right(encoding).value)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_lora_policy_loads_on_the_stock_base_and_is_small(tied: bool, tmp_path: Path) -> None:
    base = tiny("Llama", tie_word_embeddings=tied)
    base.save_pretrained(tmp_path / "base")
    made = Policy.from_pretrained(tmp_path / "base", peft_config=lora())
    step(made)
    made.save_pretrained(tmp_path / "saved")
    loaded = Policy.from_pretrained(tmp_path / "saved")
    assert same(made, loaded)
    assert not same(Policy.from_pretrained(tmp_path / "base"), loaded)  # the control: training did change it

    beyond_adapter = [p for p in (tmp_path / "saved").iterdir() if p.name.startswith("sequencematch.")]
    assert sum(p.stat().st_size for p in beyond_adapter) <= 4 * (9 * HIDDEN + 25) + 16 * 1024
    names = {p.name for p in (tmp_path / "saved").iterdir()}
    assert names == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
        "sequencematch.json",
        "sequencematch.safetensors",
    }


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_full_fine_tune_round_trips(tied: bool, tmp_path: Path) -> None:
    made = Policy.from_pretrained(tiny("Llama", tie_word_embeddings=tied))
    step(made)
    made.save_pretrained(tmp_path / "saved")
    assert same(made, Policy.from_pretrained(tmp_path / "saved"))
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")  # any other tool reads it too
    assert plain.config.vocab_size == VOCAB


def test_saving_again_replaces_the_folder_and_a_failure_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = policy()
    made.save_pretrained(tmp_path / "saved")
    step(made)
    with monkeypatch.context() as patched:
        patched.setattr("sequencematch.policy.storage.save_file", _disk_full)
        with pytest.raises(OSError, match="disk full"):
            made.save_pretrained(tmp_path / "saved")
    assert not same(made, Policy.from_pretrained(tmp_path / "saved"))
    made.save_pretrained(tmp_path / "saved")
    assert same(made, Policy.from_pretrained(tmp_path / "saved"))
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]  # nothing half-written is left beside it


def _disk_full(*_: object, **__: object) -> None:
    raise OSError("disk full")


def test_a_half_written_folder_is_refused(tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path / "saved")
    manifest = tmp_path / "saved" / "sequencematch.json"
    model = tmp_path / "saved" / "model.safetensors"
    whole = model.read_bytes()
    model.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"is damaged: model.safetensors should have \d+ bytes and has \d+\."):
        Policy.from_pretrained(tmp_path / "saved")
    model.write_bytes(whole)
    text = manifest.read_text()
    manifest.write_text(json.dumps({**json.loads(text), "format": 99}))
    with pytest.raises(ValueError, match=r"has format 99, this version reads 2 and older\. Update sequencematch"):
        Policy.from_pretrained(tmp_path / "saved")
    manifest.unlink()
    with pytest.raises(ValueError, match=r"is incomplete: sequencematch\.json is missing\. Save the policy again"):
        Policy.from_pretrained(tmp_path / "saved")


def test_what_can_not_be_a_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a causal language model with an output layer"):
        Policy.from_pretrained(tiny("Llama").base_model)
    with pytest.raises(ValueError, match=r"`model\.config\.eos_token_id` must be set, or a tokenizer with <eos> given"):
        Policy.from_pretrained(tiny("Llama", eos_token_id=None))
    with pytest.raises(ValueError, match="`attn_implementation` would be ignored: the model is loaded already"):
        Policy.from_pretrained(tiny("Llama"), attn_implementation="eager")
    with pytest.raises(ValueError, match="`peft_config` must leave the output layer alone"):
        Policy.from_pretrained(
            tiny("Llama", tie_word_embeddings=False),
            peft_config=LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"),
        )


def test_an_output_layer_that_peft_trains_whole_is_read_as_it_is_trained() -> None:
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    made = Policy.from_pretrained(tiny("Llama", tie_word_embeddings=False), peft_config=config)
    step(made)
    encoding = encode(batch(made))
    expected = slow_scores(made, batch(made), encoding)
    torch.testing.assert_close(made(encoding).value, expected.value, rtol=1e-4, atol=1e-5)


def test_under_autocast_the_offset_stays_in_float32() -> None:
    """V is in float32 whatever the model computes in; bfloat16 would round an offset of some 30 by tenths."""
    backspace = Policy(tiny("Llama")).backspace
    with torch.no_grad():
        for parameter in backspace.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    hidden, position = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)), torch.arange(5)
    exact = backspace.offset(hidden, position)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = backspace.offset(hidden, position)
    assert cast.dtype == torch.float32
    assert torch.equal(cast, exact)


def test_padding_is_a_special_token_of_the_policy_where_the_model_has_it() -> None:
    tokenizer = character_tokenizer()
    assert tokenizer.pad_token_id == 0
    assert Policy(llama(), tokenizer).space.special == {0, 1, 2}
    assert Policy(llama(pad_token_id=7)).space.pad == 7
    assert Policy(llama()).space.pad is None


def test_an_adapter_of_any_name_is_restored(tmp_path: Path) -> None:
    for name in ("default", "mine"):
        saved, other = (Policy(get_peft_model(llama(), lora(), adapter_name=name)) for _ in range(2))
        with torch.no_grad():
            for parameter in saved.model.parameters():
                parameter.add_(1.0 if parameter.requires_grad else 0.0)
        storage.save_beside(saved.model, None, saved.backspace, tmp_path / name)
        weights = {key: tensor.clone() for key, tensor in saved.state_dict().items() if "lora_" in key}
        assert any(not torch.equal(tensor, other.state_dict()[key]) for key, tensor in weights.items())
        storage.restore(other.model, other.backspace, tmp_path / name)
        assert all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in weights.items())


def test_a_policy_of_ours_on_the_hub_keeps_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub itself is played by a folder: there is none to ask here."""
    policy = Policy(llama(), character_tokenizer())
    with torch.no_grad():
        policy.backspace.row.fill_(7.0)
    policy.save_pretrained(tmp_path / "snapshot")
    asked: list[str] = []

    def cached_file(name: str, file: str, **_: object) -> str:
        asked.append(f"{name}/{file}")
        return str(tmp_path / "snapshot" / file)

    monkeypatch.setattr(storage, "cached_file", cached_file)
    monkeypatch.setattr(storage, "snapshot_download", lambda *_, **__: str(tmp_path / "snapshot"))
    assert Policy.from_pretrained("someone/policy").backspace.row.eq(7).all()
    assert asked == ["someone/policy/sequencematch.json"]
