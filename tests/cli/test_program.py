"""The program itself: `--help`, `--version`, and its threads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sequencematch import __version__
from sequencematch.cli import COMMANDS
from sequencematch.cli.lm_eval import lm_eval
from tests.cli.program import check_error, run


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = """
import sys
from typer.testing import CliRunner
from sequencematch.cli import app
for arguments in (["--help"], ["generate", "--help"], ["export", "--help"], ["reproduce", "--help"], ["--version"]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and result.stdout
assert not {"torch", "transformers", "rich"} & sys.modules.keys()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_help_fits_a_terminal_of_80_columns_and_cuts_no_sentence() -> None:
    """The tests' terminal has 80."""
    usage, *lines = run("--help").stdout.splitlines()
    assert usage.endswith(" [ARGS]...")
    assert all(len(line) <= 80 and not line.endswith(("...", "…")) for line in lines)
    said = " ".join(" ".join(lines).split())
    for command in (*COMMANDS, lm_eval):
        name, sentence = command.__name__.replace("_", "-"), (command.__doc__ or "").split("\n")[0].split(". ")[0]
        assert f" {name} {sentence.removesuffix('.')}." in said, name


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"sequencematch {__version__}\n"


@pytest.mark.parametrize(
    ("function", "command"),
    [
        ("sequencematch.policy.generation.rollouts", ["generate", "--prompt", "2 + 2"]),
        ("sequencematch.evaluation.evaluate", ["evaluate", "sequencematch/arithmetic", "--task", "arithmetic"]),
        ("sequencematch.experiments.demo.search", ["demo"]),
        ("transformers.Trainer.train", ["train", "recipe.yaml"]),
    ],
)
def test_a_command_computes_on_the_threads_that_suit_its_model(
    function: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def look(*_: Any, **__: Any) -> None:
        seen.append(torch.get_num_threads())
        raise ValueError("enough")

    row = {"prompt": "In base 5, what is 1 + 1? Solution:", "completion": " 2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    settings = (
        "model: sequencematch/arithmetic-base\ndataset: rows.jsonl\noutput_dir: out\nmax_length: 64\nuse_cpu: true\n"
    )
    (tmp_path / "recipe.yaml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(function, look)
    monkeypatch.setattr("sequencematch.policy.threads.cpu_threads", lambda *_: 3)
    before = torch.get_num_threads()
    check_error(run(*command), "enough")
    assert (seen, torch.get_num_threads()) == ([3], before)
