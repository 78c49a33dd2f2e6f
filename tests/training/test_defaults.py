"""Settings left open are chosen to fit the model, the run and the rows, and a resumed run keeps what it chose."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from sequencematch.training import SequenceMatchTrainer, checkpoints, trackers
from sequencematch.training.config import SequenceMatchConfig
from sequencematch.training.defaults import choose, num_steps
from sequencematch.training.recipe import read_recipe, run, summary
from tests.cli.program import check_error
from tests.cli.program import run as run_program
from tests.training.test_recipe import file, loaded, model, write
from tests.training.tiny_run import config, policy, rows, trainer

__all__ = ["file", "model"]  # fixtures

OPEN: dict[str, Any] = {"max_length": None, "bc_steps": None, "bc_anneal_steps": None}
NOISY = [{**row, "noise_tokens": ["a", "b"]} for row in rows()]


def chosen(folder: Path, context: int | None = 64, dataset: Any = NOISY, **changes: Any) -> tuple[Any, ...]:
    args, _ = choose(config(folder, **{**OPEN, **changes}), context, dataset)
    return args.max_length, args.bc_steps, args.bc_anneal_steps, args.noise_source


# By hand.


def test_the_smaller_of_the_papers_value_and_what_fits(tmp_path: Path) -> None:
    """A fifth and two fifths of 100 steps; of 10,000 they would be 2,000 and 4,000, more than the paper's."""
    assert chosen(tmp_path, 64, max_steps=100) == (64, 20, 40, "tokens")
    assert chosen(tmp_path, 4096, max_steps=10_000) == (1024, 1000, 2000, "tokens")
    assert chosen(tmp_path, None, max_steps=4) == (1024, 0, 1, "tokens")


def test_what_is_set_stays(tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_length": 7, "bc_steps": 3, "bc_anneal_steps": 0, "noise_source": "uniform"}
    assert chosen(tmp_path, **given) == tuple(given.values())
    args = config(tmp_path, **given)
    assert choose(args, 64, NOISY)[1] == {}


def test_what_the_objective_does_not_use_is_not_shown(tmp_path: Path) -> None:
    names = [list(choose(config(tmp_path, objective=o, **OPEN), 64, NOISY)[1]) for o in ("sequencematch", "bc", "mle")]
    assert names == [[*OPEN, "noise_source"], ["max_length", "noise_source"], ["max_length"]]


def test_a_run_in_epochs_is_counted_in_steps(tmp_path: Path) -> None:
    """12 rows in batches of 4, two of which make a step: 2 steps an epoch, 60 in 30 epochs."""
    epochs = {"max_steps": -1, "num_train_epochs": 30, "gradient_accumulation_steps": 2}
    assert num_steps(config(tmp_path, **epochs), NOISY) == 60
    assert chosen(tmp_path, **epochs)[1:3] == (12, 24)
    assert num_steps(config(tmp_path, max_steps=-1), iter(NOISY)) is None


def test_noise_comes_from_the_column_where_there_is_one(tmp_path: Path) -> None:
    assert chosen(tmp_path)[3] == "tokens"
    assert chosen(tmp_path, dataset=rows())[3] == "uniform"
    assert chosen(tmp_path, dataset=[{**row, "noise_tokens": None} for row in rows()])[3] == "uniform"
    assert chosen(tmp_path, objective="mle")[3] == "uniform"  # it has no noise


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "Row 12 of the dataset must have a column `noise_tokens`"),
        ({"prompt": "a", "completion": "b", "noise_tokens": None}, "Row 12 of the dataset must have a column"),
        (
            {"prompt": "a", "completion": "b", "noise_tokens": "ab"},
            "Row 12 of the dataset must have a list in `noise_tokens`. Got text; CSV has no lists, JSON lines have.",
        ),
    ],
)
def test_a_column_that_the_first_row_has_must_be_in_all(tmp_path: Path, last: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, dataset=[*NOISY, last])
    trainer(tmp_path, dataset=[*rows(), last])  # control: the first has none, and noise is uniform


# Transformers' own count.


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_steps_are_those_that_transformers_makes(tmp_path: Path, accumulation: int, drops: bool) -> None:
    settings: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2.5, "gradient_accumulation_steps": accumulation}
    settings |= {"per_device_train_batch_size": 5, "dataloader_drop_last": drops, "objective": "mle"}
    made = trainer(tmp_path, **settings)
    assert num_steps(made.args, rows()) == made.set_initial_training_values(made.args, made.get_train_dataloader())[-1]


# A trainer.


def test_a_trainer_fits_the_models_context_and_shows_and_stores_what_it_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config(tmp_path, **{**OPEN, "max_steps": 5, "save_strategy": "steps", "save_steps": 5})
    made = SequenceMatchTrainer(policy(), given, NOISY)
    made.train()
    line = "chosen for this run: max_length 64, bc_steps 1, bc_anneal_steps 2, noise_source tokens"
    assert line in capsys.readouterr().err.splitlines()
    stored = json.loads((tmp_path / "run" / checkpoints.RUN).read_text())
    assert [stored[name] for name in (*OPEN, "noise_source")] == [64, 1, 2, "tokens"]
    assert given.bc_steps is None  # the caller's settings serve for another run
    assert made.collate.noise_rate
    assert made.train_dataset[0].noise_tokens


def test_a_resumed_run_keeps_its_schedule_though_it_is_longer(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 5}
    trainer(tmp_path, **{**OPEN, "max_steps": 5, **saving}).train()
    longer = trainer(tmp_path, **{**OPEN, "max_steps": 50, **saving})
    assert (longer.args.bc_steps, longer.args.bc_anneal_steps) == (1, 2)
    # Control: another value that was set is refused.
    with pytest.raises(ValueError, match="whose run had bc_steps=1 and not 7"):
        trainer(tmp_path, **{**OPEN, "bc_steps": 7, "max_steps": 50})


