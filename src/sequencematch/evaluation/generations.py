"""Generations saved to disk, from which an interrupted evaluation resumes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from sequencematch.core.mdp import Trajectory
from sequencematch.data.locks import locked
from sequencematch.policy import Policy, Sampling
from sequencematch.policy.generation import rollouts


def generations(
    policy: Policy,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    batch_size: int,
    *,
    path: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> list[Trajectory]:
    """A trajectory from each prompt. With `path`, every row is appended to that file as it ends, and rows found there are reused.

    Every row has its own random numbers, so a resumed run gives the same rows as an uninterrupted one. `identity` describes the
    settings; a file with another identity is refused, and so is a folder to which another process writes.
    """
    if path is not None:
        with locked(path.parent, "folder", f".{path.name}.lock"):
            return _generations(policy, prompts, sampling, batch_size, path, identity, progress)
    return _generations(policy, prompts, sampling, batch_size, path, identity, progress)


def _generations(
    policy: Policy,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    batch_size: int,
    path: Path | None,
    identity: Mapping[str, Any] | None,
    progress: bool,
) -> list[Trajectory]:
    chosen = {} if path is None else _kept(path, {**(identity or {}), "prompts": digest(prompts)})
    missing = [row for row in range(len(prompts)) if row not in chosen]
    ended = rollouts(policy, [prompts[row] for row in missing], sampling, batch_size, rows=missing) if missing else ()
    is_hidden = None if progress else True  # None: hidden unless stderr is a terminal
    bar = tqdm(ended, initial=len(chosen), total=len(prompts), unit="row", leave=False, disable=is_hidden)
    with nullcontext() if path is None else path.open("a", encoding="utf-8") as file:
        for rollout in bar:
            chosen[rollout.row] = rollout.trajectory.chosen
            if file is not None:
                file.write(json.dumps({"row": rollout.row, "chosen": rollout.trajectory.chosen}) + "\n")
                file.flush()
    floors = [len(prompt) if sampling.protect_prompt else 1 for prompt in prompts]
    return [
        Trajectory.rollout(policy.space, prompt, chosen[row], floor)
        for row, (prompt, floor) in enumerate(zip(prompts, floors, strict=True))
    ]


def _kept(path: Path, identity: Mapping[str, Any]) -> dict[int, Sequence[int]]:
    """Row → its actions, for the rows in the file. An incomplete last line is dropped; a missing file is created."""
    header = json.loads(json.dumps(identity, default=str))
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    try:
        first, *rows = [json.loads(line) for line in whole.splitlines()] or [header]
        differs = [name for name in {**header, **first} if first.get(name) != header.get(name)]
        chosen = {row["row"]: row["chosen"] for row in rows}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"`folder` must hold no other {path.name}. Got {path}, not written by `evaluate`.") from error
    if differs:
        raise ValueError(
            f"`folder` must be new, or hold generations of the same settings to resume. Got {path}, which differs in "
            f"{', '.join(differs)}. Choose another folder, or delete that file."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.truncate(len(whole))
        if not whole:
            file.write(json.dumps(header).encode() + b"\n")
    return chosen


def count_kept(path: Path) -> int:
    """How many rows a file holds."""
    return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0


def digest(value: Any) -> str:
    """The first twelve hexadecimal digits of the SHA-256 of a value."""
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:12]


def digest_of_weights(policy: Policy) -> str:
    """A digest of a policy's weights, from about a thousand numbers of each tensor: training changes them all.

    The offset head is left out: sampling does not use it, and a plain model gets a new one each time it is loaded.
    """
    found = hashlib.sha256()
    for name, weight in (*policy.model.named_parameters(), ("<bkspc>", policy.backspace.row)):
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // 1000)].cpu().contiguous()
        found.update(name.encode() + sample.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]
