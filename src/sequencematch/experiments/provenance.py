"""Which code made a result."""

import subprocess
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


@cache
def commit() -> str:
    """The commit of this package's checkout, `unknown` if it is not in one.

    Read once: a commit that is made during a long run is not the code that runs.
    """

    def git(*arguments: str) -> str:
        try:
            run = subprocess.run(["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:  # no git
            return ""
        return run.stdout.strip()

    if Path(git("rev-parse", "--show-toplevel") or "/", "src", "sequencematch") != PACKAGE:
        return "unknown"  # an installed copy, perhaps inside somebody else's repository
    return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", ".") else "")