def test_a_run_of_an_older_version_keeps_its_meaning(tmp_path: Path) -> None:
    """Its defaults were 1,024, 1,000, 2,000 and uniform noise, also where rows have noise tokens."""
    path = tmp_path / "run" / checkpoints.RUN
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    old = {"max_length": 1024, "bc_steps": 1000, "bc_anneal_steps": 2000, "noise_source": "uniform"}
    path.write_text(json.dumps(old))
    assert chosen(tmp_path, 64, max_steps=5000) == tuple(old.values())
    # Control: without its checkpoints it is no run to resume.
    (tmp_path / "run" / "checkpoint-5").rmdir()
    assert chosen(tmp_path, 64, max_steps=5000) == (64, 1000, 2000, "tokens")


def test_the_context_of_a_model_on_disk_is_known_before_it_is_loaded(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = loaded(monkeypatch)
    shown = summary(read_recipe(write(tmp_path, model, max_length=None)))
    assert "max_length: 128\n" in shown
    bundled = write(tmp_path, "sequencematch/path-star", max_length=None, objective="bc")
    (tmp_path / "words.jsonl").write_text('{"prompt": "1 2", "completion": " 3"}\n')
    assert "max_length: 256\n" in summary(read_recipe(bundled))
    assert calls == []


def test_a_run_in_epochs_is_resumed_to_the_same_schedule(tmp_path: Path, model: Path) -> None:
    open_ = dict.fromkeys(("max_length", "bc_steps", "bc_anneal_steps", "max_steps"))
    path = write(tmp_path, model, **open_, num_train_epochs=4, save_strategy="epoch")
    made = run(read_recipe(path))
    assert (made.args.bc_steps, made.args.bc_anneal_steps, made.args.max_length) == (2, 4, 128)  # of 12 steps
    again = run(read_recipe(path, ["--num-train-epochs", "5"]), resume=True)
    assert (again.args.bc_steps, again.state.global_step) == (2, 15)


# A dry run.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-steps", "-5"], "`max_steps` must be at least 1, or -1 for whole epochs. Got -5."),
        (["--max-steps", "0"], "`max_steps` must be at least 1, or -1 for whole epochs. Got 0."),
        (["--max-steps", "-1", "--num-train-epochs", "0"], "`num_train_epochs` must be positive. Got 0.0."),
        (
            ["--report-to", "wandb"],
            "`report_to` must name trackers that are installed. Got 'wandb', which needs the package wandb: pip install wandb.",
        ),
        (["--output-dir", "{file}"], "`output_dir` must be a folder. Got {file}, which is a file."),
        (
            ["--output-dir", "{file}/run"],
            "`output_dir` must be a folder. Got {file}/run, inside {file}, which is a file.",
        ),
        (["--output-dir", "/proc/run"], "`output_dir` must be a folder that can be written to. Got /proc/run: /proc:"),
        (["--max-length", "500"], "`max_length` must fit the model's context of 128 tokens. Got 500."),
        (["--bc-steps", "3"], "`bc_steps`=3 must be below the run's 3 steps, or Eq. 4 is never used."),
        (["--push-to-hub", "--hub-strategy", "every_save"], "`push_to_hub` needs `hub_strategy='end'`"),
    ],
)
@pytest.mark.parametrize("mode", [["--dry-run"], []])
def test_a_dry_run_refuses_what_the_run_would(
    file: Path, flags: list[str], mode: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    calls = loaded(monkeypatch)
    data = str(file.parent / "words.jsonl")
    result = run_program("train", file, *(flag.format(file=data) for flag in flags), *mode)
    check_error(result, message.format(file=data))
    assert calls == []
    assert not (file.parent / "run").exists()


def test_a_dry_run_leaves_nothing_behind_and_refuses_a_folder_with_another_run(file: Path) -> None:
    before = sorted(file.parent.iterdir())
    assert run_program("train", file, "--dry-run").exit_code == 0
    assert sorted(file.parent.iterdir()) == before
    assert run_program("train", file).exit_code == 0
    check_error(run_program("train", file, "--dry-run"), "which has checkpoint-3. Resume it with `--resume`")
    assert run_program("train", file, "--dry-run", "--resume").exit_code == 0


def test_a_tracker_that_is_installed_is_let_through_and_every_tracker_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: name == "tensorboardX")
    trackers.check_trackers(["tensorboard", "kubeflow"])
    with pytest.raises(ValueError, match="Got 'comet_ml', which needs the package comet_ml: pip install comet-ml"):
        trackers.check_trackers(["tensorboard", "comet_ml"])
    assert set(INTEGRATION_TO_CALLBACK) - set(trackers.PACKAGES) == {"kubeflow"}
    with pytest.raises(ValueError, match="`report_to` must name trackers that are installed"):
        trainer(tmp_path, report_to=["mlflow"])


def test_an_error_in_the_output_folder_is_not_blamed_on_the_model(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_files", full)
    with pytest.raises(OSError, match="No space left"):
        run(read_recipe(file))


def test_nothing_chosen_is_infinite_or_missing(tmp_path: Path) -> None:
    args, found = choose(SequenceMatchConfig(str(tmp_path), use_cpu=True, report_to="none"), None, iter(()))
    assert found == {"max_length": 1024, "bc_steps": 1000, "bc_anneal_steps": 2000, "noise_source": "uniform"}
    assert math.isfinite(args.bc_weight(5))
