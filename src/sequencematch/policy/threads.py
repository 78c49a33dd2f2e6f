"""CPU threads where the user didn't choose.

Several threads gain a small model little on an idle machine, and make it many times slower on a busy one.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

#: A model with fewer parameters gets one thread. The bundled models have 0.9 million; at 5 million, a step on two idle cores
#: is 1.5 times faster with two threads than with one.
SMALL = 2_000_000


def cpu_threads(parameters: int, environment: Mapping[str, str], threads: int, cores: int) -> int:
    """One thread for a small model, unless the user chose a number; else as many as torch has now.

    A user chooses by OMP_NUM_THREADS, MKL_NUM_THREADS or `torch.set_num_threads`. `set_num_threads` is assumed if the
    number is not torch's default: all cores, or half of them on processors that run two threads a core.
    """
    is_chosen = "OMP_NUM_THREADS" in environment or "MKL_NUM_THREADS" in environment
    return threads if is_chosen or threads not in (cores, cores // 2) or parameters >= SMALL else 1


@contextmanager
def limit_threads(policy: Any) -> Iterator[None]:
    """While this lasts, torch computes on `cpu_threads` if the policy is on a CPU."""
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if policy.device.type == "cpu":
        parameters = sum(parameter.numel() for parameter in policy.parameters())
        torch.set_num_threads(cpu_threads(parameters, os.environ, threads, cores))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
