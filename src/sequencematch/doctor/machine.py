"""The machine: processors, GPUs and their memory."""

import os

import psutil
import torch

from sequencematch.doctor.findings import Finding
from sequencematch.policy.threads import SMALL


def devices() -> list[Finding]:
    """Every kind of device that models can run on."""
    return [_cpu(), *_cuda(), _mps()]


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    text = (
        f"{cores} logical cores, {torch.get_num_threads()} torch threads (one for models below {SMALL // 10**6} million "
        f"parameters; OMP_NUM_THREADS chooses), {_gib(memory.available)} of {_gib(memory.total)} memory free"
    )
    return Finding("cpu", "ok", text)


def _cuda() -> list[Finding]:
    if torch.version.cuda is None:
        text = f"torch {torch.__version__} is built without CUDA"
        return [
            Finding("cuda", "off", text, "for an NVIDIA GPU, install a CUDA build: https://pytorch.org/get-started")
        ]
    if not torch.cuda.is_available():
        return [Finding("cuda", "off", f"torch is built for CUDA {torch.version.cuda}, but finds no GPU or no driver")]
    found = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        text = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, {_gib(free)} of {_gib(total)} "
            f"memory free, CUDA {torch.version.cuda}"
        )
        found.append(Finding(f"cuda:{number}", "ok", text))
    return found


def _mps() -> Finding:
    if torch.backends.mps.is_available():
        return Finding("mps", "ok", "Apple GPU")
    why = "no Apple GPU is found" if torch.backends.mps.is_built() else "this build of torch is not for Apple GPUs"
    return Finding("mps", "off", why)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
