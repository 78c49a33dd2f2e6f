"""Calls that change files, counted, so that a process can die at any one of them, the same one each time."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Python's audit events of calls that change a file or a folder. Each is raised before the call.
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
Die = Callable[[], Any]


class Killed(BaseException):
    """The process is gone: no handler of errors runs."""


def killed() -> None:
    """Raise `Killed`, in a test that stays in its process."""
    raise Killed


class Watch:
    """Counts the changes below a folder. From change number `last` on, each calls `die` instead of being made."""

    def __init__(self, folder: Path, last: int | None, die: Die) -> None:
        self.folder, self.last, self.die = str(folder), last, die
        self.count, self.is_dying = 0, False

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """One audit event."""
        if event not in CHANGES or not isinstance(arguments[0], str | os.PathLike):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITES):
            return
        if not os.path.abspath(arguments[0]).startswith(self.folder):
            return
        if self.last is not None and self.count >= self.last and not self.is_dying:
            self.is_dying = True  # what `die` itself changes is not seen
            try:
                self.die()
            finally:
                self.is_dying = False
        self.count += 1


_watches: list[Watch] = []  # a hook of the interpreter can't be removed, so there is one, which asks these


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    for watch in _watches:
        watch.see(event, arguments)


@contextmanager
def watched(folder: Path, last: int | None = None, die: Die = killed) -> Iterator[Watch]:
    """Watch the changes below a folder, and die at number `last`, counted from 0."""
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked.append(True)
    watch = Watch(folder, last, die)
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)


_hooked: list[bool] = []


def deaths(folder: Path, work: Callable[[], Any], prepare: Callable[[], Any]) -> Iterator[int]:
    """Let `work` die at each of its changes, after `prepare` each time, and yield the number of changes made; then not at all."""
    number, dies = 0, True
    while dies:
        prepare()
        dies = False
        with watched(folder, number):
            try:
                work()
            except Killed:
                dies = True
        yield number
        number += 1
