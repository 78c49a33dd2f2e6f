"""On a GPU: attention, the head, decoding, and compiled layers, against the same thing done plainly."""

import copy
import gc
import pkgutil
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sequencematch.core.encoding import encode
from sequencematch.core.mdp import Trajectory
from sequencematch.core.objectives import sequencematch_loss
from sequencematch.policy import Policy, Sampling, causal_prefix, head
from sequencematch.policy.adapters import merged, without_input_casts
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX, causal_prefix_attention, causal_prefix_order
from sequencematch.policy.changes import changed
from sequencematch.policy.decoding.choice import Choice
from sequencematch.policy.decoding.cuda_graphs import GraphDecoder, can_capture
from sequencematch.policy.decoding.decoder import Decoder, Limits
from sequencematch.policy.fusing import fused, fusions
from sequencematch.policy.generation import rollouts
from sequencematch.policy.head import Unembedding, action_logits_and_values
from sequencematch.policy.modes import compile_layers
from tests.policy.test_fusing import strict
from tests.policy.test_generation import (
    FLOAT32,
    MODELS,
    TIE,
    case_of,
    first_differences,
    naive,
    policy_of,
    with_row,
)
from tests.policy.test_graph_decoder import REPLAYED
from tests.policy.test_head import dense, problem, results
from tests.policy.test_modes import compiled_calls
from tests.policy.tiny_models import tiny

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("error:A decoding step of .* can't be captured"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def divisions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each time from now on that attention is divided: how many nodes had no mask."""
    in_two, found = causal_prefix._prefix_and_rest, list[int]()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def record(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
    ) -> Tensor:
        found.append(query.shape[2] - attention_mask.shape[2])
        return in_two(module, query, key, value, attention_mask, **options)

    monkeypatch.setattr(causal_prefix, "_prefix_and_rest", record)
    return found


def replays(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each time from now on that a decoder for a GPU advances: whether it replays a graph."""
    advance, found = GraphDecoder.advance, list[bool]()

    def record(decoder: GraphDecoder) -> None:
        found.append(decoder.graph is not None)
        advance(decoder)

    monkeypatch.setattr(GraphDecoder, "advance", record)
    return found


def long_batch(policy: Policy, row_length: int = 768) -> list[Trajectory]:
    """Trajectories of which a row holds one, most of it not deleted."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for share in (0.91, 0.83, 0.78, 0.89):
        actions = torch.randint(2, policy.space.vocab_size, (int(share * row_length),), generator=generator)
        actions[torch.rand(len(actions), generator=generator) < 0.15] = policy.space.bkspc
        made.append(Trajectory.rollout(policy.space, (5, 6, 7), (*actions.tolist(), policy.space.eos)))
    return made


def moderate(name: str, dtype: torch.dtype) -> Policy:
    """With weights that let gradients through."""
    model = tiny(name, **SIZES)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.06, generator=torch.Generator().manual_seed(parameter.numel()))
    return Policy.from_pretrained(model.to(device="cuda", dtype=dtype))


def loss_and_gradients(policy: Policy, row_length: int = 768) -> list[Tensor]:
    """Values, and the gradients of a loss, of rows that all have a causal prefix."""
    encoding = encode(long_batch(policy, row_length), row_length=row_length, device="cuda")
    assert encoding.tokens.shape == (4, row_length)
    assert causal_prefix_order(encoding.deleted_at) is not None
    scores = policy(encoding)
    loss = sequencematch_loss(scores[:2], scores[2:], alpha=0.1, gamma=0.99).loss
    trained = [p for p in policy.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return [scores.value.detach(), torch.cat([g.float().flatten() for g in gradients if g is not None])]


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_faster_attention_errs_at_most_twice_as_much_as_dense_attention_in_bfloat16(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided = divisions(monkeypatch)

    def attending(implementation: str, dtype: torch.dtype) -> list[Tensor]:
        policy = moderate(name, dtype)
        policy.base.set_attn_implementation(implementation)
        divided.clear()  # of the probe, too
        made = loss_and_gradients(policy)
        assert bool(divided) == (implementation == CAUSAL_PREFIX)
        return made

    exact, dense = (attending("sdpa", dtype) for dtype in (torch.float32, torch.bfloat16))
    for implementation in ("flex_attention", CAUSAL_PREFIX):
        faster = attending(implementation, torch.bfloat16)
        for part, truth, plain, ours in zip(("values", "gradients"), exact, dense, faster, strict=True):
            error, allowed = (float((x - truth).norm() / truth.norm()) for x in (ours, plain))
            print(f"{name}, {implementation}, {part}: relative error {error:.2e}, {allowed:.2e} dense")
            assert 0 < error <= 2 * allowed


@pytest.mark.parametrize("nodes", [704, 768])
def test_scores_far_below_zero_leave_gradients_finite(nodes: int) -> None:
    """cuDNN's are NaN under a mask where half a tile of 128 keys is left over (torch 2.11 and later)."""
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = 0.1 * torch.randn(3, 1, 2, nodes, 64, device="cuda", generator=generator)
    query[..., 0], key[..., 0] = 1.0, -960.0  # every score about -120
    mask = torch.ones(1, 1, nodes, nodes, dtype=torch.bool, device="cuda").tril()
    upstream = torch.randn(1, nodes, 2, 64, device="cuda", generator=generator)

    def gradients(dtype: torch.dtype, attend: Any) -> list[Tensor]:
        given = [part.detach().to(dtype).requires_grad_() for part in (query, key, value)]
        seen, _ = attend(torch.nn.Module(), *given, mask)
        return [grad.float() for grad in torch.autograd.grad(seen, given, upstream.to(dtype))]

    plain = gradients(torch.bfloat16, sdpa_attention_forward)
    print(f"{nodes} nodes: {sum(int(grad.isnan().sum()) for grad in plain)} NaN by torch's own choice of a kernel")
    exact = gradients(torch.float32, causal_prefix_attention)
    for ours, truth in zip(gradients(torch.bfloat16, causal_prefix_attention), exact, strict=True):
        assert bool(ours.isfinite().all())
        ours, truth = ours[..., 1:], truth[..., 1:]  # the first is a difference of large numbers
        assert float((ours - truth).norm() / truth.norm()) < 0.1


@pytest.mark.parametrize(("trained", "kept"), [(False, 0), (True, 0), (True, 2**28)], ids=["frozen", "trained", "kept"])
def test_the_head_in_bfloat16_errs_at_most_twice_as_much_as_dense_logits(
    trained: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In sixteen slabs of 64 tokens, the last of 41: there a matrix product writes float32."""
    monkeypatch.setattr(head, "KEPT_ELEMENTS", kept)
    monkeypatch.setattr(head, "SLAB_ELEMENTS", 300 * 64)
    case = problem(torch.bfloat16, trained, sizes=(300, 128, 1001), device="cuda")
    hidden, unembedding, visit, action = case
    weight = unembedding.weight.detach().double().requires_grad_(trained)
    exact = hidden.detach().double().requires_grad_(), Unembedding(weight), visit, action
    made = action_logits_and_values(*case)  # held, or its node lets go of what it keeps
    node: Any = made[1].grad_fn
    assert len(node.kept) == (16 if kept else 0)
    assert (node.saved_tensors[-1] is None) == trained  # or ∂V/∂h
    three = (results(action_logits_and_values, *case), results(dense, *case), results(dense, *exact))
    for ours, plain, truth in zip(*three, strict=True):
        error, allowed = (float((x - truth).detach().norm() / truth.detach().norm()) for x in (ours, plain))
        print(f"relative error {error:.2e}, {allowed:.2e} dense")
        assert 0 < error <= 2 * allowed


#: Models by name, and the margin below which rounding may decide an action.
REPLAYED_MODELS = {"float64": 0, "float32": TIE, "mistral": TIE, "gemma3": TIE}


@pytest.mark.parametrize("setting", REPLAYED)
@pytest.mark.parametrize(("model", "tie"), REPLAYED_MODELS.items())
def test_a_replayed_graph_differs_from_the_naive_sampler_at_ties_only(model: str, tie: float, setting: str) -> None:
    """And in float64 not at all. With four slots they are filled again while other rows run on."""
    case, policy = case_of(model, setting), with_row(MODELS[model]().to("cuda"))
    assert can_capture(policy, policy.base)
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


@pytest.mark.parametrize("model", REPLAYED_MODELS)
def test_the_rows_of_replayed_graphs_delete_under_most_settings(model: str) -> None:
    """Not under all: random weights differ between versions of transformers, and some delete nothing when greedy."""
    bkspc = policy_of(model).space.bkspc
    deleting = [
        setting for setting in REPLAYED if any(s.executed == bkspc for steps in naive(model, setting) for s in steps)
    ]
    assert len(deleting) > 0.7 * len(REPLAYED), deleting


@pytest.mark.parametrize("setting", ["all at once", "sampled, repetition penalty", "search, repetition penalty"])
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
    (kept,) = policy.decoders.idle
    after = policy.generate([[5, 6]] * 8, **options)
    assert [decoder for _, decoder in policy.decoders.idle] == [kept[1]]
    truth = policy.to("cpu").generate([[5, 6]] * 8, **options)
    assert [t.chosen for t in after.trajectories] == [t.chosen for t in truth.trajectories]
    assert [t.chosen for t in after.trajectories] != [t.chosen for t in before.trajectories]


def decoded(kind: type[Decoder], policy: Policy, exact: Any) -> tuple[Decoder, float]:
    """A decoder after three steps in sixteen rows, each of which pushed every time, and its hidden vectors' largest error."""
    prompts = [[5 + n, 6, 7, 8 + n][: 1 + n % 4] for n in range(16)]
    limits, choice = Limits(policy.space.eos, policy.space.ends, policy.space.bkspc, 8, 33), Choice(greedy=True)
    decoder = kind(policy.base, policy.action_logits, limits, choice, slots=16, longest_prompt=4)
    decoder.fill(range(16), range(16), prompts, [])
    errors = []
    for step in range(1, 4):
        if isinstance(decoder, GraphDecoder):
            assert decoder.graph is not None
            decoder.graph.replay()
        else:
            list(decoder.decide())
            decoder.push()
        assert decoder.size.tolist() == [len(prompt) + step for prompt in prompts]
        for tokens, hidden, size in zip(decoder.tokens, decoder.hidden, decoder.size.tolist(), strict=True):
            with torch.no_grad(), torch.autocast("cuda", enabled=False):
                truth = exact(input_ids=tokens[None, :size]).last_hidden_state[0, -1]
            errors.append(float((hidden[size - 1] - truth).norm() / truth.norm()))
    return decoder, max(errors)


def test_a_captured_step_in_bfloat16_errs_at_most_twice_as_much_as_the_model_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norms and rotations are other kernels there, and attention is ours."""
    captured: list[str] = []

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            captured.extend([name] * torch.cuda.is_current_stream_capturing())
            return function(*args, **options)

        return call

    for module in ("torch.nn.functional.rms_norm", "sequencematch.policy.rotation.rotate"):
        monkeypatch.setattr(module, counted(module.split(".")[-1], pkgutil.resolve_name(module)))
    policy = Policy.from_pretrained(tiny("Llama", **SIZES).bfloat16().to("cuda"))
    exact = tiny("Llama", **SIZES).bfloat16().double().to("cuda").base_model
    _, error = decoded(GraphDecoder, policy, exact)
    # Two layers, each with two norms and a rotation of queries and of keys, and the norm behind them.
    assert (captured.count("rms_norm"), captured.count("rotate")) == (5, 4)
    _, allowed = decoded(Decoder, policy, exact)
    print(f"relative error {error:.1e} captured, {allowed:.1e} not")
    assert 0 < error <= 2 * allowed
    assert len(captured) == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_captured_under_autocast_errs_at_most_twice_as_much_as_one_that_is_not(dtype: torch.dtype) -> None:
    """As in training. Keys, which float32 weights turn in float32, are kept as attention takes them."""
    policy = Policy.from_pretrained(tiny("Llama", **SIZES).to(device="cuda", dtype=dtype))
    exact = tiny("Llama", **SIZES).to(dtype).double().to("cuda").base_model
    with torch.autocast("cuda", torch.bfloat16):
        (ours, error), (_, allowed) = (decoded(kind, policy, exact) for kind in (GraphDecoder, Decoder))
    print(f"relative error {error:.1e} captured, {allowed:.1e} not")
    assert 0 < error <= 2 * allowed
    assert {part.dtype for layer in ours.cache.stored.values() for part in layer} == {torch.bfloat16}


def test_angles_of_another_shape_are_left_to_the_model() -> None:
    from sequencematch.policy.rotation import can_rotate

    x = torch.zeros(3, 2, 5, 8, device="cuda")
    shapes = {
        (3, 5, 8): True,
        (1, 5, 8): True,
        (2, 5, 8): False,
        (3, 1, 8): False,
        (3, 5, 4): False,
        (3, 2, 5, 8): False,
    }
    assert {shape: can_rotate(x, *torch.zeros(2, *shape, device="cuda")) for shape in shapes} == shapes
    assert not can_rotate(x[0], *torch.zeros(2, 3, 5, 8, device="cuda"))
    assert not can_rotate(x, torch.zeros(3, 5, 8, device="cuda"), torch.zeros(1, 5, 8, device="cuda"))
    assert not can_rotate(x, *torch.zeros(2, 3, 5, 8, device="cuda", requires_grad=True))
    assert not can_rotate(x.cpu(), *torch.zeros(2, 3, 5, 8))


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
    with pytest.warns(UserWarning, match="can't be captured as a CUDA graph"):
        ours = policy.generate([[5, 6]] * 4, **options)  # type: ignore[arg-type]
    assert [t.chosen for t in ours.trajectories] == [
        t.chosen
        for t in plain.generate([[5, 6]] * 4, **options).trajectories  # type: ignore[arg-type]
    ]


def test_what_a_graph_depends_on_decides_whether_it_is_used_again() -> None:
    policy, options = with_row(MODELS["float64"]().to("cuda")), {"max_new_tokens": 8, "seed": 1}
    policy.generate([5, 6], **options)  # type: ignore[arg-type]
    ((_, first),) = policy.decoders.idle
    with torch.autocast("cuda", torch.bfloat16):
        policy.generate([5, 6], **options)  # type: ignore[arg-type]
    assert [decoder for _, decoder in policy.decoders.idle] == [first]
    stream = rollouts(policy, [[5, 6]] * 8, Sampling(**options), 4)  # type: ignore[arg-type]
    next(stream)
    policy.generate([5, 6], **options)  # type: ignore[arg-type]  # meanwhile
    del stream  # nobody asks for the rest
    assert len(policy.decoders.idle) == 2
    policy.base.model.layers[0].register_forward_hook(lambda *_: None)
    assert not can_capture(policy, policy.base)


def test_what_is_captured_in_inference_mode_is_not_kept_for_outside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, is_replayed = with_row(MODELS["float64"]().to("cuda")), replays(monkeypatch)
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 1}
    with torch.inference_mode():
        inside = policy.generate([[5, 6]] * 8, **options).trajectories
    assert not policy.decoders.idle
    outside = policy.generate([[5, 6]] * 8, **options).trajectories
    assert len(policy.decoders.idle) == 1
    with torch.inference_mode():
        again = policy.generate([[5, 6]] * 8, **options).trajectories
    assert inside == outside == again == policy.generate([[5, 6]] * 8, **options).trajectories
    assert len(is_replayed) >= 4
    assert all(is_replayed)


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


@pytest.mark.parametrize(("name", "row_length"), [("Llama", 768), ("Llama", 256), ("Gemma 3", 768), ("Gemma 3", 704)])
def test_compiled_layers_err_at_most_twice_as_much_as_layers_that_are_not(
    name: str, row_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows that are divided, in shorter ones, under sliding windows, and with half a tile of keys left over."""
    torch.compiler.reset()
    divided = divisions(monkeypatch)

    def trained(dtype: torch.dtype, *, is_compiled: bool) -> list[Tensor]:
        policy = moderate(name, dtype)
        if is_compiled:
            compile_layers(policy)
        policy.base.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
        divided.clear()  # of the probe
        made = loss_and_gradients(policy, row_length)
        assert bool(divided) == (row_length >= 512)
        return made

    exact = trained(torch.float64, is_compiled=False)
    plain = trained(torch.bfloat16, is_compiled=False)
    counters.clear()
    compiled = trained(torch.bfloat16, is_compiled=True)
    assert counters["stats"]["unique_graphs"] > 0
    for truth, eager, ours in zip(exact, plain, compiled, strict=True):
        error, allowed = (float((x - truth).norm() / truth.norm()) for x in (ours, eager))
        print(f"{name}, {row_length}: relative error {error:.2e} compiled, {allowed:.2e} not")
        assert 0 < error <= 2 * allowed


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("Llama", {"LlamaRMSNorm": 5, "module": 1, "Linear": 14}), ("Gemma 3", {"module": 1, "Linear": 14})],
)
def test_fused_kernels_err_at_most_twice_as_much_as_the_models_own(name: str, kinds: dict[str, int]) -> None:
    """In a pass as the trainer makes it: adapters in float32 under autocast, and recomputed activations."""
    from peft import LoraConfig

    torch.manual_seed(0)
    lora = LoraConfig(r=8, lora_alpha=4, target_modules="all-linear", init_lora_weights=False)
    policy = Policy.from_pretrained(moderate(name, torch.bfloat16).base, peft_config=lora)
    exact = loss_and_gradients(copy.deepcopy(policy).double())
    policy.base.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    found = fusions(policy.base)
    assert Counter(type(fusion.owner).__name__ for fusion in found) == kinds
    with changed(without_input_casts(policy)), torch.autocast("cuda", torch.bfloat16):
        own = loss_and_gradients(policy)
        with fused(strict(found)):
            ours = loss_and_gradients(policy)
    for truth, plain, fewer in zip(exact, own, ours, strict=True):
        error, allowed = (float((x - truth).norm() / truth.norm()) for x in (fewer, plain))
        print(f"{name}: relative error {error:.2e} fused, {allowed:.2e} not")
        assert 0 < error <= 2 * allowed


