"""The smallest scale at which every suite still measures everything it should."""

import torch

from benchmarks.session import Session
from benchmarks.shapes import TINY, Scale
from sequencematch.policy import Policy

SCALE = Scale(
    is_full=False,
    step=TINY,
    context=16,
    batch=2,
    rollout=10,
    generation_prompt=4,
    generation_batch=4,
    prompt=6,
    completion=4,
    prompt_batch=4,
    decoding=TINY,
    decoding_batch=2,
    decoding_new=4,
    decoding_prompt=4,
    length=TINY,
    lengths=(8, 16),
    length_tokens=32,
    encoding_batch=2,
    encoding_lengths=(32, 64),
    head_hidden=(16,),
    head_positions=32,
    attention_lengths=(16,),
    training=TINY,
    training_length=12,
    training_generation=1,
    generations=1,
)


def session(*, is_profiled: bool = False, **changes: object) -> Session:
    """Two rounds of it."""
    return Session("cpu", Scale(**{**vars(SCALE), **changes}), rounds=2, is_profiled=is_profiled)


def policy() -> Policy:
    """A tiny policy that deletes about every fifth time, its offset head not zero."""
    found = session().policy(TINY)
    with torch.no_grad():
        found.backspace.offset_out.weight.normal_(generator=torch.Generator().manual_seed(1))
    return found
