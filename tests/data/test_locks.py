"""A folder is written by one process at a time."""

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sequencematch.data import locks
from sequencematch.data.locks import locked

#: Takes the lock, says so, and waits; `FORKS` adds a worker that outlives it, `FLOCK` replaces the kind of lock.
HOLDER = """
import fcntl, os, signal, sys
from pathlib import Path
from sequencematch.data.locks import locked
folder, *how = sys.argv[1:]
if "FLOCK" in how:
    fcntl.lockf = fcntl.flock
with locked(Path(folder), "folder", ".lock"):
    worker = os.fork() if "FORKS" in how else 0
    if "FORKS" not in how or worker:
        print("held", worker, flush=True)
    signal.pause()
"""


@contextmanager
def another_process(folder: Path, *how: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """It holds the lock; its worker's id, or 0."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), *how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline().split()[1])
    try:
        yield process, worker
    finally:
        for number in filter(None, (process.pid, worker)):
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
        process.stdout.close()


def test_a_lock_is_held_inside_and_gone_after(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b", "folder", ".lock"):
        assert (tmp_path / "a" / "b" / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"
        with (
            pytest.raises(ValueError, match=r"`folder` must not be in use\. Got .*, to which this process writes\."),
            locked(tmp_path / "a" / "b", "folder", ".lock"),
        ):
            pass
        with locked(tmp_path / "a" / "b", "folder", ".other"), locked(tmp_path, "folder", ".lock"):
            pass
    assert list((tmp_path / "a" / "b").iterdir()) == []
    with locked(tmp_path / "a" / "b", "folder", ".lock"):
        pass


def test_another_process_is_named_and_its_lock_ends_with_it(tmp_path: Path) -> None:
    with another_process(tmp_path) as (holder, _):
        text = rf"`folder` must not be in use\. Got .*, to which process {holder.pid} on \S+ writes\. Wait until"
        for _ in range(2):  # a refusal leaves the other's lock as it is
            with pytest.raises(ValueError, match=text), locked(tmp_path, "folder", ".lock"):
                pass
        holder.kill()
        holder.wait()
        with locked(tmp_path, "folder", ".lock"):
            pass


@pytest.mark.parametrize(("how", "is_free"), [((), True), (("FLOCK",), False)])
def test_a_worker_that_outlives_its_killed_parent_does_not_keep_the_lock(
    how: tuple[str, ...], is_free: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: `flock` would be kept."""
    if not is_free:
        monkeypatch.setattr(fcntl, "lockf", fcntl.flock)
    with another_process(tmp_path, "FORKS", *how) as (holder, worker):
        holder.kill()
        holder.wait()
        os.kill(worker, 0)  # it lives
        if is_free:
            with locked(tmp_path, "folder", ".lock"):
                pass
        else:
            with pytest.raises(ValueError, match="must not be in use"), locked(tmp_path, "folder", ".lock"):
                pass


def test_a_lock_whose_file_was_removed_by_its_holder_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is opened, then its holder ends and removes it, then it is locked: a file without a name locks nothing."""
    real = fcntl.lockf
    tries: list[int] = []

    def lockf(descriptor: int, kind: int) -> None:
        if not tries:
            (tmp_path / ".lock").unlink()
        tries.append(kind)
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with locked(tmp_path, "folder", ".lock"):
        assert (tmp_path / ".lock").exists()
    assert len(tries) == 2


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lockf(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with caplog.at_level(logging.WARNING, logger=locks.logger.name), locked(tmp_path, "folder", ".lock"):
        pass
    assert "can't be locked (No locks available). Let only one process write to it." in caplog.text
