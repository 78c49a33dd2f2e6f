"""On a GPU: attention, decoding, and compiled layers, against the same thing done plainly."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from sequencematch.core.encoding import encode
from sequencematch.core.mdp import Trajectory
from sequencematch.core.objectives import sequencematch_loss
from sequencematch.policy import Policy, Sampling
from sequencematch.policy.compiling import compile_layers, uncompiled
from sequencematch.policy.generation import rollouts
from sequencematch.policy.graphs import Replayed, can_replay
from sequencematch.policy.merging import merged
from sequencematch.policy.rollback import Choice, Limits, Rollback
from sequencematch.policy.spine import SPINE, spine_order
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

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("error:A decoding step of .* can't be captured"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def long_batch(policy: Policy) -> list[Trajectory]:
    """Trajectories of which a row of 768 nodes holds one, most of it not deleted."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in (700, 640, 600, 680):
        actions = torch.randint(2, policy.space.vocab_size, (length,), generator=generator)
        actions[torch.rand(length, generator=generator) < 0.15] = policy.space.bkspc
        made.append(Trajectory.rollout(policy.space, (5, 6, 7), (*actions.tolist(), policy.space.eos)))
    return made


def loss_and_gradients(name: str, implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
    model = tiny(name, **SIZES)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.06, generator=torch.Generator().manual_seed(parameter.numel()))
    model = model.to(device="cuda", dtype=dtype)
    policy = Policy.from_pretrained(model)
    policy.base.set_attn_implementation(implementation)
    encoding = encode(long_batch(policy), row_length=768, device="cuda")
    assert spine_order(encoding.deleted_at) is not None
    scores = policy(encoding)
    loss = sequencematch_loss(scores[:2], scores[2:], alpha=0.1, gamma=0.99).loss
    parameters = list(policy.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [scores.value.detach(), torch.cat([g.float().flatten() for g in gradients if g is not None])]


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_faster_attention_errs_at_most_twice_as_much_as_dense_attention_in_bfloat16(name: str) -> None:
    exact = loss_and_gradients(name, "sdpa", torch.float32)
    dense = loss_and_gradients(name, "sdpa", torch.bfloat16)
    for implementation in ("flex_attention", SPINE):
        faster = loss_and_gradients(name, implementation, torch.bfloat16)
        for part, truth, plain, ours in zip(("values", "gradients"), exact, dense, faster, strict=True):
            error, allowed = (float((x - truth).norm() / truth.norm()) for x in (ours, plain))
            print(f"{name}, {implementation}, {part}: relative error {error:.2e}, {allowed:.2e} dense")
            assert 0 < error <= 2 * allowed


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


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_kernel_that_writes_puts_tokens_at_their_columns(is_transposed: bool) -> None:
    from sequencematch.policy.prefix_attention import write_columns

    generator = torch.Generator("cuda").manual_seed(0)
    keys, values = torch.randn(2, 5, 3, 20, 24, device="cuda", generator=generator).unbind()
    new = torch.randn(2, 5, 1, 3, 24, device="cuda", generator=generator).transpose(2, 3)
    new_keys, new_values = new if is_transposed else new.contiguous()
    new_keys = new_keys.contiguous()  # as a rotation leaves keys, and a projection values
    column = torch.tensor([0, 19, 7, 7, 3], device="cuda")
    expected = keys.clone(), values.clone()
    for whole, part in zip(expected, (new_keys, new_values), strict=True):
        whole[torch.arange(5, device="cuda"), :, column] = part[:, :, 0]
    write_columns(keys, values, new_keys, new_values, column)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


REPLAYED = [name for name, options in SETTINGS.items() if not {"ban_deleted", "logits_processor"} & set(options)]


@pytest.mark.parametrize("setting", REPLAYED)
@pytest.mark.parametrize(("model", "tie"), [("float64", 0), ("float32", TIE), ("mistral", TIE), ("gemma3", TIE)])
def test_a_replayed_graph_differs_from_the_naive_sampler_at_ties_only(model: str, tie: float, setting: str) -> None:
    """And in float64 not at all. With four slots they are filled again while other rows run on."""
    case, policy = case_of(model, setting), with_row(MODELS[model]().to("cuda"))
    assert can_replay(policy)
    oracle, rounding = naive(model, setting), FLOAT32 if model == "float64" else 10 * FLOAT32
    for batch_size in (4, 64):
        result = policy.generate(case.prompts, batch_size=batch_size, **case.options)
        differences = first_differences(result, oracle)
        assert all(difference.margin < tie for difference in differences), differences
        others = set(range(len(oracle))) - {difference.row for difference in differences}
        for row in others:
            log_probs = torch.tensor([step.log_prob for step in oracle[row]])
            torch.testing.assert_close(result.log_probs[row], log_probs, atol=rounding, rtol=0)
            values = torch.tensor([step.value for step in oracle[row]])
            torch.testing.assert_close(result.values[row], values, atol=rounding, rtol=0)
    deletes = any(step.executed == policy.space.bkspc for steps in oracle for step in steps)
    assert deletes or (model, setting) == ("mistral", "greedy, prompt protected")  # its weights never want to


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
    (kept,) = policy.spare.kept
    after = policy.generate([[5, 6]] * 8, **options)
    assert [decoder for _, decoder in policy.spare.kept] == [kept[1]]
    truth = policy.to("cpu").generate([[5, 6]] * 8, **options)
    assert [t.chosen for t in after.trajectories] == [t.chosen for t in truth.trajectories]
    assert [t.chosen for t in after.trajectories] != [t.chosen for t in before.trajectories]


def test_a_captured_step_in_bfloat16_errs_at_most_twice_as_much_as_the_model_itself() -> None:
    """Norms and rotations are other kernels there, and attention is ours."""
    policy = Policy.from_pretrained(tiny("Llama", **SIZES).bfloat16().to("cuda"))
    exact = tiny("Llama", **SIZES).bfloat16().double().to("cuda").base_model
    prompts = [[5, 6, 7, 8 + n][: 1 + n % 4] for n in range(16)]
    limits, choice = Limits(1, policy.space.bkspc, 8, 33), Choice(greedy=True)
    errors = []
    for kind in (Replayed, Rollback):
        decoder = kind(policy.base, policy.action_logits, limits, choice, slots=16, longest_prompt=4)
        decoder.fill(range(16), range(16), prompts, [])
        if isinstance(decoder, Replayed):
            assert decoder.graph is not None
            decoder.graph.replay()
        else:
            list(decoder.decide())
            decoder.push()
        for slot, size in enumerate(decoder.size.tolist()):
            truth = exact(input_ids=decoder.tokens[slot : slot + 1, :size]).last_hidden_state[0, -1].detach()
            errors.append(float((decoder.hidden[slot, size - 1] - truth).norm() / truth.norm()))
    captured, plain = max(errors[:16]), max(errors[16:])
    print(f"relative error {captured:.1e} captured, {plain:.1e} not")
    assert 0 < captured <= 2 * plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotations_are_those_of_the_model(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from sequencematch.policy.rotation import rotate

    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(5, 1, 9, 64, dtype=dtype, device="cuda", generator=generator).transpose(1, 2)
    half = torch.randn(5, 1, 32, dtype=dtype, device="cuda", generator=generator)
    cos, sin = (torch.cat([part, part], -1) for part in (half.cos(), half.sin()))
    expected, _ = apply_rotary_pos_emb(x.float(), x.float(), cos.float(), sin.float())
    torch.testing.assert_close(rotate(x, cos, sin).float(), expected, rtol=2**-8, atol=1e-5)


def test_rows_that_reach_their_limit_together_are_not_stepped_past_it() -> None:
    policy = with_row(MODELS["float64"]().to("cuda"))
    result = policy.generate([[5, 6]] * 4, max_new_tokens=9, seed=0, backspace_bias=-1e4)
    assert {len(t) for t in result.trajectories} == {10}  # nine tokens, and one too many: an <eos> in its place
    assert result.forward_passes == 1 + 10


def test_what_is_captured_leaves_the_model_as_it_was() -> None:
    from transformers.models.llama import modeling_llama

    rotation = modeling_llama.apply_rotary_pos_emb
    policy = Policy.from_pretrained(tiny("Llama", **SIZES).bfloat16().to("cuda"))
    attention = policy.base.config._attn_implementation
    policy.generate([5, 6], max_new_tokens=4, seed=0)
    assert modeling_llama.apply_rotary_pos_emb is rotation
    assert not any("forward" in vars(module) for module in policy.modules())
    assert policy.base.config._attn_implementation == attention


def test_a_step_that_cannot_be_captured_is_run_as_it_is() -> None:
    policy, plain = with_row(MODELS["float64"]().to("cuda")), with_row(MODELS["float64"]())
    layer, options = policy.base.model.layers[0].mlp, {"max_new_tokens": 8, "seed": 1}
    forward = layer.forward

    def asks_the_host(hidden: Tensor) -> Tensor:
        assert float(hidden.sum()) == float(hidden.sum())
        return forward(hidden)

    layer.forward = asks_the_host
    with pytest.warns(UserWarning, match="can't be captured and is run as it is"):
        ours = policy.generate([[5, 6]] * 4, **options)  # type: ignore[arg-type]
    assert [t.chosen for t in ours.trajectories] == [
        t.chosen
        for t in plain.generate([[5, 6]] * 4, **options).trajectories  # type: ignore[arg-type]
    ]


def test_what_a_graph_depends_on_decides_whether_it_is_used_again() -> None:
    policy, options = with_row(MODELS["float64"]().to("cuda")), {"max_new_tokens": 8, "seed": 1}
    policy.generate([5, 6], **options)  # type: ignore[arg-type]
    ((_, first),) = policy.spare.kept
    with torch.autocast("cuda", torch.bfloat16):
        policy.generate([5, 6], **options)  # type: ignore[arg-type]
    assert [decoder for _, decoder in policy.spare.kept] == [first]
    stream = rollouts(policy, [[5, 6]] * 8, Sampling(**options), 4)  # type: ignore[arg-type]
    next(stream)
    policy.generate([5, 6], **options)  # type: ignore[arg-type]  # meanwhile
    del stream  # nobody asks for the rest
    assert len(policy.spare.kept) == 2
    policy.base.model.layers[0].register_forward_hook(lambda *_: None)
    assert not can_replay(policy)


def test_a_policy_that_was_sampled_from_is_freed_with_its_last_name() -> None:
    policy = with_row(MODELS["float64"]().to("cuda"))
    policy.generate([5, 6], max_new_tokens=4, seed=0)
    watched = weakref.ref(policy)
    gc.disable()
    try:
        del policy
        assert watched() is None
    finally:
        gc.enable()


def test_logits_that_are_nan_are_refused_though_nobody_looks_at_every_step() -> None:
    policy = with_row(MODELS["float32"]().to("cuda"))
    with torch.no_grad():
        policy.base.get_output_embeddings().weight[7, 0] = torch.nan
    with pytest.raises(ValueError, match="logits are NaN: nothing can be chosen from them"):
        policy.generate([5, 6], max_new_tokens=4, seed=0)


def test_compiled_layers_err_at_most_twice_as_much_as_layers_that_are_not() -> None:
    """And decoding, which they take no part in, chooses the same."""

    def trained(dtype: torch.dtype, *, is_compiled: bool) -> list[Tensor]:
        policy = Policy.from_pretrained(tiny("Llama", **SIZES).to(device="cuda", dtype=dtype))
        if is_compiled:
            compile_layers(policy)
        policy.base.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
        scores = policy(encode(long_batch(policy), row_length=768, device="cuda"))
        loss = sequencematch_loss(scores[:2], scores[2:], alpha=0.1, gamma=0.99).loss
        gradients = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)
        return [scores.value.detach(), torch.cat([g.float().flatten() for g in gradients if g is not None])]

    exact = trained(torch.float64, is_compiled=False)
    plain = trained(torch.bfloat16, is_compiled=False)
    for truth, eager, ours in zip(exact, plain, trained(torch.bfloat16, is_compiled=True), strict=True):
        error, allowed = (float((x - truth).norm() / truth.norm()) for x in (ours, eager))
        print(f"relative error {error:.2e} compiled, {allowed:.2e} not")
        assert 0 < error <= 2 * allowed
    policy = with_row(MODELS["float64"]().to("cuda"))
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 1}
    before = policy.generate([[5, 6]] * 8, **options).trajectories
    compile_layers(policy)
    with uncompiled(policy):
        assert policy.generate([[5, 6]] * 8, **options).trajectories == before


def test_rollouts_of_an_adapter_are_those_of_the_merged_weights() -> None:
    import peft

    policy = with_row(MODELS["float64"]().to("cuda"))
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    adapted = Policy(peft.get_peft_model(policy.base, config), backspace=policy.backspace)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    adapted = adapted.double()
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 1}
    apart = adapted.generate([[5, 6]] * 8, **options)
    with merged(adapted):
        together = adapted.generate([[5, 6]] * 8, **options)
    assert [t.chosen for t in together.trajectories] == [t.chosen for t in apart.trajectories]
    again = adapted.generate([[5, 6]] * 8, **options)
    assert [t.chosen for t in again.trajectories] == [t.chosen for t in apart.trajectories]
