import json
import logging
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import Trainer, TrainerCallback

from sequencematch.data.examples import Examples
from sequencematch.training import checkpoints
from sequencematch.training.replay import ReplayBuffer
from sequencematch.training.signals import Signals
from tests import programs
from tests.training import kills, resumable_run
from tests.training.kills import MIXTURES, PARTS
from tests.training.resumable_run import ROWS, STEPS, Kill, assert_same, run_folder

SEED = 7
#: About as many calls as a step has.
CALLS = 60_000


def random_kills(seed: int, count: int) -> list[Kill]:
    """One in each part of the run, anywhere in a step."""
    generator, part = random.Random(seed), STEPS // count
    return [Kill(n * part + generator.randrange(part), calls=generator.randrange(CALLS)) for n in range(count)]


#: Name → kills, one after the other, the run resumed in between.
CASES: dict[str, list[Kill]] = {
    **{f"random_{n}": [kill] for n, kill in enumerate(random_kills(SEED, 4))},
    "again_and_again": [Kill(2), Kill(7, calls=9_000), Kill(9, "optimizer"), Kill(13)],
    "writing_the_first_optimizer": [Kill(3, "optimizer")],
    "naming_the_first": [Kill(3, "name")],
    "writing_weights": [Kill(6, "weights")],
    "writing_the_optimizer_inside_an_epoch": [Kill(15, "optimizer")],
    "writing_the_manifest": [Kill(9, "manifest")],
    "naming_at_the_end_of_an_epoch": [Kill(12, "name")],
    "removing_an_old_one": [Kill(6, "removal")],
    "after_the_last_checkpoint": [Kill(STEPS, "end")],
}


def names(folder: Path) -> tuple[list[str], list[str]]:
    """Checkpoints, and those being written."""
    run = run_folder(folder)
    return sorted(path.name for path in run.glob("checkpoint-*")), sorted(p.name for p in run.glob(".checkpoint-*"))


def separate(folder: Path, record: Path, **options: Any) -> int:
    """Run in a process of its own. Its exit code."""
    code = f"run(Path({str(folder)!r}), Path({str(record)!r}), **{options})"
    done = programs.run("-c", f"from pathlib import Path\nfrom tests.training.resumable_run import Kill, run\n{code}")
    assert done.returncode in (0, -signal.SIGKILL), done.stderr + record.with_suffix(".txt").read_text()
    return done.returncode


def recorded(path: Path) -> list[dict[str, Any]]:
    """The steps of a process, as far as it has come."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class Life:
    """A run that was killed and resumed: where, what was found then, a copy of that, where it went on, how it ended."""

    folder: Path
    story: list[str]
    found: tuple[list[str], list[str]]
    killed: Path
    resumed_after: int
    outcome: dict[str, Any]
    records: list[dict[str, Any]]


def live(folder: Path, kills: list[Kill]) -> Life:
    """Start, be killed, go on, …, end; every process is a new one."""
    story, killed = [], folder.with_name(f"{folder.name}-killed")
    for number, when in enumerate(kills):
        record = folder / f"steps-{number}.jsonl"
        assert separate(folder, record, resume=number > 0, kill=when) == -signal.SIGKILL, f"not killed: {when}"
        found, last = names(folder), max((line["step"] for line in recorded(record)), default=0)
        story.append(f"{when}: killed after step {last}; checkpoints {found[0]}, being written {found[1]}")
    shutil.copytree(folder, killed)
    assert separate(folder, folder / "steps-last.jsonl", resume=True) == 0
    outcome = torch.load(folder / "outcome.pt", weights_only=False)
    records = [line for path in folder.glob("*.jsonl") for line in recorded(path)]
    return Life(folder, story, found, killed, STEPS - len(outcome["steps"]), outcome, records)


Lives = Callable[[str], Life]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """Runs that are killed, by name, each lived once."""
    return cache(lambda name: live(tmp_path_factory.mktemp(name), CASES[name]))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run that is never interrupted, in another interpreter than those that are killed."""
    folder = tmp_path_factory.mktemp("reference")
    trainer, records = resumable_run.trainer(folder, folder / "steps.jsonl")
    trainer.train()
    return resumable_run.outcome(trainer, records)


