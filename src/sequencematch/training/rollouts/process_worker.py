"""The program of a worker process: orders in, rollouts out, until its trainer is gone.

python -m sequencematch.training.rollouts.process_worker CONNECTION LIFELINE FOLDER ON_DISK

CONNECTION and LIFELINE are file descriptors. FOLDER is where the two programs write for each other, ON_DISK has weights that don't
fit there. Only names of files pass the connection: a process that is stopped half-way through a long message would make the other
one wait.
"""

import ctypes
import os
import pickle
import select
import shutil
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

SETUP = "setup.pickle"
_PR_SET_PDEATHSIG = 1


def end_with_the_trainer(lifeline: int, *folders: Path) -> threading.Thread:
    """Start a thread that ends this process as soon as nobody holds the other end of the lifeline, and leaves no files behind.

    Signals that a terminal or a scheduler sends to all processes of a run are for the trainer. On Linux a worker that was
    stopped is continued when its trainer dies, so that it can end, too.
    """

    def wait() -> None:
        os.read(lifeline, 1)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    ending = threading.Thread(target=wait, daemon=True)
    ending.start()
    return ending


def serve(connection: Connection, folder: Path) -> None:
    """Build the worker and answer orders, until the connection is closed: that raises an error."""
    import torch  # after the lifeline: this takes seconds

    from sequencematch.training.rollouts.worker import Worker

    def block(path: str) -> torch.Tensor:
        return torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)

    setup, frozen = pickle.loads((folder / SETUP).read_bytes())
    worker = Worker(setup, block(frozen))
    connection.send(None)
    while True:
        place = Path(connection.recv())
        order, weights = pickle.loads(place.read_bytes())
        place.write_bytes(pickle.dumps(worker.make(order, block(weights))))
        connection.send(str(place))


def main(connection: str, lifeline: str, folder: str, on_disk: str) -> None:
    """Answer orders until the trainer is gone."""
    ending = end_with_the_trainer(int(lifeline), Path(folder), Path(on_disk))
    try:
        serve(Connection(int(connection)), Path(folder))
    except (EOFError, OSError):
        if select.select([int(lifeline)], [], [], 1.0)[0]:  # the trainer is gone: files are being removed
            ending.join()
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
