"""The head in slabs against dense logits: values, gradients, memory."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.timing import peak_bytes
from sequencematch.policy import head
from sequencematch.policy.head import Unembedding, action_logits_and_values

OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 3.0},
    "all": {"bias": True, "scale": 0.5, "softcap": 2.0},
}


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven slabs of eight tokens, the last of them short, instead of one."""
    monkeypatch.setattr(head, "SLAB_ELEMENTS", 8 * 37)


def problem(
    dtype: torch.dtype,
    trained: bool,
    *,
    bias: bool = False,
    scale: float = 1.0,
    softcap: float | None = None,
    sizes: tuple[int, int, int] = (37, 16, 50),
    device: str = "cpu",
) -> tuple[Tensor, Unembedding, Tensor, Tensor]:
    nodes, width, tokens = sizes
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden = normal(nodes, width).to(device, dtype).requires_grad_()
    weight = (normal(tokens, width) / 2).to(device, dtype).requires_grad_(trained)
    row = normal(tokens).to(device, dtype).requires_grad_(trained) if bias else None
    visit = torch.randint(0, nodes, (60,), generator=generator).to(device)
    action = torch.randint(0, tokens, (60,), generator=generator).to(device)
    return hidden, Unembedding(weight, row, scale, softcap), visit, action


def results(function: object, hidden: Tensor, unembedding: Unembedding, visit: Tensor, action: Tensor) -> list[Tensor]:
    """Logits, values and every gradient of a random function of both."""
    logit, value = function(hidden, unembedding, visit, action)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(1)
    mix = (torch.randn(len(logit), generator=generator).to(logit) * logit).sum() + (
        torch.randn(len(value), generator=generator).to(value) * value**2
    ).sum()
    parameters = [t for t in (hidden, unembedding.weight, unembedding.bias) if t is not None and t.requires_grad]
    return [logit, value, *torch.autograd.grad(mix, parameters)]


def dense(hidden: Tensor, unembedding: Unembedding, visit: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    logits = unembedding.logits(hidden)
    return logits[visit, action], logits.logsumexp(1)


def test_a_value_and_a_logit_by_hand() -> None:
    """h = (1, 2); rows (1, 0), (0, 1), (1, 1): logits 1, 2, 3, so V = log(e + e² + e³) and the second token has 2."""
    unembedding = Unembedding(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    logit, value = action_logits_and_values(
        torch.tensor([[1.0, 2.0]]), unembedding, torch.tensor([0]), torch.tensor([1])
    )
    assert logit.tolist() == [2.0]
    assert float(value) == pytest.approx(math.log(math.e + math.e**2 + math.e**3))


@pytest.mark.parametrize(("trained", "kept"), [(False, 0), (True, 0), (True, 2**28)], ids=["frozen", "trained", "kept"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_logits_values_and_gradients_equal_the_dense_computation(
    trained: bool, kept: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative 1e-6 in float32, as asked; 1e-13 in float64, where both are exact up to rounding."""
    monkeypatch.setattr(head, "KEPT_ELEMENTS", kept)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        case = problem(dtype, trained, **options)  # type: ignore[arg-type]
        for got, expected in zip(results(action_logits_and_values, *case), results(dense, *case), strict=True):
            assert float((got - expected).detach().norm() / expected.detach().norm()) <= tolerance


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_gradcheck_passes(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a problem of few numbers, each of which is moved, in four slabs, the last of them short."""
    monkeypatch.setattr(head, "SLAB_ELEMENTS", 4 * 9)
    sizes = (9, 6, 14)
    hidden, unembedding, visit, action = problem(torch.float64, trained, bias=True, softcap=2.0, sizes=sizes)
    bias = unembedding.bias
    assert bias is not None

    def function(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return action_logits_and_values(h, Unembedding(w, b, 1.0, 2.0), visit, action)

    assert torch.autograd.gradcheck(function, [hidden, unembedding.weight, bias])


def test_half_precision_errs_no_more_than_twice_what_dense_half_precision_does() -> None:
    exact = results(dense, *problem(torch.float64, trained=True))
    ours, naive = (results(f, *problem(torch.bfloat16, trained=True)) for f in (action_logits_and_values, dense))
    for got, plain, truth in zip(ours, naive, exact, strict=True):
        error, allowed = ((x.detach().double() - truth.detach()).norm() for x in (got, plain))
        assert float(error) <= 2 * float(allowed)
    assert ours[0].dtype == ours[1].dtype == torch.float32  # logits and V leave in float32 all the same


def test_autocast_computes_in_its_dtype_and_keeps_float32_gradients() -> None:
    case = problem(torch.float32, trained=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = results(action_logits_and_values, *case)
    assert all(gradient.dtype == torch.float32 for gradient in cast[2:])
    for got, exact in zip(cast, results(dense, *case), strict=True):
        difference = float((got - exact).detach().norm() / exact.detach().norm())
        assert 1e-4 < difference < 3e-2  # bfloat16 has eight bits


def test_what_was_kept_is_made_again_for_a_second_backward_pass() -> None:
    hidden, unembedding, visit, action = problem(torch.float64, trained=True)
    logit, value = action_logits_and_values(hidden, unembedding, visit, action)
    loss = (logit.sin().sum() + value.sin().sum()) / 3
    first, second = (torch.autograd.grad(loss, [hidden, unembedding.weight], retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("trained", "kept", "share"),
    [(False, 0, 1 / 5), (True, 0, 1 / 5), (True, 2**28, 1 / 2)],
    ids=["frozen", "trained", "kept"],
)
def test_memory_is_a_part_of_dense(trained: bool, kept: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 nodes × 8,000 tokens; beyond the gradient of the weight itself, which both must make."""
    monkeypatch.setattr(head, "SLAB_ELEMENTS", 2**19)
    monkeypatch.setattr(head, "KEPT_ELEMENTS", kept)
    hidden = torch.randn(1024, 64, requires_grad=True)
    unembedding = Unembedding(torch.randn(8000, 64, requires_grad=trained))
    visit, action = torch.arange(1024), torch.randint(0, 8000, (1024,))

    def backward(function: object) -> None:
        logit, value = function(hidden, unembedding, visit, action)  # type: ignore[operator]
        torch.autograd.grad(logit.sum() + value.sum(), [hidden, *([unembedding.weight] if trained else [])])

    ours, plain = (peak_bytes(lambda f=f: backward(f)) for f in (action_logits_and_values, dense))  # type: ignore[misc]
    assert ours <= share * plain