@pytest.fixture
def interrupted(lives: Lives, tmp_path: Path) -> Path:
    """A folder of a killed run, with the checkpoints 9 and 12."""
    folder = tmp_path / "interrupted"
    shutil.copytree(lives("writing_the_optimizer_inside_an_epoch").killed, folder)
    assert names(folder)[0] == ["checkpoint-12", "checkpoint-9"]
    return folder


def resumed(folder: Path, resume: Any = True, **changes: Any) -> dict[str, Any]:
    """What a run ends with that goes on in this process."""
    trainer, records = resumable_run.trainer(folder, folder / "resumed.jsonl", **changes)
    trainer.train(resume_from_checkpoint=resume)
    return resumable_run.outcome(trainer, records)


def test_the_run_has_both_phases_and_dropout_and_fills_its_buffer(reference: dict[str, Any]) -> None:
    assert [record["step"] for record in reference["steps"]] == list(range(1, STEPS + 1))
    lines = {line["step"]: line for line in reference["log"] if "bc_weight" in line}
    assert lines[5]["bc_weight"] == 1
    assert 0.2 <= lines[15]["bc_weight"] < 0.21
    made, drawn, rollouts = reference["buffer"]
    assert drawn > made > len(rollouts) == 15
    assert len({record["random"] for record in reference["steps"]}) == STEPS  # torch's own generator is used in each
    assert 0 < lines[15]["data/backspace_rate"] < 0.5


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_killed_and_resumed_equals_one_that_is_not(
    name: str, lives: Lives, reference: dict[str, Any]
) -> None:
    life = lives(name)
    print(f"seed {SEED}", *life.story, f"resumed after step {life.resumed_after}", sep="\n")
    assert_same(life.outcome, reference, after=life.resumed_after)
    for record in life.records:
        assert record == reference["steps"][record["step"] - 1]


@pytest.mark.parametrize(
    ("name", "found", "resumed_after"),
    [
        ("writing_the_first_optimizer", ([], [".checkpoint-3.partial"]), 0),
        ("naming_the_first", ([], [".checkpoint-3.partial"]), 0),
        ("writing_weights", (["checkpoint-3"], [".checkpoint-6.partial"]), 3),
        ("writing_the_manifest", (["checkpoint-3", "checkpoint-6"], [".checkpoint-9.partial"]), 6),
        ("naming_at_the_end_of_an_epoch", (["checkpoint-6", "checkpoint-9"], [".checkpoint-12.partial"]), 9),
        ("removing_an_old_one", (["checkpoint-12", "checkpoint-6", "checkpoint-9"], []), 12),
        ("after_the_last_checkpoint", (["checkpoint-15", "checkpoint-17"], []), 17),
    ],
)
def test_a_kill_while_a_checkpoint_is_written_leaves_the_ones_before_it(
    name: str, found: tuple[list[str], list[str]], resumed_after: int, lives: Lives
) -> None:
    life = lives(name)
    assert life.found == found
    assert life.resumed_after == resumed_after
    assert names(life.folder) == (["checkpoint-15", "checkpoint-17"], [])


