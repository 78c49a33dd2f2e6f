"""The suites by name, and a run of some of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from benchmarks.attention import attention
from benchmarks.decoding import decoding
from benchmarks.encoding import encoding
from benchmarks.end_to_end import end_to_end
from benchmarks.head import head
from benchmarks.length import length
from benchmarks.search import search
from benchmarks.session import Session
from benchmarks.shapes import CPU, H200, QUICK, Scale
from benchmarks.step import step
from benchmarks.targets import MIN_ROUNDS
from benchmarks.timing import Measurement, one_thread, provenance
from sequencematch.data.spelling import check_choice

Suite = Callable[[Session], Iterator[Measurement]]

#: Every suite, in the order of running: suites that share a model are neighbours.
SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "encoding": encoding,
        "attention": attention,
        "head": head,
        "step": step,
        "decoding": decoding,
        "search": search,
        "length": length,
        "end_to_end": end_to_end,
    }
)
QUICK_ROUNDS = 3
#: Whole training runs consist of steps and generations, which other suites profile.
NOT_PROFILED = ("end_to_end",)


def session_for(device: str, *, quick: bool = False, rounds: int = MIN_ROUNDS, is_profiled: bool = False) -> Session:
    """The session for a device, with its scale and rounds."""
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
    """The suites of these names in the order of running, by default all that can be measured, or profiled."""
    known = [name for name in SUITES if not (is_profiled and name in NOT_PROFILED)]
    for name in names:
        check_choice("SUITE", name, known)
    return [name for name in known if not names or name in names]


def run(session: Session, names: Sequence[str], begun: Callable[[str], None] = lambda _: None) -> Iterator[Measurement]:
    """Run suites on one CPU thread and yield measurements as they are made; `begun` is called with the name of each suite."""
    threads = torch.get_num_threads()
    one_thread()
    provenance("")  # caches the commit before anything is measured
    try:
        for name in names:
            begun(name)
            yield from SUITES[name](session)
    finally:
        torch.set_num_threads(threads)
