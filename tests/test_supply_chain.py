"""What is installed: versions with hashes, and nothing under a licence that nobody asked for."""

import re
import tomllib

from tests.test_architecture import PACKAGE

ROOT = PACKAGE.parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def installed(extra: str) -> set[str]:
    """The packages of an extra, those of the extras that it names included."""
    found = set()
    for requirement in EXTRAS[extra]:
        own = re.match(r"sequencematch\[(.*)\]$", requirement)
        names = [installed(name) for name in own[1].split(",")] if own else [{re.split(r"[<>=\[]", requirement)[0]}]
        found |= set().union(*names)
    return found


def test_packages_under_the_gpl_are_installed_by_name_only() -> None:
    """mauve-text is GPL-3. Who develops this library measures against it."""
    assert {extra for extra in EXTRAS if "mauve-text" in installed(extra)} == {"mauve", "dev"}
    assert "sacrebleu" in installed("evaluate")  # the control
    assert "GPL-3" in (ROOT / "docs" / "evaluation.md").read_text()


def test_the_lock_file_has_a_hash_for_every_tested_version_and_names_no_host() -> None:
    tested = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    lock = (ROOT / "requirements.lock").read_text()
    entries = dict(re.findall(r"^(\S+==\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", lock, flags=re.MULTILINE))
    assert sorted(entries, key=str.lower) == sorted(tested, key=str.lower)
    assert not re.search(r"://|index-url|find-links|trusted-host", lock)
    assert lock.count("\n") == 1 + len(entries) + sum(text.count("\n") for text in entries.values())
