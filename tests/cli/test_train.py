"""`sequencematch train` runs a recipe, can be interrupted and resumed, and answers bad input with one line."""

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainerCallback

from sequencematch.training import SequenceMatchTrainer, recipe
from tests import programs
from tests.cli.program import PROGRAM, check_error, run
from tests.training.test_recipe import check_same, file, loaded, model, weights, write

__all__ = ["file", "model"]  # fixtures


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C when so many steps are done."""

    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            if state.global_step == step:
                raise KeyboardInterrupt

    real = SequenceMatchTrainer.train

    def train(self: SequenceMatchTrainer, *arguments: Any, **options: Any) -> Any:
        self.add_callback(Interrupt())
        return real(self, *arguments, **options)

    monkeypatch.setattr(SequenceMatchTrainer, "train", train)


# Running.


def test_a_run_ends_with_a_policy_and_the_command_to_try_it(file: Path) -> None:
    result = run("train", file, "--logging-steps", "1")
    final = file.parent / "run" / "final"
    assert result.exit_code == 0, result.output
    command = f"sequencematch generate {final} --prompt c"
    assert result.stdout == f"Wrote {final}. To try it:\n\n    {command}\n"
    assert re.search(r"^step 1  loss \d", result.stderr, flags=re.MULTILINE)
    tried = run(*shlex.split(command)[1:], "--max-new-tokens", "4", "--seed", "0")
    assert (tried.exit_code, tried.stdout[0]) == (0, "c")


def test_plain_text_is_tried_on_a_prompt_of_its_own(file: Path) -> None:
    (file.parent / "words.txt").write_text("cat\ndog\ntree\nmoon\n")
    result = run("train", file, "--dataset", file.parent / "words.txt", "--objective=bc", "--max-steps=1")
    assert result.stdout.endswith("--prompt 'Once upon a time'\n")


def test_flags_win_over_the_recipe(file: Path) -> None:
    result = run(
        "train", file, "--max-steps", "2", "--no-disable-tqdm", "--objective=bc", "--packing", "--save-steps=2"
    )
    assert result.exit_code == 0, result.output
    assert {path.name for path in (file.parent / "run").iterdir()} == {
        "checkpoint-2",
        "final",
        "sequencematch_run.json",
    }
    known = yaml.safe_load((file.parent / "run" / "sequencematch_run.json").read_text())
    assert (known["objective"], known["packing"]) == ("bc", True)


def test_an_adapter_can_be_asked_for_by_flags(file: Path) -> None:
    result = run("train", file, "--peft.r", "2", "--peft.target-modules", "[q_proj, v_proj]")
    assert result.exit_code == 0, result.output
    adapter = weights(file.parent / "run" / "final")
    (shape,) = {tuple(tensor.shape) for name, tensor in adapter.items() if "q_proj.lora_A" in name}
    assert shape == (2, 64)
    assert not any("k_proj" in name for name in adapter)


def test_a_dry_run_prints_a_recipe_and_loads_no_model(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = loaded(monkeypatch)
    result = run("train", file, "--alpha", "0.05", "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("# dataset: 12 rows, prompts of up to 1 tokens, completions of up to 4\n")
    shown = yaml.safe_load(result.stdout)
    assert (shown["alpha"], shown["max_steps"], shown["dtype"]) == (0.05, 3, "float32")
    assert calls == []
    assert not (file.parent / "run").exists()


# Interruption.


def test_an_interrupted_run_resumes_to_the_same_policy(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "halved"):
        (tmp_path / name).mkdir()
    settings = {"max_steps": 6, "save_steps": 2, "peft": {"r": 2}, "output_dir": "run"}
    monkeypatch.chdir(tmp_path / "whole")
    assert run("train", write(tmp_path / "whole", model, **settings)).exit_code == 0

    monkeypatch.chdir(tmp_path / "halved")
    path = write(tmp_path / "halved", model, **settings)
    with monkeypatch.context() as patch:
        interrupt_at(5, patch)
        interrupted = run("train", path, "--learning-rate=3e-3")
    assert (interrupted.exit_code, interrupted.stdout) == (130, "")
    again = f"sequencematch train {path} --learning-rate=3e-3 --resume"
    last = interrupted.stderr.splitlines()[-1]
    assert last == f"Interrupted. The last checkpoint is run/checkpoint-4. To resume: {again}"
    resumed = run(*shlex.split(again)[1:])
    assert resumed.exit_code == 0, resumed.output
    check_same(weights(tmp_path / "whole" / "run" / "final"), weights(tmp_path / "halved" / "run" / "final"))


def test_a_run_interrupted_before_its_first_checkpoint_says_so_and_resumes_from_the_start(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(1, patch)
        interrupted = run("train", file)
    assert interrupted.exit_code == 130, interrupted.output
    assert "Interrupted. There is no checkpoint yet. To resume: sequencematch train" in interrupted.stderr
    assert run("train", file, "--resume").exit_code == 0


def test_control_c_ends_the_program_with_130_and_one_line(file: Path) -> None:
    flags = ["--max-steps", "100000", "--save-steps", "5", "--save-total-limit", "2", "--logging-steps", "1000000"]
    with programs.Program(*PROGRAM[1:], "train", file, *flags) as process:
        while not (file.parent / "run" / "checkpoint-5").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (130, "")
    (line,) = stderr.splitlines()
    found = re.fullmatch(r"Interrupted\. The last checkpoint is .*/run/checkpoint-(\d+)\. To resume: .* --resume", line)
    assert found
    done = int(found[1])
    resumed = run("train", file, *flags, "--resume", "--max-steps", str(done + 2))
    assert resumed.exit_code == 0, resumed.output


# Errors.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "`RECIPE` must be a YAML file, before any flags. Got {path}, which is not a file."),
        ("", "{path} must hold settings in YAML, one `name: value` a line. Got nothing."),
        ("- model", "{path} must hold settings in YAML, one `name: value` a line. Got a list."),
        ("model: [a\ndataset: b", "In line 2, column 8: expected ',' or ']', but got ':'."),
        ("model: a\ndataset: b.txt", "{path} must say where the results go. Add a line `output_dir: …`"),
        ("model: a\ndatset: b.txt", "`datset` in {path}, line 2, is not a setting; did you mean 'dataset'?"),
        ("model: a\nmax_steps: many", "`max_steps` in {path}, line 2, must be a whole number. Got 'many'."),
        (
            "model: a\ndataset: b.txt\noutput_dir: c",
            "`dataset` must be a file that can be read. Got b.txt: No such file",
        ),
    ],
)
def test_a_recipe_that_is_wrong_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    if text is not None:
        path.write_text(text)
    check_error(run("train", path), message.format(path=path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lerning-rate", "1"], "`--lerning-rate` is not a setting; did you mean 'learning_rate'?"),
        (["--learning-rate", "fast"], "`--learning-rate` must be a number. Got 'fast'."),
        (["--learning-rate"], "`--learning-rate` must have a value. Got none."),
        (["--gamma=1"], "`gamma` must lie strictly between 0 and 1"),
        (
            ["--objective", "mel"],
            "`objective` must be one of sequencematch, bc, mle, unlikelihood. Got 'mel'; did you mean",
        ),
        (["another.yaml"], "'another.yaml' must be a flag"),
        (["--model", "no/such/model"], "`model` must be a folder or a model on the hub. Got 'no/such/model'"),
        (["--max-length", "500"], "`max_length` must fit the model's context of 128 tokens. Got 500."),
        (["--peft.target-modules", "[lm_head]"], "`peft_config` must leave the output layer alone"),
    ],
)
def test_a_flag_that_is_wrong_is_one_line(file: Path, flags: list[str], message: str) -> None:
    check_error(run("train", file, *flags), message)


def test_flags_come_after_the_recipe(file: Path) -> None:
    check_error(
        run("train", "--max-steps", "2", file), "`RECIPE` must be a YAML file, before any flags. Got --max-steps"
    )


def test_a_bad_row_is_one_line_and_no_model_is_loaded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = loaded(monkeypatch)
    with (file.parent / "words.jsonl").open("a") as data:
        data.write('{"question": "2 + 2"}\n')
    check_error(
        run("train", file),
        "Row 12 of the dataset (",
        "words.jsonl, line 13) must have the columns `text`",
        "Got 'question'.",
    )
    assert calls == []


def test_a_folder_with_checkpoints_needs_resume(file: Path) -> None:
    assert run("train", file).exit_code == 0
    check_error(run("train", file), "which has checkpoint-3. Resume it with `--resume`, or choose another folder.")
    check_error(run("train", file, "--resume", "--alpha", "0.5"), "whose run had alpha=0.01 and not 0.5.")


def test_a_loss_that_is_not_a_number_is_one_line_and_exit_code_1(file: Path) -> None:
    result = run("train", file, "--learning-rate", "1e30", "--max-grad-norm", "0", "--logging-steps", "1000")
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert re.match(r"Error: The (loss|gradient's norm) is (nan|inf).* at step \d\. The weights were not updated", line)


def test_a_recipe_that_is_not_there_is_missed_before_torch_is_imported() -> None:
    code = """
import sys
from typer.testing import CliRunner
from sequencematch.cli import app
assert CliRunner().invoke(app, ["train", "nowhere.yaml"]).exit_code == 2
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Help.


def test_help_explains_recipes_and_lists_every_setting() -> None:
    result = run("train", "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "every field of transformers.TrainingArguments" in " ".join(result.stdout.split())
    for entries in recipe.documentation().values():
        for name, text in entries:
            assert re.search(rf"^  {name} ", result.stdout, flags=re.MULTILINE), name
            assert "".join(text.split()) in "".join(result.stdout.split()), name


def test_the_recipe_in_the_help_is_one(tmp_path: Path) -> None:
    lines = run("train", "--help").stdout.splitlines()
    start = lines.index("      preset: arithmetic")
    (tmp_path / "recipe.yaml").write_text("\n".join(lines[start : lines.index("", start)]))
    read = recipe.read_recipe(tmp_path / "recipe.yaml")
    assert (read.config.learning_rate, read.peft_config().r) == (1e-4, 16)
