"""Masks and attention with deleted nodes, beside plain causal attention."""

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.peers import updater, with_attention
from benchmarks.session import Session
from benchmarks.shapes import Shape, dtype_on
from benchmarks.step import our_step
from benchmarks.timing import Call, Measurement, measured, paired, peak_bytes
from benchmarks.workloads import rollout, text
from sequencematch.core.encoding import Encoding, attend, encode
from sequencematch.core.mdp import ActionSpace
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX
from sequencematch.policy.masks import block_mask

CAUSAL, CONTROL, DENSE, BLOCKS = "causal", "causal (A/A control)", "dense mask", "block mask"
#: Nodes of a batch, over all of its rows.
NODES = 8192


def attention(session: Session) -> Iterator[Measurement]:
    """Building each mask, attention under it forward and backward, and on a GPU a whole step."""
    scale, device = session.scale, session.device
    for length in scale.attention_lengths:
        rows = max(1, min(NODES, scale.batch * scale.context) // length)
        space = ActionSpace(scale.step.vocab, eos=2, bos=1)
        generator = torch.Generator().manual_seed(0)
        encoding = encode([rollout(space, (1,), length, generator) for _ in range(rows)], device=device)
        yield from _masks(session, encoding)
        yield from _kernels(session, encoding, scale.step)
    if device.startswith("cuda"):
        yield from _steps(session)


def _masks(session: Session, encoding: Encoding) -> Iterator[Measurement]:
    deleted_at, positions = encoding.deleted_at, encoding.position_ids
    variants: dict[str, Call] = {
        DENSE: lambda: attend(deleted_at),
        BLOCKS: lambda: block_mask(deleted_at, positions),
    }
    rows, nodes = deleted_at.shape
    seconds = session.seconds(f"masks, {rows} × {nodes}", variants)
    ms = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    name = f"building a block mask / a dense one, {rows} × {nodes}"
    yield measured("attention", name, paired(seconds, BLOCKS, DENSE), detail={"ms": ms})


def _kernels(session: Session, encoding: Encoding, shape: Shape) -> Iterator[Measurement]:
    """Forward and backward of one layer's attention. FlexAttention has no backward pass on a CPU."""
    device = session.device
    torch.manual_seed(0)
    rows, nodes = encoding.tokens.shape
    size = (3, rows, shape.heads, nodes, shape.hidden // shape.heads)
    qkv = torch.randn(size, dtype=dtype_on(device), device=device, requires_grad=True)
    keep = encoding.attend()[:, None]

    def run(function: Any, **options: Any) -> Call:
        return lambda: torch.autograd.grad(function(*qkv.unbind(), **options).sum(), qkv)

    variants = {
        CAUSAL: run(scaled_dot_product_attention, is_causal=True),
        DENSE: run(scaled_dot_product_attention, attn_mask=keep),
        CONTROL: run(scaled_dot_product_attention, is_causal=True),
    }
    if device.startswith("cuda"):
        blocks = block_mask(encoding.deleted_at, encoding.position_ids)
        variants[BLOCKS] = run(torch.compile(flex_attention), block_mask=blocks)
    of = f"{rows} × {nodes}"
    seconds = session.seconds(f"attention, {of}", variants)
    control = paired(seconds, CONTROL, CAUSAL)
    ms = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    yield measured("attention", f"A/A control: causal / causal, {of}", control, target="control", detail={"ms": ms})
    for name in (DENSE, BLOCKS):
        if name in seconds:
            yield measured("attention", f"attention under a {name} / causal, {of}", paired(seconds, name, CAUSAL))


def _steps(session: Session) -> Iterator[Measurement]:
    """A step of SequenceMatch under each attention implementation."""
    scale, device = session.scale, session.device
    policy = session.policy(scale.training)
    policy.train()
    update = updater(policy, device)
    for length in scale.attention_lengths:
        work = text(policy.space, max(1, NODES // 2 // length), length, length)
        ours = our_step(policy, work, update)
        variants = {name: with_attention(policy, name, ours) for name in ("sdpa", CAUSAL_PREFIX, "flex_attention")}
        seconds = session.seconds(f"attention in a step, rows of {length}", variants)
        peaks = {name: peak_bytes(call, device) / 2**20 for name, call in variants.items()}
        ms = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
        detail = {"model": scale.training.name, "ms": ms, "mib": peaks}
        for name, label in ((CAUSAL_PREFIX, "with the causal prefix first"), ("flex_attention", "under FlexAttention")):
            ratios = paired(seconds, name, "sdpa")
            yield measured("attention", f"a step {label} / under SDPA, rows of {length}", ratios, detail=detail)
