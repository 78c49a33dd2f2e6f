"""Atomic checkpoints: written to a temporary folder, listed in a manifest with sizes and hashes, renamed last."""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sequencematch.data.files import write_files

logger = logging.getLogger(__name__)

MANIFEST, RUN = "checkpoint.json", "sequencematch_run.json"
#: Files up to this size are checked by size and hash, larger ones by size alone.
HASHED_BYTES = 2**24


def partial(folder: Path) -> Path:
    """The temporary folder of a checkpoint that is being written."""
    return folder.with_name(f".{folder.name}.partial")


def finish(folder: Path) -> None:
    """Write the manifest of the temporary folder and rename the folder, replacing an older checkpoint of that name.

    Every file is flushed to disk (`fsync`) before the rename, so older checkpoints may be removed afterwards.
    """
    unfinished = partial(folder)
    written = [path for path in sorted(unfinished.rglob("*")) if path.is_file()]
    files = {path.relative_to(unfinished).as_posix(): _fingerprint(path) for path in written}
    (unfinished / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n")
    for path in [*written, unfinished / MANIFEST]:
        with path.open("r+b") as file:
            os.fsync(file.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)


def check(folder: Path) -> None:
    """Refuse a checkpoint with a missing, truncated or changed file."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} is not a complete checkpoint: {MANIFEST} is missing.")
    try:
        listed = {name: dict(entry) for name, entry in json.loads((folder / MANIFEST).read_text())["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is damaged: {MANIFEST} can't be read.") from error
    for name, expected in listed.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{folder} is damaged: {name} is missing.")
        found = _fingerprint(path)
        if found["bytes"] != expected.get("bytes"):
            raise ValueError(
                f"{folder} is damaged: {name} should have {expected.get('bytes')} bytes and has {found['bytes']}."
            )
        if found != expected:
            raise ValueError(f"{folder} is damaged: {name} does not have the content that was written.")


def checkpoints(output_dir: Path) -> list[Path]:
    """All checkpoints of a run, complete or damaged, the latest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=_step, reverse=True)


def latest(output_dir: Path) -> Path:
    """The latest complete checkpoint. A warning names every later one, which is damaged."""
    damaged: list[str] = []
    for folder in checkpoints(output_dir):
        try:
            check(folder)
        except ValueError as error:
            damaged.append(str(error))
        else:
            for problem in damaged:
                logger.warning("%s Resuming from %s instead.", problem, folder.name)
            return folder
    raise ValueError(
        f"`resume_from_checkpoint` needs a complete checkpoint in {output_dir}. Found {' '.join(damaged) or 'none.'}"
    )


def rotate(newest: Path, limit: int | None, best: Path | None) -> None:
    """Remove the oldest checkpoints beyond `limit`. The newest and the best always stay.

    Checkpoints of later steps than the newest are removed first: they were damaged, or the run was resumed from an earlier one.
    """
    if not limit or limit < 0:
        return
    found = checkpoints(newest.parent)
    spared = [folder for folder in found if folder == newest or (best is not None and folder.name == best.name)]
    others = [folder for folder in found if folder not in spared]
    others.sort(key=lambda folder: _step(folder) > _step(newest))
    for folder in others[max(limit - len(spared), 0) :]:
        shutil.rmtree(folder, ignore_errors=True)


def discard_partial(output_dir: Path) -> None:
    """Remove the temporary folders of interrupted runs."""
    for folder in output_dir.glob(".checkpoint-*.partial"):
        shutil.rmtree(folder)


def refuse_another_run(output_dir: Path, identity: Mapping[str, Any]) -> None:
    """Refuse a folder whose checkpoints belong to a run that `begin` started with another identity."""
    path = output_dir / RUN
    if not path.is_file() or not checkpoints(output_dir):
        return
    try:
        known, ours = json.loads(path.read_text()), json.loads(json.dumps(identity))
    except ValueError as error:
        raise ValueError(f"{path} is damaged. Remove it if the checkpoints beside it belong to this run.") from error
    for name, value in ours.items():
        if known.get(name, value) != value:
            raise ValueError(
                f"`output_dir` must not hold another run. Got {output_dir}, whose run had {name}={known[name]!r} and not "
                f"{value!r}. Choose another folder."
            )


def begin(output_dir: Path, identity: Mapping[str, Any], resume: str | bool | None) -> Path | None:
    """Prepare a run's folder and return the checkpoint to resume from: the named one, or for True the latest complete one."""
    found: Path | None = None
    if resume is True:
        found = latest(output_dir)
    elif resume:
        found = Path(resume)
        check(found)
    elif checkpoints(output_dir):
        raise ValueError(
            f"`output_dir` must not hold another run. Got {output_dir}, which has {checkpoints(output_dir)[0].name}. "
            f"Resume it with `resume_from_checkpoint=True`, or choose another folder."
        )
    if found is not None and not any(found.glob("rng_state*.pth")):
        raise ValueError(
            f"`resume_from_checkpoint` needs the optimizer's state, too. Got {found}, which was saved with `save_only_model`."
        )
    write_files(output_dir, {RUN: json.dumps(identity, indent=2) + "\n"})
    return found


_NAME = re.compile(r"checkpoint-(\d+)")


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def _fingerprint(path: Path) -> dict[str, int | str]:
    size = path.stat().st_size
    return {
        "bytes": size,
        **({"sha256": hashlib.sha256(path.read_bytes()).hexdigest()} if size <= HASHED_BYTES else {}),
    }
