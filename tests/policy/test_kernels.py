"""The Triton kernels: on a GPU, or on a CPU in Triton's interpreter, which `make test-kernels` installs and turns on."""

import copy
import importlib.util
import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from sequencematch.policy.decoding.decoder import Decoder, Limits
from sequencematch.policy.decoding.search import REMEMBERED, DeletedTokens
from tests.policy.emulated_graphs import emulate
from tests.policy.test_generation import MODELS, TIE, case_of, first_differences, naive, with_row
from tests.policy.test_graph_decoder import REPLAYED

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs triton, and a GPU or its interpreter: make test-kernels",
)
#: The interpreter multiplies the bits of bfloat16 as if they were numbers, and cuts where a GPU rounds.
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="the interpreter knows no bfloat16")
BFLOAT16 = pytest.param(torch.bfloat16, marks=on_gpu)
large = pytest.mark.skipif(not HAS_GPU, reason="takes minutes in the interpreter")


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


#: Relative to the result; a scale is handed to a kernel in float32, also where all else is float64. A result rounded to
#: bfloat16 errs by 1e-3 here, and float16 has three bits more.
ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    ("rows", "heads", "key_heads", "columns", "dim"),
    [
        (3, 4, 4, 40, 16),
        (3, 4, 2, 40, 80),
        (2, 9, 3, 700, 64),
        (2, 4, 1, 300, 256),
        (33, 4, 4, 40, 16),  # columns are not split
        pytest.param(64, 32, 32, 300, 128, marks=large),
    ],
)
def test_the_attention_kernel_is_attention(
    dtype: torch.dtype, window: int | None, rows: int, heads: int, key_heads: int, columns: int, dim: int
) -> None:
    from sequencematch.policy.decoding.ragged_attention import ragged_attention

    generator = torch.Generator(DEVICE).manual_seed(rows)
    query, keys, values = (
        torch.randn(rows, n, width, dim, dtype=dtype, device=DEVICE, generator=generator)
        for n, width in ((heads, 1), (key_heads, columns), (key_heads, columns))
    )
    column = torch.randint(0, columns, (rows,), device=DEVICE, generator=generator)
    column[0], column[-1] = 0, columns - 1
    ours = ragged_attention(query, keys, values, column, dim**-0.5, window)
    truth = plain_attention(query, keys, values, column, dim**-0.5, window)
    assert float((ours - truth).norm() / truth.norm()) < ROUNDING[dtype]


@pytest.mark.parametrize("cut", ["neither", "values", "keys and values"])
def test_the_kernel_that_writes_puts_tokens_at_their_columns(cut: str) -> None:
    """Also where they are cut from a projection to queries, keys and values: a rotation leaves keys whole, not values."""
    from sequencematch.policy.decoding.ragged_attention import write_columns

    generator = torch.Generator(DEVICE).manual_seed(0)
    keys, values = torch.randn(2, 5, 3, 20, 24, device=DEVICE, generator=generator).unbind()
    projected = torch.randn(5, 1, 9, 24, device=DEVICE, generator=generator).transpose(1, 2)
    new_keys, new_values = projected[:, 3:6], projected[:, 6:]
    assert not new_values.is_contiguous()
    new_keys = new_keys if "keys" in cut else new_keys.contiguous()
    new_values = new_values if "values" in cut else new_values.contiguous()
    assert (new_keys.stride() == new_values.stride()) == (cut != "values")
    column = torch.tensor([0, 19, 7, 7, 3], device=DEVICE)
    expected = keys.clone(), values.clone()
    for whole, part in zip(expected, (new_keys, new_values), strict=True):
        whole[torch.arange(5, device=DEVICE), :, column] = part[:, :, 0]
    write_columns(keys, values, new_keys, new_values, column)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(20))
