"""Which models can delete: one encoded pass against fresh forwards, architecture by architecture."""

import re

import pytest
import torch
from transformers import PreTrainedModel

from sequencematch.core.encoding import Encoding, encode
from sequencematch.core.mdp import Trajectory
from sequencematch.policy import Policy
from tests.policy.tiny_models import ARCHITECTURES, HIDDEN, tiny

REFUSED = {"Falcon (ALiBi)", "BLOOM", "MPT", "GPT-Neo (local attention)", "Mamba", "Qwen3-Next (hybrid)"}
#: Relative: float32's 6e-8 through two layers and some sums. A mask that is not honoured costs more than 1e-3.
ROUNDING = 2e-5


def batch(policy: Policy) -> list[Trajectory]:
    """Deletions back to the first token, deletions deep enough to leave a window, and data, from two prompts."""
    bk, eos = policy.space.bkspc, policy.space.eos
    return [
        Trajectory.rollout(policy.space, (5, 6, 7), (8, 9, bk, bk, bk, bk, bk, 10, 11, 12, 13, 14, 15, bk, 16, eos)),
        Trajectory.demonstration(policy.space, (5, 6, 7), (8, 9, 10, 11, 12, 13)),
        Trajectory.rollout(policy.space, (20, 21), (22, 23, 24, 25, 26, bk, bk, bk, 27, 28, 29, bk, 30)),
    ]


@torch.no_grad()
def relative_error(policy: Policy, encoding: Encoding, trajectories: list[Trajectory]) -> float:
    """The largest ‖encoded − fresh‖/‖fresh‖ over all visits of all trajectories."""
    hidden = policy.encoded_hidden_states(encoding, torch.arange(encoding.tokens.numel()))
    worst = 0.0
    for b, trajectory in enumerate(trajectories):
        for visit, state in zip(encoding.visit[b].tolist(), trajectory.states(), strict=False):
            fresh = policy.model(input_ids=torch.tensor([state.tokens])).logits[0, -1]
            encoded = policy.action_logits(hidden[visit])[:-1]
            worst = max(worst, float((encoded - fresh).norm() / fresh.norm()))
    return worst


def verdict(name: str) -> str:
    """What the documentation says of an architecture: exact, or the line it is refused with."""
    try:
        policy = Policy.from_pretrained(tiny(name))
    except ValueError as refusal:
        return f"refused: {refusal}"
    trajectories = batch(policy)
    encodings = [encode(trajectories), encode(trajectories, row_length=40, share_prompts=True)]
    assert max(relative_error(policy, encoding, trajectories) for encoding in encodings) <= ROUNDING
    return "exact"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_exact_or_refused_with_one_clear_line(name: str) -> None:
    said = verdict(name)
    assert (said == "exact") == (name not in REFUSED), said
    if name in REFUSED:
        assert re.fullmatch(r"refused: \S.{30,220}\.", said), said


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - REFUSED))
def test_with_deleted_at_ignored_no_architecture_is_exact(name: str) -> None:
    """Negative control: attention matters in each of these models, so the comparison can fail."""
    policy = Policy.from_pretrained(tiny(name))
    trajectories = batch(policy)
    right = encode(trajectories)
    causal = Encoding(**{**vars(right), "deleted_at": torch.full_like(right.deleted_at, right.tokens.shape[1])})
    assert relative_error(policy, causal, trajectories) > 1e-3


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - REFUSED))
def test_an_untrained_policy_hardly_ever_deletes(name: str) -> None:
    """Below 1/|X| in any state, by Jensen's inequality; here on states of the model and on random vectors of any size."""
    policy = Policy.from_pretrained(tiny(name))
    with torch.no_grad():
        encoding = encode(batch(policy))
        seen = policy.encoded_hidden_states(encoding, encoding.visit.unique())
        invented = torch.randn(200, HIDDEN) * torch.logspace(-1, 1, 200)[:, None]
        for hidden in (seen, invented):
            assert float(policy.action_logits(hidden).softmax(-1)[:, -1].max()) < 1e-3


def test_the_probe_refuses_a_model_that_is_silently_wrong() -> None:
    """A Llama that throws its mask away behaves like one nobody has listed."""
    model = tiny("Llama")
    forward = type(model.base_model).forward

    class Careless(type(model.base_model)):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            return forward(self, *args, **{**kwargs, "attention_mask": None})

    model.base_model.__class__ = Careless
    with pytest.raises(
        ValueError, match="LlamaForCausalLM has other logits after tokens are deleted than in a plain forward pass"
    ):
        Policy.from_pretrained(model)


def test_flash_attention_is_refused() -> None:
    model: PreTrainedModel = tiny("Llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="`attn_implementation` must take a mask, and 'flash_attention_2' does not"):
        Policy.from_pretrained(model)


def test_eager_attention_is_exact_too() -> None:
    model = tiny("Gemma 3")
    model.set_attn_implementation("eager")
    policy = Policy.from_pretrained(model)
    assert relative_error(policy, encode(batch(policy)), batch(policy)) <= ROUNDING
