"""The commit that a result names."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sequencematch.experiments import provenance


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with a package in `src/sequencematch`, and one commit."""
    package = tmp_path / "src" / "sequencematch"
    package.mkdir(parents=True)
    (package / "code.py").write_text("x = 1\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(provenance, "PACKAGE", package)
    provenance.commit.cache_clear()
    yield package
    provenance.commit.cache_clear()


def test_the_commit_of_a_checkout_is_named_and_so_are_changes(checkout: Path) -> None:
    first = provenance.commit()
    assert len(first) >= 7
    assert " " not in first
    (checkout / "code.py").write_text("x = 2\n")
    assert provenance.commit() == first  # read once
    provenance.commit.cache_clear()
    assert provenance.commit() == f"{first} with changes"


def test_a_package_inside_another_repository_has_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = checkout.parents[1] / "site-packages" / "sequencematch"
    elsewhere.mkdir(parents=True)
    monkeypatch.setattr(provenance, "PACKAGE", elsewhere)
    assert provenance.commit() == "unknown"