def test_all_weights_in_float32_are_trained_with_fused_kernels_under_autocast() -> None:
    """Without autocast queries are in float32, and the model's own rotary embeddings stay."""
    torch.manual_seed(0)
    policy = moderate("Llama", torch.float32).train()
    exact = loss_and_gradients(copy.deepcopy(policy).double())
    found = fusions(policy.base)
    assert Counter(type(fusion.owner).__name__ for fusion in found) == {"LlamaRMSNorm": 5, "module": 1}
    with torch.autocast("cuda", torch.bfloat16):
        own = loss_and_gradients(policy)
        with fused(strict(found)):
            ours = loss_and_gradients(policy)
    for truth, plain, fewer in zip(exact, own, ours, strict=True):
        error, allowed = (float((x - truth).norm() / truth.norm()) for x in (fewer, plain))
        print(f"relative error {error:.2e} fused, {allowed:.2e} not")
        assert 0 < error <= 2 * allowed
    with fused(strict(found)), pytest.raises(AssertionError, match="fell back"):
        loss_and_gradients(policy)


def test_capturing_a_step_calls_no_compiled_layer() -> None:
    policy = with_row(MODELS["float64"]().to("cuda"))
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 1}
    before = policy.generate([[5, 6]] * 8, **options).trajectories
    policy.decoders.idle.clear()  # or its graph is replayed
    compile_layers(policy)
    called = compiled_calls(policy)
    assert policy.generate([[5, 6]] * 8, **options).trajectories == before
    assert len(policy.decoders.idle) == 1
    assert not called


def test_a_policy_that_moves_divides_rows_as_its_device_likes() -> None:
    moved, built = Policy(tiny("Llama")), Policy(tiny("Llama").to("cuda"))
    assert moved.reorders_from == 0
    assert moved.to("cuda").reorders_from == built.reorders_from == 512
    assert moved.to("cpu").reorders_from == 0


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
