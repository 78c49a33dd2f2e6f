"""Runs that are killed at random file-system calls and resumed must end bit for bit like one that never was.

python -m tests.training.kills 200 --seed 1

Each run is LoRA or not, accumulates gradients or not, reads with worker processes or not, and from a stream or a list. It is killed
once to three times, at any call that creates, opens for writing, renames or removes something in its folder; half of the time the
file that was written last is also cut short, if it doesn't have its name yet.
"""

import argparse
import contextlib
import gc
import itertools
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file

from sequencematch.policy.manifest import read_manifest
from sequencematch.policy.storage import WEIGHTS
from tests import programs
from tests.file_calls import watched
from tests.training import resumable_run
from tests.training.resumable_run import ROWS, assert_same, run_folder

#: Two epochs of five steps and two more: a checkpoint every third step, one of them at no end of an epoch.
SETTINGS: Mapping[str, Any] = {
    "max_steps": 12,
    "save_steps": 3,
    "save_total_limit": 2,
    "bc_steps": 2,
    "bc_anneal_steps": 4,
    "logging_steps": 2,
    "eval_steps": 5,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 4,
}
FINAL = "final"


class Stream:
    """Rows that can only be read in order."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(ROWS)


#: What a run can have → its settings.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"peft_config": peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1)},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "workers": {"dataloader_num_workers": 2},
    "stream": {"dataset": Stream()},
}
#: All mixtures of them, in a fixed order.
MIXTURES: list[tuple[str, ...]] = [
    parts for count in range(len(PARTS) + 1) for parts in itertools.combinations(PARTS, count)
]


def trainer(folder: Path, parts: tuple[str, ...]) -> Any:
    """A fresh trainer, and the list that its steps are recorded in."""
    settings = dict(SETTINGS)
    for part in parts:
        settings |= PARTS[part]
    return resumable_run.trainer(folder, folder / f"steps-{os.getpid()}.jsonl", **settings)


def live(folder: Path, parts: tuple[str, ...], last: int | None, cuts: bool) -> None:
    """Train to the end, or from the latest checkpoint on, save the policy, and leave the outcome; or die at change `last`."""
    torch.set_num_threads(1)
    gc.freeze()  # every run collects garbage: not among what was imported
    run = run_folder(folder)
    with (folder / "stderr.txt").open("a") as text, contextlib.redirect_stderr(text):
        made, records = trainer(folder, parts)
        with watched(run, last, partial(die, run, os.getpid(), cuts)) as watch:
            try:
                made.train(resume_from_checkpoint=True)
            except ValueError as error:
                if "needs a complete checkpoint" not in str(error):
                    raise
                made.train()
            made.save_model(str(run / FINAL))
        torch.save({"changes": watch.count, **resumable_run.outcome(made, records)}, folder / "outcome.pt")


def die(run: Path, process: int, cuts: bool) -> None:
    """Be killed; before that, cut the file that was written last, as if the kill had come while it was written."""
    if os.getpid() != process:
        return  # a worker process
    scratch = [
        path
        for path in run.rglob("*")
        if path.is_file() and any(".partial" in part or part.startswith(".unfinished-") for part in path.parts)
    ]
    if cuts and scratch:
        newest = max(scratch, key=lambda path: path.stat().st_mtime_ns)
        os.truncate(newest, newest.stat().st_size // 2)
    os.kill(process, signal.SIGKILL)


def process(folder: Path, parts: tuple[str, ...], last: int | None = None, cuts: bool = False) -> bool:
    """Run in a process of its own. Whether it was killed."""
    code = f"live(Path({str(folder)!r}), {parts}, {last}, {cuts})"
    done = programs.run("-c", f"from pathlib import Path\nfrom tests.training.kills import live\n{code}")
    assert done.returncode in (0, -signal.SIGKILL), done.stderr + (folder / "stderr.txt").read_text()[-5000:]
    return done.returncode != 0


@dataclass(frozen=True)
class Story:
    """Where a run was killed: at which changes, of how many, and whether a file was cut short."""

    parts: tuple[str, ...]
    kills: list[tuple[int, bool]]
    resumed_after: int

    def __str__(self) -> str:
        kills = ", ".join(f"{number}{' and a file cut' if cut else ''}" for number, cut in self.kills)
        return f"{' + '.join(self.parts) or 'plain'}: killed at {kills}; resumed after step {self.resumed_after}"


def check(folder: Path, parts: tuple[str, ...], reference: Mapping[str, Any], generator: random.Random) -> Story:
    """Let a run be killed and resumed, and compare all that it ends with."""
    folder.mkdir()
    kills = []
    for _ in range(generator.choice([1, 1, 2, 3])):
        last, cuts = generator.randrange(reference["changes"]), generator.random() < 0.5
        if process(folder, parts, last, cuts):
            kills.append((last, cuts))
    assert not process(folder, parts)
    found = torch.load(folder / "outcome.pt", weights_only=False)
    story = Story(parts, kills, SETTINGS["max_steps"] - len(found["steps"]))
    assert_same(found, reference, after=story.resumed_after)
    final = run_folder(folder) / FINAL
    manifest = read_manifest(final)
    assert manifest is not None
    manifest.check(final)
    for name, tensor in load_file(final / WEIGHTS).items():
        assert torch.equal(tensor, reference["parameters"][f"backspace.{name}"]), f"the saved policy differs: {name}"
    return story


def kill_runs(folder: Path, count: int, seed: int, mixtures: list[tuple[str, ...]], say: Callable[[str], None]) -> int:
    """Kill runs until there were `count` kills, and return that number; an `AssertionError` names the run that differs."""
    generator, references, done = random.Random(seed), dict[tuple[str, ...], dict[str, Any]](), 0
    while done < count:
        parts = mixtures[len(references)] if len(references) < len(mixtures) else generator.choice(mixtures)
        if parts not in references:
            whole = folder / f"whole-{len(references)}"
            whole.mkdir()
            assert not process(whole, parts)
            references[parts] = torch.load(whole / "outcome.pt", weights_only=False)
        place = folder / f"killed-{done}"
        try:
            story = check(place, parts, references[parts], generator)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {parts}, {place}: {error}") from error
        done += len(story.kills)
        say(f"{done:4}  {story}, of {references[parts]['changes']} changes")
        shutil.rmtree(place)
    return done


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=200, help="number of kills")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, programs.server():
        done = kill_runs(Path(folder), given.count, given.seed, MIXTURES, lambda line: print(line, flush=True))
    print(f"{done} kills, all bit for bit")


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    main()
