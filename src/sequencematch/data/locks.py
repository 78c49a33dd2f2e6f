"""A lock on a folder, so that two processes never write to it at once."""

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

#: The locks of this process: `lockf` does not keep a process from locking a file twice.
_held: set[Path] = set()


@contextmanager
def locked(folder: Path, argument: str, name: str) -> Iterator[None]:
    """Hold the lock `name` of a folder, created if missing; a `ValueError` if it is held already. `argument` names the folder.

    The lock is `lockf`'s. It ends with its process, even if worker processes live on that were forked from it; they would keep
    `flock`'s. The file is opened once, because closing any descriptor of it ends the lock. Host and process in it are for the
    error's text only: process ids mislead across containers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / name
    if path in _held:
        raise _in_use(folder, argument, "this process")
    file = _locked_file(path, folder, argument)
    _held.add(path)
    try:
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
    finally:
        _held.discard(path)
        with suppress(OSError):
            path.unlink()  # under the lock: whoever opened it meanwhile sees that it is gone
        file.close()


def _locked_file(path: Path, folder: Path, argument: str) -> IO[str]:
    """The lock's file, opened and locked. Where the file system has no locks, a warning says so."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            _lock(file.fileno())
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                holder = file.read() or "another process"
                file.close()
                raise _in_use(folder, argument, holder) from error
            logger.warning("%s can't be locked (%s). Let only one process write to it.", folder, error.strerror)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # its holder has just removed it


def _lock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        raise OSError(errno.ENOLCK, "this system has no lockf") from None
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _in_use(folder: Path, argument: str, holder: str) -> ValueError:
    return ValueError(
        f"`{argument}` must not be in use. Got {folder}, to which {holder} writes. Wait until that has ended, or choose "
        f"another folder."
    )
