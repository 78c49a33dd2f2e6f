"""Workers as processes on this machine. Weights, orders and rollouts travel in files, in memory where there is room."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sequencematch.training.rollouts.pool import Done, Event, Failed, Lost, Ready
from sequencematch.training.rollouts.process_worker import SETUP
from sequencematch.training.rollouts.worker import Order, Setup

#: A file system in memory, where there is one.
MEMORY = Path("/dev/shm")
#: Lines of a worker's output that an error shows.
_SHOWN = 30


class Published:
    """A file of weights. It may be written anew as soon as nobody refers to it."""

    def __init__(self, path: str) -> None:
        """Name the file."""
        self.path = path


@dataclass
class _Worker:
    """A process, our end of its connection, what keeps it alive, and the weights of its order."""

    process: "subprocess.Popen[bytes]"
    connection: Connection
    lifeline: int
    log: Path
    weights: Published | None = None
    is_ready: bool = False


class ProcessEngine:
    """Starts a process per worker, each with this program's environment and module path."""

    has_queue = False

    def __init__(self) -> None:
        """Nothing is started yet."""
        self.workers: dict[int, _Worker] = {}
        self.free: list[str] = []
        self.files = 0
        self.folder: Path | None = None  # in memory
        self.on_disk: Path | None = None

    def block(self, size: int) -> Tensor:
        """A file mapped into memory: one that is no longer referred to, or a new one."""
        if self.folder is None or self.on_disk is None:
            self.folder = Path(tempfile.mkdtemp(prefix="sequencematch-", dir=MEMORY if MEMORY.is_dir() else None))
            self.on_disk = Path(tempfile.mkdtemp(prefix="sequencematch-"))
            for folder in (self.folder, self.on_disk):  # also if training fails before it has workers
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        path = next((free for free in self.free if os.path.getsize(free) == size), None)
        if path is None:
            name = f"weights-{self.files}"
            self.files += 1
            path = _allocated(self.folder / name, size) or _allocated(self.on_disk / name, size)
        else:
            self.free.remove(path)
        if path is None:
            raise ValueError(
                f"`rollouts` 'process' needs room for weights, {size / 2**30:.2f} GiB, in {MEMORY} or in {tempfile.gettempdir()}. "
                f"Make room, or name another folder in the environment variable TMPDIR."
            )
        block = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        block.path = path  # type: ignore[attr-defined]
        return block

    def publish(self, block: Tensor) -> Published:
        """Name the file that was mapped."""
        published = Published(block.path)  # type: ignore[attr-defined]
        weakref.finalize(published, self.free.append, published.path)
        return published

    def begin(self, setup: Setup, frozen: Published) -> None:
        """Write down what workers begin with."""
        assert self.folder is not None
        self.setup, self.frozen = setup, frozen
        (self.folder / SETUP).write_bytes(pickle.dumps((setup, frozen.path)))

    def launch(self, worker: int) -> None:
        """Start a process; what it prints goes to a file."""
        assert self.folder is not None
        assert self.on_disk is not None
        log = self.folder / f"worker-{worker}.log"
        ours, its = Pipe()
        its_lifeline, lifeline = os.pipe()
        threads = str(self.setup.threads)
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": threads}
        program = [sys.executable, "-m", "sequencematch.training.rollouts.process_worker"]
        with its, log.open("wb") as output:
            process = subprocess.Popen(
                [*program, str(its.fileno()), str(its_lifeline), str(self.folder), str(self.on_disk)],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(its.fileno(), its_lifeline),
            )
        os.close(its_lifeline)
        self.workers[worker] = _Worker(process, ours, lifeline, log)

    def assign(self, worker: int, order: Order, weights: Published) -> None:
        """Write the order to a file, and send its name. A process that has died meanwhile is heard of later."""
        assert self.folder is not None
        own = self.workers[worker]
        own.weights = weights
        place = self.folder / f"order-{order.number}-{worker}"
        place.write_bytes(pickle.dumps((order, weights.path)))
        try:
            own.connection.send(str(place))
        except OSError:
            return

    def events(self, timeout_s: float) -> list[Event]:
        """What processes sent, and which of them ended."""
        by_connection: dict[Any, int] = {own.connection: worker for worker, own in self.workers.items()}
        return [
            event
            for connection in wait(list(by_connection), timeout_s)
            for event in self._heard(by_connection[connection])
        ]

    def _heard(self, worker: int) -> Iterator[Event]:
        own = self.workers[worker]
        try:
            message = own.connection.recv()
        except (EOFError, OSError):
            yield self._ended(worker)
            return
        if not own.is_ready:
            own.is_ready = True
            yield Ready(worker, own.process.pid)
            return
        place, own.weights = Path(message), None
        yield Done(worker, pickle.loads(place.read_bytes()))
        place.unlink()

    def _ended(self, worker: int) -> Event:
        """A process that ends by itself has raised an error. One that was ended by a signal is lost."""
        own = self.workers[worker]
        code = own.process.wait()
        if code >= 0:
            lines = own.log.read_text(errors="replace").strip().splitlines()
            return Failed(worker, "\n".join(lines[-_SHOWN:]) or f"It ended with code {code} and said nothing.")
        return Lost(worker, f"was ended by signal {-code}")

    def kill(self, worker: int) -> None:
        """End a process, also one that is stopped."""
        own = self.workers.pop(worker)
        own.process.kill()
        own.process.wait()
        own.connection.close()
        os.close(own.lifeline)
        if self.folder is not None:
            for place in self.folder.glob(f"order-*-{worker}"):
                place.unlink()

    def stop(self) -> None:
        """End all processes and remove their files."""
        for worker in list(self.workers):
            self.kill(worker)
        for folder in filter(None, (self.folder, self.on_disk)):
            shutil.rmtree(folder, ignore_errors=True)
        self.folder = self.on_disk = None
        self.free.clear()


def _allocated(place: Path, size: int) -> str | None:
    """A new file with all its bytes allocated, or None if there is no room: writing to a hole would then end the program."""
    with place.open("wb") as file:
        file.truncate(size)
        if not hasattr(os, "posix_fallocate"):
            return str(place)
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            place.unlink()
            return None
    return str(place)
