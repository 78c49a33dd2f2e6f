"""The program itself: `--help` and `--version`."""

import subprocess
import sys

from sequencematch import __version__
from tests.cli.program import run


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = """
import sys
from typer.testing import CliRunner
from sequencematch.cli import app
for arguments in (["--help"], ["generate", "--help"], ["export", "--help"], ["--version"]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and result.stdout
assert not {"torch", "transformers", "rich"} & sys.modules.keys()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"sequencematch {__version__}\n"
