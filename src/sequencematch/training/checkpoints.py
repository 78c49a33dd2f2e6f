"""Atomic checkpoints: written to a temporary folder, listed in a manifest with sizes and hashes, renamed last."""

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sequencematch.data.files import replace_folder, settle, write_files
from sequencematch.data.hashes import check_files, fingerprints, is_listing

logger = logging.getLogger(__name__)

#: Parts of a run's identity that may be changed with `resume_anyway`; those of datasets are fingerprints of their rows.
INSISTED_ON = ("dataset", "rollout_dataset", "global_batch_size")

MANIFEST, RUN, LOCK = "checkpoint.json", "sequencematch_run.json", ".sequencematch_run.lock"


def partial(folder: Path) -> Path:
    """The temporary folder of a checkpoint that is being written."""
    return folder.with_name(f".{folder.name}.partial")


def finish(folder: Path, known: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Write the manifest of the temporary folder and rename the folder, replacing an older checkpoint of that name.

    Every file is flushed to disk (`fsync`) before the rename, so older checkpoints may be removed afterwards. `known` are
    fingerprints of files in it that were computed already.
    """
    unfinished = partial(folder)
    files = dict(sorted({**known, **fingerprints(unfinished, without=known)}.items()))
    (unfinished / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n")
    replace_folder(unfinished, folder)


def check(folder: Path) -> None:
    """Refuse a checkpoint with a missing, truncated or changed file."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} is not a complete checkpoint: {MANIFEST} is missing.")
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except ValueError as error:
        raise ValueError(f"{folder} is damaged: {MANIFEST} can't be read.") from error
    if not isinstance(content, dict) or not is_listing(content.get("files")):
        raise ValueError(f"{folder} is damaged: {MANIFEST} can't be read.")
    check_files(folder, content["files"], "")


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


def settings_for(global_batch_size: int, processes: int) -> str:
    """The settings with which a number of processes takes so many rows a step, or the numbers of processes that can."""
    if global_batch_size % processes:
        found = [str(count) for count in range(1, global_batch_size + 1) if global_batch_size % count == 0]
        return f"No settings of {processes} processes take {global_batch_size} rows a step: start {_any_of(found)}."
    own = global_batch_size // processes
    found = [f"{count} × {own // count}" for count in range(own, 0, -1) if own % count == 0]
    return (
        f"For {global_batch_size} rows a step with {processes} process{'es' * (processes > 1)}, set "
        f"`per_device_train_batch_size` × `gradient_accumulation_steps` to {_any_of(found)}."
    )


def _any_of(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def refuse_another_run(
    output_dir: Path,
    identity: Mapping[str, Any],
    *,
    before: Mapping[str, Any] = MappingProxyType({}),
    insist: bool = False,
    processes: int = 1,
) -> None:
    """Refuse a folder whose checkpoints belong to a run that `begin` started with another identity.

    With `insist`, other data and another batch size are only warned of. Run files of older versions name neither, nor newer
    settings: `before` says which values these then had, if not the present ones. `processes` take part now: the number may be
    another one, but not that of the rows in a step.
    """
    path = output_dir / RUN
    if not path.is_file() or not checkpoints(output_dir):
        return
    try:
        known, ours = json.loads(path.read_text()), json.loads(json.dumps(identity))
    except ValueError as error:
        raise ValueError(f"{path} is damaged. Remove it if the checkpoints beside it belong to this run.") from error
    for name, value in ours.items():
        begun = known.get(name, before.get(name, value))
        if begun == value:
            continue
        difference = f"Got {output_dir}, whose run had {name}={begun!r} and not {value!r}."
        if name in INSISTED_ON and insist:
            logger.warning("%s This is not an exact resume.", difference)
            continue
        fitting = f" {settings_for(begun, processes)}" if name == "global_batch_size" else ""
        change = "`resume_anyway`" if name in INSISTED_ON else f"`{name}` to {begun!r}"
        raise ValueError(
            f"`output_dir` must not hold another run. {difference}{fitting} Choose another folder. "
            f"To resume all the same set {change}."
        )


def begin(output_dir: Path, identity: Mapping[str, Any], resume: str | bool | None) -> Path | None:
    """Prepare a run's folder and return the checkpoint to resume from: the named one, or for True the latest complete one."""
    found: Path | None = None
    for aside in output_dir.glob(".checkpoint-*.previous"):  # its successor was killed before it had the name
        settle(output_dir / aside.name.removeprefix(".").removesuffix(".previous"))
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


def processes_of(checkpoint: Path) -> int:
    """The number of processes that saved a checkpoint: each saves its random state."""
    return len(list(checkpoint.glob("rng_state*.pth")))


def refuse_other_processes(checkpoint: Path, processes: int) -> None:
    """Refuse another number of processes, of which DeepSpeed's files know nothing."""
    saved = processes_of(checkpoint)
    if saved != processes:
        raise ValueError(
            f"`resume_from_checkpoint` needs the number of processes that saved it, with `deepspeed`. Got {checkpoint}, saved by "
            f"{saved}, and {processes} now. DDP and FSDP2 can go on from their checkpoints on any number."
        )


_NAME = re.compile(r"checkpoint-(\d+)")


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))