def test_the_kernels_of_a_search_do_what_its_functions_do(seed: int, dtype: torch.dtype) -> None:
    """To the bit: they compare and copy logits, and add log `min_p` once. A vocabulary takes several blocks in most cases."""
    from sequencematch.policy.decoding.search_kernels import keep_open, remember

    generator = torch.Generator(DEVICE).manual_seed(seed)
    rows, vocab, largest = 24, [40, 4095, 10_000][seed % 3], 6
    limits = Limits(2, frozenset({2, 5}), vocab, max_new_tokens=3, max_actions=12)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=DEVICE)

    def decoder() -> Decoder:
        """A decoder without a model: only the tensors that a search reads."""
        made = object.__new__(Decoder)
        made.limits, made.all_ends, made.deleted = limits, torch.tensor([2, 5], device=DEVICE), copy.deepcopy(deleted)
        made.size, made.prompt, made.taken, made.floor, made.tokens = size, prompt, taken, floor.clone(), stack
        return made

    deleted = DeletedTokens(rows, largest, torch.device(DEVICE))
    few = draw(0, min(vocab, 40), *deleted.tokens.shape)  # the same token several times
    deleted.tokens, deleted.count = few.int(), draw(0, 1 + REMEMBERED, rows, largest + 1)
    size, floor, taken, prompt = draw(1, largest, rows), draw(1, largest, rows), draw(0, 14, rows), draw(1, 2, rows)
    stack, slot = draw(0, vocab, rows, largest + 2), torch.arange(rows, device=DEVICE)
    logits = 3 * torch.randn(rows, vocab + 1, generator=generator, device=DEVICE, dtype=dtype)
    if seed % 2:  # rows in which nothing is left
        logits[torch.rand(logits.shape, generator=generator, device=DEVICE) < 0.99] = -torch.inf
    pops = (draw(0, 2, rows) > 0) & (size > 1)
    pushes = ~pops & (draw(0, 3, rows) > 0)

    acts = draw(0, 4, rows) > 0
    pops, pushes = pops & acts, pushes & acts

    truth, expected = decoder(), logits.clone()
    wanted = truth._search(expected, 0.05, slot, acts)
    truth._remember(slot, wanted, pops, pushes)
    ours, found = decoder(), logits.clone()
    options: dict[str, Any] = {"bkspc": vocab, "ends": ours.all_ends, "eos": 2, "max_new_tokens": 3, "max_actions": 12}
    assert ours.deleted is not None
    assert truth.deleted is not None
    stays = keep_open(found, ours.deleted, size, prompt, floor, taken, acts, min_p=0.05, **options)
    remember(ours.deleted, ours.floor, stack, size, stays, pops, pushes)
    assert torch.equal(found[acts], expected[acts])
    assert torch.equal(found[~acts], logits[~acts])
    assert torch.equal(stays[acts], wanted[acts])
    assert torch.equal(ours.floor, truth.floor)
    for name in ("tokens", "count"):  # no state has size 0: its entries are scratch
        assert torch.equal(getattr(ours.deleted, name)[:, 1:], getattr(truth.deleted, name)[:, 1:])
    assert not torch.equal(expected, logits)


@pytest.mark.parametrize(
    ("rows", "heads", "times"), [(5, 9, 1), (3, 6, 11), (1, 2, 7), pytest.param(3, 32, 70, marks=large)]
)
@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
def test_rotations_and_their_gradients_are_those_of_the_model(
    dtype: torch.dtype, rows: int, heads: int, times: int
) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from sequencematch.policy.rotation import rotate

    generator = torch.Generator(DEVICE).manual_seed(0)
    x, gradient = torch.randn(2, rows, times, heads, 24, dtype=dtype, device=DEVICE, generator=generator)
    # Halves that differ say more than angles would; one row of them serves all.
    for angles, angle_dtype in itertools.product((rows, 1), (dtype, torch.float32)):
        cos, sin = torch.randn(2, angles, times, 24, dtype=angle_dtype, device=DEVICE, generator=generator)
        found = []
        for kind, turn in ((dtype, rotate), (torch.float32, lambda x, *a: apply_rotary_pos_emb(x, x, *a)[0])):
            leaf = x.to(kind).transpose(1, 2).requires_grad_()
            turned = turn(leaf, *((cos, sin) if turn is rotate else (cos.float(), sin.float())))
            assert turned.dtype == kind
            found.append((turned, *torch.autograd.grad(turned, leaf, gradient.to(kind).transpose(1, 2))))
        for ours, exact in zip(*found, strict=True):
            torch.testing.assert_close(ours.float(), exact, rtol=2**-8, atol=1e-5)
    plain = torch.ones(rows, heads, times, 24, dtype=dtype, device=DEVICE).requires_grad_()
    cos = sin = torch.ones(1, times, 24, dtype=dtype, device=DEVICE)
    rotate(plain, cos, sin).sum().backward()  # the gradient of a sum has no strides
    assert plain.grad is not None
    assert plain.grad.unique().tolist() == [0, 2]


@pytest.mark.skipif(HAS_GPU, reason="test_cuda.py has real graphs")
@pytest.mark.parametrize("setting", REPLAYED)
@pytest.mark.parametrize(("model", "tie"), [("float64", 0), ("gemma3", TIE)])
def test_decoding_by_kernels_differs_from_the_naive_sampler_at_ties_only(
    model: str, tie: float, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention, writing and search by kernels, in steps as they are captured."""
    emulate(monkeypatch)
    monkeypatch.setattr(
        "sequencematch.policy.decoding.ragged_attention.MIN_PROGRAMS", 1
    )  # each takes milliseconds here
    case = case_of(model, setting)
    result = with_row(MODELS[model]()).generate(case.prompts[:3], batch_size=2, **case.options)
    differences = first_differences(result, naive(model, setting)[:3])
    assert all(difference.margin < tie for difference in differences), differences
