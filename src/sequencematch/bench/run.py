"""The suites by name, and a run of some of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from sequencematch.bench.attention import attention
from sequencematch.bench.decoding import decoding
from sequencematch.bench.encoding import encoding
from sequencematch.bench.end_to_end import end_to_end
from sequencematch.bench.head import head
from sequencematch.bench.length import length
from sequencematch.bench.measure import Row, one_thread, signature
from sequencematch.bench.session import Session
from sequencematch.bench.shapes import CPU, H200, QUICK, Scale
from sequencematch.bench.step import step
from sequencematch.bench.targets import MIN_ROUNDS
from sequencematch.data.spelling import check_choice

Suite = Callable[[Session], Iterator[Row]]

#: Every suite; those that share a model follow each other.
SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "encoding": encoding,
        "attention": attention,
        "head": head,
        "step": step,
        "decoding": decoding,
        "length": length,
        "end_to_end": end_to_end,
    }
)
QUICK_ROUNDS = 3
#: Whole training runs would fill a profile with what the other suites have already.
NOT_PROFILED = ("end_to_end",)


def session_for(device: str, *, quick: bool = False, rounds: int = MIN_ROUNDS, is_profiled: bool = False) -> Session:
    """What a device is measured, or profiled, with."""
    least = 1 if quick or is_profiled else MIN_ROUNDS
    if rounds < least:
        raise ValueError(
            f"`--rounds` must be at least {least}, or the median says little. Got {rounds}; `--quick` takes fewer."
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"`--device` must be a device of this machine. Got {device!r}: {reason}") from error
    scale: Scale = QUICK if quick else H200 if device.startswith("cuda") else CPU
    rounds = 1 if is_profiled else min(rounds, QUICK_ROUNDS) if quick else rounds
    return Session(device, scale, rounds, is_profiled=is_profiled)


def chosen(names: Sequence[str], *, is_profiled: bool = False) -> list[str]:
    """The suites of these names in the order of running, or all; of those that are profiled, where they are to be."""
    known = [name for name in SUITES if not (is_profiled and name in NOT_PROFILED)]
    for name in names:
        check_choice("SUITE", name, known)
    return [name for name in known if not names or name in names]


def run(session: Session, names: Sequence[str], begun: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """Rows as they are measured, on one CPU thread; `begun` is told of every suite."""
    threads = torch.get_num_threads()
    one_thread()
    signature("")  # reads the commit before anything is measured
    try:
        for name in names:
            begun(name)
            yield from SUITES[name](session)
    finally:
        torch.set_num_threads(threads)
