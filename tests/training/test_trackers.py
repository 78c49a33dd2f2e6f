"""Rollouts as tables: what a row says, and that TensorBoard, W&B and trackio hold it after a run.

`make test-trackers` installs the three; without them their tests are skipped.
"""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sequencematch.core import Trajectory
from sequencematch.data.markdown import escaped
from sequencematch.training.trackers import log_table, table_of
from tests.test_architecture import PACKAGE
from tests.training.tiny_run import policy, trainer


def test_a_row_shows_every_deletion_and_the_text_that_is_left() -> None:
    """The prompt is c; an o is written and deleted, then a and t."""
    learner = policy()
    assert learner.tokenizer is not None
    prompt, o, a, t = (learner.tokenizer(letter)["input_ids"] for letter in "coat")
    space = learner.space
    walk = Trajectory.rollout(space, prompt, [*o, space.bkspc, *a, *t, space.eos])
    expected = {"prompt": "c", "written": "o⌫at<eos>", "text": "at", "deleted": 1, "cut": False}
    assert table_of(learner, [walk], 7) == {name: [value] for name, value in ({"step": 7} | expected).items()}
    assert table_of(learner, [], 7) == {name: [] for name in ("step", *expected)}
    cut = Trajectory.rollout(space, prompt, [*o, *a])
    assert table_of(learner, [cut, walk], 7)["cut"] == [True, False]


def test_without_a_tracker_nothing_happens() -> None:
    log_table([], {"step": [1]}, 1)


def logged(tmp_path: Path, tracker: str) -> list[list[Any]]:
    """A run with a tracker; the rows that were shown, by columns."""
    shown: list[dict[str, list[Any]]] = []
    run = trainer(
        tmp_path,
        report_to=tracker,
        log_completions=True,
        num_completions_to_print=2,
        run_name="tried",
    )
    own = run._show

    def note(trajectories: list[Trajectory], step: int) -> None:
        own(trajectories, step)
        shown.append(table_of(run.model, trajectories, step))

    run.on_policy.show = note
    run.train()
    assert shown
    return [[table["step"][0], table["written"]] for table in shown]


def test_tensorboard_holds_a_table_for_each_batch_of_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    shown = logged(tmp_path, "tensorboard")
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    found = events.Tensors("completions/text_summary")
    assert [event.step for event in found] == [step for step, _ in shown]
    text = found[0].tensor_proto.string_val[0].decode()
    assert text.startswith("| step | prompt | written | text | deleted | cut |\n|---|")
    for written in shown[0][1]:
        assert escaped(written) in text


def test_wandb_holds_a_table_for_each_batch_of_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    shown = logged(tmp_path, "wandb")
    wandb.finish()
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("completions*.table.json")]
    found = sorted([table["data"][0][0], [row[2] for row in table["data"]]] for table in tables)
    assert found == shown


def test_trackio_holds_a_table_for_each_batch_of_rollouts(tmp_path: Path) -> None:
    """In a process of its own: trackio reads where to write when it is imported."""
    pytest.importorskip("trackio")
    script = f"""
import json
from pathlib import Path
from tests.training.test_trackers import logged
Path("shown.json").write_text(json.dumps(logged(Path({str(tmp_path)!r}), "trackio")))
"""
    paths = [str(PACKAGE.parent), str(PACKAGE.parents[1])]
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = []
    for database in (tmp_path / "trackio").rglob("*.db"):
        with sqlite3.connect(database) as connection:
            for step, metrics in connection.execute("SELECT step, metrics FROM metrics ORDER BY id"):
                if table := json.loads(metrics).get("completions"):
                    found.append([step, [row["written"] for row in table["_value"]]])
    assert found == json.loads((tmp_path / "shown.json").read_text()), done.stderr
