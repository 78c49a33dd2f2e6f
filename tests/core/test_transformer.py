"""The mask is right in a real transformer: one pass over encoded rows equals a pass over each state alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sequencematch.core.encoding import Encoding, encode
from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.core.noise import add_noise, token_noise
from sequencematch.core.objectives import Scores, sequencematch_loss

SPACE = ActionSpace(vocab_size=11, eos=10, bos=9)
BK, EOS = SPACE.bkspc, SPACE.eos
TOLERANCE = 1e-10  # float64 rounding (2e-16) through two layers and up to forty summed positions, with room to spare


def trajectories() -> list[Trajectory]:
    """Data with noise and rollouts with deletions, pairwise from one prompt: into it, at its floor, through to <bos>."""
    generator = torch.Generator().manual_seed(3)
    noise = token_noise(SPACE)
    prompts = [(9, 1, 2, 3), (9, 4), (9, 5, 6)]
    data = [
        Trajectory.demonstration(SPACE, prompt, completion)
        for prompt, completion in zip(prompts, [(7, 8), (1,), (0, 0, 3)], strict=True)
    ]
    return [
        *(add_noise(trajectory, 0.7, noise, generator) for trajectory in data),
        Trajectory.rollout(SPACE, prompts[0], (7, BK, BK, BK, 5, 6, BK, 7, EOS)),
        Trajectory.rollout(SPACE, prompts[1], (BK, BK, BK, 2, 3, BK, 4, BK, BK, 8, 1)),
        Trajectory.rollout(SPACE, prompts[2], (BK, 1, BK, BK, 2, 3, 4, BK, 5, EOS), floor=3),
        Trajectory.rollout(SPACE, prompts[2], (4, 4, 4, EOS)),
    ]


ENCODINGS: dict[str, Callable[[list[Trajectory]], Encoding]] = {
    "tree": encode,
    "paper": lambda batch: encode(batch, layout="paper"),
    "tree, packed": lambda batch: encode(batch, row_length=27),
    "paper, packed": lambda batch: encode(batch, layout="paper", row_length=40),
    "tree, shared prompts": lambda batch: encode(batch, row_length=27, share_prompts=True),
    "paper, shared prompts": lambda batch: encode(batch, layout="paper", row_length=40, share_prompts=True),
}
every_encoding = pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS.keys())


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """Random weights, large enough that attention matters; the last output row is `<bkspc>`, which is never an input."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=SPACE.size, num_key_value_heads=1, initializer_range=0.5, max_position_embeddings=64, **sizes
    )
    model = LlamaForCausalLM(config)
    # transformers' LlamaRMSNorm rounds to float32 whatever the model's dtype, which alone is worth 1e-5 here.
    for parent in [module for module in model.modules() if not isinstance(module, LlamaRMSNorm)]:
        for name, child in parent.named_children():
            if isinstance(child, LlamaRMSNorm):
                setattr(parent, name, torch.nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
    return model.double()


def visit_logits(llama: LlamaForCausalLM, encoding: Encoding) -> Tensor:
    """[batch, step+1, action] logits of every visit from one pass over the encoded rows."""
    blocked = torch.finfo(torch.float64).min
    additive = torch.zeros(encoding.attend().shape, dtype=torch.float64).masked_fill(~encoding.attend(), blocked)
    output = llama(input_ids=encoding.tokens, attention_mask=additive[:, None], position_ids=encoding.position_ids)
    return output.logits.flatten(0, 1)[encoding.visit]


def state_logits(llama: LlamaForCausalLM, batch: list[Trajectory]) -> list[Tensor]:
    """For each trajectory the [step+1, action] logits of its states, each run alone through the model."""
    return [
        torch.stack([llama(input_ids=torch.tensor([state.tokens])).logits[0, -1] for state in trajectory.states()])
        for trajectory in batch
    ]


def gradients(llama: LlamaForCausalLM, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(llama.parameters())))


def largest_difference(left: list[Tensor], right: list[Tensor]) -> float:
    assert len(left) == len(right)
    return max(float((a - b).detach().abs().max()) for a, b in zip(left, right, strict=True))


def compare_with_states_alone(
    llama: LlamaForCausalLM, encoding: Encoding, batch: list[Trajectory]
) -> tuple[float, float]:
    """The largest difference in any visit's logits, and in any parameter's gradient of a random function of all of them."""
    encoded = visit_logits(llama, encoding)
    alone = state_logits(llama, batch)
    encoded_rows = [encoded[b, : len(rows)] for b, rows in enumerate(alone)]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(rows.shape, generator=generator, dtype=torch.float64) for rows in alone]

    def function(logits: list[Tensor]) -> Tensor:
        return torch.stack([(w * rows.tanh()).sum() for w, rows in zip(weights, logits, strict=True)]).sum()

    in_gradients = largest_difference(gradients(llama, function(encoded_rows)), gradients(llama, function(alone)))
    return largest_difference(encoded_rows, alone), in_gradients


@every_encoding
def test_every_visit_has_the_logits_and_gradients_of_its_state_alone(
    llama: LlamaForCausalLM, encoding: Callable[[list[Trajectory]], Encoding]
) -> None:
    batch = trajectories()
    in_logits, in_gradients = compare_with_states_alone(llama, encoding(batch), batch)
    assert in_logits <= TOLERANCE
    assert in_gradients <= TOLERANCE


@every_encoding
def test_with_deleted_at_ignored_the_same_comparison_fails(
    llama: LlamaForCausalLM, encoding: Callable[[list[Trajectory]], Encoding]
) -> None:
    batch = trajectories()
    right = encoding(batch)
    causal = Encoding(**{**vars(right), "deleted_at": torch.full_like(right.deleted_at, right.tokens.shape[1])})
    in_logits, in_gradients = compare_with_states_alone(llama, causal, batch)
    assert in_logits > 0.1
    assert in_gradients > 0.1


def test_shared_prompts_use_fewer_nodes_and_one_row_less_of_padding() -> None:
    batch = trajectories()
    packed, shared = ENCODINGS["tree, packed"](batch), ENCODINGS["tree, shared prompts"](batch)
    assert shared.tokens.shape[0] < packed.tokens.shape[0]


@every_encoding
def test_the_loss_and_its_gradients_do_not_depend_on_layout_packing_or_sharing(
    llama: LlamaForCausalLM, encoding: Callable[[list[Trajectory]], Encoding]
) -> None:
    batch = trajectories()

    def loss(encoded: Encoding) -> Tensor:
        scores = Scores.from_logits(visit_logits(llama, encoded), encoded)
        return sequencematch_loss(scores[:3], scores[3:], alpha=0.1, gamma=0.9).loss

    expected, got = loss(encode(batch)), loss(encoding(batch))
    assert abs(float((expected - got).detach())) <= TOLERANCE
    assert largest_difference(gradients(llama, expected), gradients(llama, got)) <= TOLERANCE
