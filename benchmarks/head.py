"""The output layer, forward and backward: time and memory relative to dense logits."""

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.session import Session
from benchmarks.shapes import dtype_on
from benchmarks.timing import Call, Measurement, measured, paired, peak_bytes
from sequencematch.policy.head import Unembedding, action_logits_and_values

OURS, DENSE, CONTROL = "slabs", "dense", "dense (A/A control)"


def dense(hidden: Tensor, unembedding: Unembedding, visit: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once, as in a plain head and loss."""
    logits = unembedding.logits(hidden)
    return logits[visit, action], logits.logsumexp(1)


def head(session: Session) -> Iterator[Measurement]:
    """Time and memory with a frozen output layer, as under LoRA, and with a trained one."""
    for hidden_size in session.scale.head_hidden:
        for is_trained in (False, True):
            yield from _one(session, hidden_size, is_trained)


def _one(session: Session, hidden_size: int, is_trained: bool) -> Iterator[Measurement]:
    torch.manual_seed(0)
    device, positions, vocab = session.device, session.scale.head_positions, session.scale.step.vocab
    dtype = dtype_on(device)
    hidden = torch.randn(positions, hidden_size, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, dtype=dtype, device=device) / hidden_size**0.5
    weight.requires_grad_(is_trained)
    unembedding = Unembedding(weight)
    visit = torch.arange(positions, device=device)
    action = torch.randint(0, vocab, (positions,), device=device)
    inputs = [hidden, weight] if is_trained else [hidden]

    def run(function: Callable[..., tuple[Tensor, Tensor]]) -> Call:
        def step() -> object:
            logit, value = function(hidden, unembedding, visit, action)
            return torch.autograd.grad((logit - value).sum(), inputs)

        return step

    variants = {DENSE: run(dense), OURS: run(action_logits_and_values), CONTROL: run(dense)}
    layer = f"hidden {hidden_size}, {'trained' if is_trained else 'frozen'} output layer"
    seconds = session.seconds(f"head, {layer}", variants)
    memory = {name: peak_bytes(variants[name], device) for name in (OURS, DENSE)}
    detail = {
        "positions": positions,
        "vocab": vocab,
        "dtype": str(dtype).removeprefix("torch."),
        "dense_ms": 1e3 * statistics.median(seconds[DENSE]),
    }
    control = paired(seconds, CONTROL, DENSE)
    yield measured("head", f"A/A control: dense / dense, {layer}", control, target="control", detail=detail)
    yield measured("head", f"time, ours / dense logits, {layer}", paired(seconds, OURS, DENSE))
    mib = {name: size / 2**20 for name, size in memory.items()}
    yield Measurement(
        "head", f"peak memory, ours / dense logits, {layer}", memory[OURS] / memory[DENSE], detail={"mib": mib}
    )
