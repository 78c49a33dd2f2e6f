"""The program, run in this process, and what its answers have in common."""

import json
import string
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from sequencematch import cli

#: The vocabulary of the small model: one token per letter.
LETTERS = ["<s>", "</s>", *string.ascii_lowercase, " ", "?"]
PROGRAM = [sys.executable, "-m", "sequencematch.cli"]


def run(*arguments: str | Path, terminal: bool = False, stdin: str | None = None) -> Any:
    """Run the program in this process."""
    colour = {"FORCE_COLOR": "1" if terminal else None, "NO_COLOR": None, "TERM": "xterm-256color", "COLUMNS": "80"}
    return CliRunner().invoke(cli.app, list(map(str, arguments)), env=colour, input=stdin)


def lines_of_json(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def check_error(result: Any, *texts: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    for text in texts:
        assert text in result.stderr
