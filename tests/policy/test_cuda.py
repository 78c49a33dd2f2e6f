"""On a GPU: FlexAttention, decoding, and the head, against the same thing done plainly."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sequencematch.core.encoding import encode
from sequencematch.core.mdp import Trajectory
from sequencematch.core.objectives import sequencematch_loss
from sequencematch.policy import Policy
from sequencematch.policy.graphs import can_replay
from tests.policy.test_generation import (
    FLOAT32,
    MODELS,
    SETTINGS,
    TIE,
    case_of,
    first_differences,
    naive,
    with_row,
)
from tests.policy.tiny_models import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def long_batch(policy: Policy) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in (400, 300, 350, 200):
        actions = torch.randint(2, policy.space.vocab_size, (length,), generator=generator)
        actions[torch.rand(length, generator=generator) < 0.2] = policy.space.bkspc
        made.append(Trajectory.rollout(policy.space, (5, 6, 7), (*actions.tolist(), policy.space.eos)))
    return made


def loss_and_gradients(name: str, implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
    model = tiny(name, **SIZES)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.06, generator=torch.Generator().manual_seed(parameter.numel()))
    model = model.to(device="cuda", dtype=dtype)
    model.set_attn_implementation(implementation)
    policy = Policy.from_pretrained(model)
    encoding = encode(long_batch(policy), row_length=768, device="cuda")
    scores = policy(encoding)
    loss = sequencematch_loss(scores[:2], scores[2:], alpha=0.1, gamma=0.99).loss
    parameters = list(policy.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [scores.value, torch.cat([g.float().flatten() for g in gradients if g is not None])]


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_flex_attention_errs_at_most_twice_as_much_as_dense_attention_in_bfloat16(name: str) -> None:
    exact = loss_and_gradients(name, "sdpa", torch.float32)
    dense = loss_and_gradients(name, "sdpa", torch.bfloat16)
    flex = loss_and_gradients(name, "flex_attention", torch.bfloat16)
    for part, truth, plain, ours in zip(("values", "gradients"), exact, dense, flex, strict=True):
        error, allowed = (float((x - truth).norm() / truth.norm()) for x in (ours, plain))
        print(f"{name} {part}: relative error {error:.2e} with FlexAttention, {allowed:.2e} dense")
        assert error <= 2 * allowed


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, column: Tensor, scale: float, window: int | None
) -> Tensor:
    """In float64, over all columns, most of them masked."""
    place = torch.arange(keys.shape[2], device=keys.device)
    keep = (place <= column[:, None]) & (place > column[:, None] - (window or len(place)))
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, 1).double() for part in (keys, values))
    score = (query.double() @ keys.mT * scale).masked_fill(~keep[:, None, None], -torch.inf)
    return score.softmax(-1) @ values


#: Relative to the result; a scale is handed to a kernel in float32, also where all else is float64.
ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-6, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    ("rows", "heads", "key_heads", "columns", "dim"), [(3, 4, 4, 40, 16), (2, 9, 3, 700, 64), (64, 32, 32, 300, 128)]
)
def test_the_attention_kernel_is_attention(
    dtype: torch.dtype, window: int | None, rows: int, heads: int, key_heads: int, columns: int, dim: int
) -> None:
    from sequencematch.policy.prefix_attention import prefix_attention

    generator = torch.Generator("cuda").manual_seed(rows)
    query, keys, values = (
        torch.randn(rows, n, width, dim, dtype=dtype, device="cuda", generator=generator)
        for n, width in ((heads, 1), (key_heads, columns), (key_heads, columns))
    )
    column = torch.randint(0, columns, (rows,), device="cuda", generator=generator)
    column[0], column[-1] = 0, columns - 1
    ours = prefix_attention(query, keys, values, column, dim**-0.5, window)
    truth = plain_attention(query, keys, values, column, dim**-0.5, window)
    assert float((ours - truth).norm() / truth.norm()) < ROUNDING[dtype]


REPLAYED = [name for name, options in SETTINGS.items() if not {"ban_deleted", "logits_processor"} & set(options)]


@pytest.mark.parametrize("setting", REPLAYED)
@pytest.mark.parametrize(("model", "tie"), [("float64", 0), ("float32", TIE), ("mistral", TIE), ("gemma3", TIE)])
def test_a_replayed_graph_differs_from_the_naive_sampler_at_ties_only(model: str, tie: float, setting: str) -> None:
    """And in float64 not at all. With four slots they are filled again while other rows run on."""
    case, policy = case_of(model, setting), with_row(MODELS[model]().to("cuda"))
    assert can_replay(policy)
    oracle = naive(model, setting)
    for batch_size in (4, 64):
        result = policy.generate(case.prompts, batch_size=batch_size, **case.options)
        differences = first_differences(result, oracle)
        assert all(difference.margin < tie for difference in differences), differences
        others = set(range(len(oracle))) - {difference.row for difference in differences}
        for row in others:
            log_probs = torch.tensor([step.log_prob for step in oracle[row]])
            torch.testing.assert_close(result.log_probs[row], log_probs, atol=FLOAT32, rtol=0)
            values = torch.tensor([step.value for step in oracle[row]])
            torch.testing.assert_close(result.values[row], values, atol=FLOAT32, rtol=0)
    assert any(step.executed == policy.space.bkspc for steps in oracle for step in steps)


@pytest.mark.parametrize("setting", ["greedy, deleted tokens banned", "sampled, repetition penalty"])
def test_what_needs_the_host_chooses_the_same_actions_as_the_cpu(setting: str) -> None:
    case = case_of("float64", setting)
    truth = with_row(MODELS["float64"]()).generate(case.prompts, **case.options)
    ours = with_row(MODELS["float64"]().to("cuda")).generate(case.prompts, **case.options)
    assert [t.chosen for t in ours.trajectories] == [t.chosen for t in truth.trajectories]


def test_a_graph_that_is_kept_follows_weights_that_are_trained() -> None:
    """A graph holds addresses: an optimiser that writes in place is seen by the next replay."""
    policy = with_row(MODELS["float64"]().to("cuda"))
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 1}
    before = policy.generate([[5, 6]] * 8, **options)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    kept = policy.spare.kept
    after = policy.generate([[5, 6]] * 8, **options)
    assert kept is not None
    assert policy.spare.kept is not None
    assert kept[1] is policy.spare.kept[1]
    truth = policy.to("cpu").generate([[5, 6]] * 8, **options)
    assert [t.chosen for t in after.trajectories] == [t.chosen for t in truth.trajectories]
    assert [t.chosen for t in after.trajectories] != [t.chosen for t in before.trajectories]


def test_logits_that_are_nan_are_refused_though_nobody_looks_at_every_step() -> None:
    policy = with_row(MODELS["float32"]().to("cuda"))
    with torch.no_grad():
        policy.base.get_output_embeddings().weight[7, 0] = torch.nan
    with pytest.raises(ValueError, match="logits are NaN: nothing can be chosen from them"):
        policy.generate([5, 6], max_new_tokens=4, seed=0)