def test_a_run_that_was_finished_is_not_trained_further_when_resumed(
    lives: Lives, reference: dict[str, Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(lives("after_the_last_checkpoint").killed, tmp_path / "finished")
    assert_same(resumed(folder), reference, after=STEPS)
    assert names(folder)[0] == ["checkpoint-15", "checkpoint-17"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


#: What is done to a file of a checkpoint, and what is said of it.
DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "cut_optimizer": ("optimizer.pt", truncate, r"damaged: optimizer\.pt should have \d+ bytes and has \d+"),
    "cut_weights": ("model.safetensors", truncate, r"damaged: model\.safetensors should have \d+ bytes and has \d+"),
    "no_buffer": ("replay.safetensors", Path.unlink, r"damaged: replay\.safetensors is missing"),
    "flipped_scheduler": ("scheduler.pt", flip, r"damaged: scheduler\.pt does not have the content that was written"),
    "cut_manifest": ("checkpoint.json", truncate, r"damaged: checkpoint\.json can't be read"),
    "no_manifest": ("checkpoint.json", Path.unlink, r"not a complete checkpoint: checkpoint\.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_used_and_the_damaged_one_named(
    damage: str, interrupted: Path, reference: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    file, spoil, problem = DAMAGES[damage]
    spoil(run_folder(interrupted) / "checkpoint-12" / file)
    with caplog.at_level(logging.WARNING, logger=checkpoints.logger.name):
        outcome = resumed(interrupted, max_steps=11)
    (message,) = [each.getMessage() for each in caplog.records if each.name == checkpoints.logger.name]
    assert re.search(rf"checkpoint-12 is {problem}\. Resuming from checkpoint-9 instead\.$", message)
    assert outcome["steps"] == reference["steps"][9:11]


def test_a_damaged_checkpoint_is_replaced_once_its_step_is_reached_and_the_run_is_the_same(
    interrupted: Path, reference: dict[str, Any]
) -> None:
    truncate(run_folder(interrupted) / "checkpoint-12" / "optimizer.pt")
    replaced: list[int] = []

    class Check(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            if state.global_step == 13:
                checkpoints.check(run_folder(interrupted) / "checkpoint-12")
                replaced.append(12)

    trainer, records = resumable_run.trainer(interrupted, interrupted / "resumed.jsonl")
    trainer.add_callback(Check())
    trainer.train(resume_from_checkpoint=True)
    assert replaced
    assert_same(resumable_run.outcome(trainer, records), reference, after=9)
    checkpoints.check(run_folder(interrupted) / "checkpoint-15")


def test_a_damaged_checkpoint_that_is_asked_for_by_name_is_refused(interrupted: Path) -> None:
    folder = run_folder(interrupted) / "checkpoint-12"
    truncate(folder / "optimizer.pt")
    with pytest.raises(
        ValueError, match=r"checkpoint-12 is damaged: optimizer\.pt should have \d+ bytes and has \d+\."
    ):
        resumed(interrupted, str(folder))
    with pytest.raises(ValueError, match=r"checkpoint-99 is not a complete checkpoint: checkpoint\.json is missing\."):
        resumed(interrupted, str(folder.with_name("checkpoint-99")))


def test_a_checkpoint_that_is_whole_can_be_asked_for_by_name(interrupted: Path, reference: dict[str, Any]) -> None:
    assert_same(resumed(interrupted, str(run_folder(interrupted) / "checkpoint-9")), reference, after=9)


def test_a_run_without_a_complete_checkpoint_says_what_is_wrong_with_each(interrupted: Path) -> None:
    truncate(run_folder(interrupted) / "checkpoint-12" / "optimizer.pt")
    (run_folder(interrupted) / "checkpoint-9" / "signals.json").unlink()
    with pytest.raises(
        ValueError, match=r"needs a complete checkpoint in .*-12 is damaged: .*-9 is damaged: signals\.json is mis"
    ):
        resumed(interrupted)
    with pytest.raises(ValueError, match=r"`output_dir` must not hold another run\. Got .*, which has checkpoint-12\."):
        resumed(interrupted, None)


def test_resuming_where_nothing_was_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`resume_from_checkpoint` needs a complete checkpoint in .*\. Found none\."):
        resumed(tmp_path)


def test_weights_alone_are_no_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    trainer, _ = resumable_run.trainer(tmp_path, tmp_path / "steps.jsonl", save_only_model=True, max_steps=6)
    trainer.train()
    with pytest.raises(ValueError, match=r"needs the optimizer's state, too\. Got .*, .* `save_only_model`\."):
        resumed(tmp_path)


def test_a_folder_whose_run_is_unknown_is_not_taken_for_this_run(interrupted: Path) -> None:
    truncate(run_folder(interrupted) / checkpoints.RUN)
    with pytest.raises(ValueError, match=rf"{checkpoints.RUN} is damaged\. Remove it if"):
        resumed(interrupted)


#: What is not restored → what then differs.
FORGOTTEN: dict[str, tuple[type, str, str]] = {
    "buffer": (ReplayBuffer, "load", "steps differ"),
    "random_state": (Trainer, "_load_rng_state", "steps differ"),
    "optimizer": (Trainer, "_load_optimizer_and_scheduler", "steps differ"),
    "epoch": (Examples, "begin_epoch", "steps differ"),
    "signals": (Signals, "load_state_dict", "logs differ"),
}


@pytest.mark.parametrize("part", FORGOTTEN)
def test_a_run_that_forgets_a_part_does_not_equal_one_that_was_not_interrupted(
    part: str, interrupted: Path, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, difference = FORGOTTEN[part]
    monkeypatch.setattr(owner, method, lambda *_: None)
    with pytest.raises(AssertionError, match=difference):
        assert_same(resumed(interrupted), reference, after=12)


class Stream:
    """Rows that can only be read in order."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(ROWS)


VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"peft_config": peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1)},
    "stream": {"dataset": Stream()},
    "noise_of_the_model": {"noise_source": "model"},
    "packing": {"packing": True},
    "offset_head_apart": {"offset_lr_multiplier": 20.0},
    "corrections": {
        "objective": "bc",
        "correction_rate": 0.7,
        "dataset": [{"prompt": row["text"][:2], "completion": row["text"][2:]} for row in ROWS],
    },
    "prompts_of_their_own": {"rollout_dataset": [{"prompt": f"{letter} "} for letter in "abcdefg"]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_kinds_of_runs_resume_exactly_as_well(variant: str, tmp_path: Path) -> None:
    whole, later = tmp_path / "whole", tmp_path / "later"
    settings: dict[str, Any] = {"max_steps": 8, "save_steps": 3, "bc_steps": 2, "save_total_limit": None}
    whole.mkdir()
    trainer, records = resumable_run.trainer(whole, whole / "steps.jsonl", **settings, **VARIANTS[variant])
    trainer.train()
    expected = resumable_run.outcome(trainer, records)
    for step in (3, 6):
        folder = copy_until(step, whole, later / str(step))
        assert_same(resumed(folder, **settings, **VARIANTS[variant]), expected, after=step)


def copy_until(step: int, whole: Path, folder: Path) -> Path:
    """A run as it was when a checkpoint had been written."""
    shutil.copytree(whole, folder)
    for path in checkpoints.checkpoints(run_folder(folder)):
        if int(path.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(path)
    return folder


def fake_checkpoint(run: Path, step: int, text: str = "content") -> Path:
    folder = run / f"checkpoint-{step}"
    checkpoints.partial(folder).mkdir(parents=True)
    (checkpoints.partial(folder) / "file").write_text(text)
    checkpoints.finish(folder)
    return folder


def test_a_checkpoint_lists_its_files_with_sizes_and_hashes(tmp_path: Path) -> None:
    folder = fake_checkpoint(tmp_path, 3, "abc")
    assert json.loads((folder / checkpoints.MANIFEST).read_text()) == {
        "files": {
            # FIPS 180-2, the one-block example
            "file": {"bytes": 3, "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
        }
    }
    assert not checkpoints.partial(folder).exists()


def test_a_flipped_bit_in_a_large_file_is_noticed(tmp_path: Path) -> None:
    """Files over 16 MiB were once compared by size alone."""
    folder = fake_checkpoint(tmp_path, 3, "x" * (2**24 + 1))
    flip(folder / "file")
    with pytest.raises(ValueError, match=r"damaged: file does not have the content that was written\.$"):
        checkpoints.check(folder)
    flip(folder / "file")
    checkpoints.check(folder)


def test_files_without_a_hash_in_a_manifest_of_an_older_version_are_compared_by_size(tmp_path: Path) -> None:
    folder = fake_checkpoint(tmp_path, 3, "abc")
    (folder / checkpoints.MANIFEST).write_text(json.dumps({"files": {"file": {"bytes": 3}}}))
    (folder / "file").write_text("abd")
    checkpoints.check(folder)
    (folder / "file").write_text("ab")
    with pytest.raises(ValueError, match="file should have 3 bytes and has 2"):
        checkpoints.check(folder)


def test_a_flipped_bit_anywhere_in_a_manifest_is_noticed(tmp_path: Path) -> None:
    folder = fake_checkpoint(tmp_path, 3, "abc")
    path = folder / checkpoints.MANIFEST
    whole = path.read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        if json_or_none(changed) != json.loads(whole):  # and not one kind of white space for another
            with pytest.raises(ValueError, match=f"^{re.escape(str(folder))} is damaged: "):
                checkpoints.check(folder)


def json_or_none(content: bytearray) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, [9, 8, 5, 4, 3]),
        (0, None, [9, 8, 5, 4, 3]),
        (1, None, [5]),
        (2, None, [5, 4]),
        (3, None, [5, 4, 3]),
        (4, None, [9, 5, 4, 3]),
        (1, 3, [5, 3]),
        (2, 3, [5, 3]),
        (3, 3, [5, 4, 3]),
        (1, 5, [5]),
    ],
)
def test_the_newest_and_the_best_checkpoint_are_kept_and_later_ones_go_first(
    limit: int | None, best: int | None, left: list[int], tmp_path: Path
) -> None:
    for step in (3, 4, 5, 8, 9):
        fake_checkpoint(tmp_path, step)
    checkpoints.rotate(tmp_path / "checkpoint-5", limit, None if best is None else tmp_path / f"checkpoint-{best}")
    assert [int(path.name.removeprefix("checkpoint-")) for path in checkpoints.checkpoints(tmp_path)] == left


def test_a_second_run_in_the_same_folder_is_refused_and_touches_nothing(interrupted: Path) -> None:
    """Two runs would remove each other's partial checkpoints."""
    run, lock = run_folder(interrupted), run_folder(interrupted) / checkpoints.LOCK

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path != lock}

    before = times()
    assert any(".partial" in path.name for path in before)
    code = f"from pathlib import Path; from tests.training.resumable_run import hold; hold(Path({str(run)!r}))"
    with programs.Program("-c", code) as holder:
        while f"process {holder.pid} on " not in lock.read_text():  # the killed run left the file
            assert holder.poll() is None, holder.communicate()
        text = rf"`output_dir` must not be in use\. Got .*, to which process {holder.pid} on \S+ writes\."
        with pytest.raises(ValueError, match=text):
            resumed(interrupted)
        assert times() == before
    resumed(interrupted, max_steps=14)  # the control: the lock ended with its process
    assert not lock.exists()


# A sample of `python -m tests.training.kills 200`.


def test_all_parts_are_mixed() -> None:
    assert len(set(MIXTURES)) == 2 ** len(PARTS)


def test_runs_that_are_killed_at_random_file_system_calls_end_bit_for_bit_like_one_that_is_not(tmp_path: Path) -> None:
    seed, lines = 3, list[str]()
    print(f"seed {seed}")
    assert kills.kill_runs(tmp_path, 3, seed, [tuple(PARTS)], lines.append) >= 3
    print(*lines, sep="\n")
    assert all("killed at" in line for line in lines)
