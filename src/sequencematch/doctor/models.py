"""Models: the bundled ones, the folder for downloads, how a model computes here, and whether it deletes exactly."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from huggingface_hub import constants

from sequencematch.data.hashes import SUMS, check_sums
from sequencematch.doctor.findings import Finding
from sequencematch.doctor.packages import BROKEN_IMPORTS, first_line
from sequencematch.policy import Policy
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX
from sequencematch.policy.decoding.cuda_graphs import why_not_captured
from sequencematch.policy.decoding.decoder_probe import tolerance
from sequencematch.policy.fusing import fusions
from sequencematch.policy.manifest import MANIFEST, read_manifest
from sequencematch.policy.storage import BUNDLED

#: The bundled model that is tried, a question with a wrong first digit, and the right answer: 19 + 11 = 30 = 4·7 + 2.
TRIED, MISTAKEN, ANSWER = "sequencematch/arithmetic", "In base 7, what is 25 + 14? Solution: 5", "42"
_REINSTALL = "pip install --force-reinstall --no-deps sequencematch"
_ATTENTION: Mapping[str, str] = MappingProxyType(
    {
        CAUSAL_PREFIX: "SDPA, with no mask for the causal prefix of a row",
        "sdpa": "SDPA with a mask: this model computes other logits with the causal prefix first",
        "flex_attention": "FlexAttention with a block mask",
        "eager": "eager, with an additive mask",
    }
)


def files() -> list[Finding]:
    """The bundled models, and the folder to which models are downloaded."""
    return [*(_bundled(name, folder) for name, folder in BUNDLED.items()), _cache(Path(constants.HF_HUB_CACHE))]


def _bundled(name: str, folder: Path) -> Finding:
    try:
        manifest = read_manifest(folder)
        if manifest is not None:
            manifest.check(folder)
        elif not (folder / SUMS).is_file():
            return Finding(name, "broken", f"{folder} has neither {MANIFEST} nor {SUMS}", _REINSTALL)
        check_sums(folder)
    except ValueError as error:
        return Finding(name, "broken", str(error), _REINSTALL)
    return Finding(name, "ok", "all files are there, with the right hashes")


def _cache(folder: Path) -> Finding:
    """The nearest folder that exists decides whether files can be written there. Nothing is created."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Finding("cache", "ok", f"{folder} can be written")
    text = f"{folder} can't be written, so no model can be downloaded"
    return Finding("cache", "off", text, "set HF_HOME to a folder of yours")


def paths(model: str | None, device: str | None) -> list[Finding]:
    """How a model computes on a device, by default the first GPU, and whether it deletes exactly there."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = model or TRIED
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        return [Finding("device", "broken", f"{device} is no device of this machine: {first_line(error)}")]
    try:
        policy = Policy.from_pretrained(name, device=device)
    except OSError as error:  # not there, or not readable: nothing was computed
        return [Finding("model", "broken", f"{name} can't be loaded: {first_line(error)}")]
    except (ValueError, RuntimeError, AssertionError) as error:
        return [Finding("deletes exactly", "broken", f"{name} on {device}: {' '.join(str(error).split())}")]
    implementation = policy.base.config._attn_implementation
    found = [
        Finding("attention", "ok", f"{_ATTENTION.get(implementation, implementation)} ({name} on {device})"),
        _triton(policy.device.type),
        _graphs(policy),
        _fused(policy),
    ]
    probed = f"after deletions {name} has the logits of fresh forward passes, to {tolerance(policy.base):g}"
    return [*found, Finding("deletes exactly", "ok", probed), *([_answered(policy)] if model is None else [])]


def _triton(device: str) -> Finding:
    name = "Triton kernels"
    if device != "cuda":
        return Finding(name, "off", f"they need a CUDA GPU, and the model is on {device}")
    try:
        importlib.import_module("sequencematch.policy.decoding.ragged_attention")
    except BROKEN_IMPORTS as error:
        return Finding(name, "off", f"Triton can't be imported: {error}", "pip install triton")
    return Finding(name, "ok", "attention over ragged rows, rotary embeddings, search")


def _graphs(policy: Policy) -> Finding:
    why_not = why_not_captured(policy, policy.base)
    if why_not is None:
        return Finding("CUDA graphs", "ok", "a decoding step is captured and replayed")
    return Finding("CUDA graphs", "off", why_not)


def _fused(policy: Policy) -> Finding:
    count = len(fusions(policy.base))
    if count:
        return Finding("fused layers", "ok", f"{count} in training")
    dtype = str(policy.base.dtype).removeprefix("torch.")
    fitting = "fused are half precision, float32 on a GPU, and LoRA"
    return Finding("fused layers", "off", f"the model is {dtype} without an adapter; {fitting}")


def _answered(policy: Policy) -> Finding:
    """A wrong digit must be deleted, and the answer be right."""
    (trajectory,) = policy.generate(MISTAKEN, temperature=0, max_new_tokens=8).trajectories
    assert policy.tokenizer is not None
    final = policy.tokenizer.decode(trajectory.final_state.tokens, skip_special_tokens=True)
    written = f"{MISTAKEN}{trajectory.render(policy.tokenizer.decode)}"
    is_right = final.rpartition(":")[2].strip() == ANSWER and policy.space.bkspc in trajectory.executed
    text = written if is_right else f"a wrong digit should be deleted and the answer be {ANSWER}. Got {written}"
    return Finding("answer", "ok" if is_right else "broken", text, "" if is_right else _REINSTALL)
