"""Python programs for tests, in processes forked from one that has imported torch and transformers: that takes 4 s of each.

A program that is to show how long it takes to start, what it imports, or what a package reads of the environment while it is
imported is started by `subprocess`. Launchers start programs themselves; this file is one that they can start:
`accelerate launch --no_python python -S tests/programs.py -m module …`.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

#: The name of the variable that holds the server's address.
ADDRESS = "SEQUENCEMATCH_TEST_PROGRAMS"
#: Beside it: what the server says, and the cache of Hugging Face, its own.
LOG, CACHE = "log.txt", "huggingface"
SERVER = Path(__file__).with_name("program_server.py")
Done = subprocess.CompletedProcess[str]


@contextmanager
def server() -> Iterator[None]:
    """A server for this process and all that it starts. It imports nothing before it is asked for a program."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX) as listener,
        open(os.path.join(folder, LOG), "w") as log,
    ):
        listener.bind(os.path.join(folder, "programs"))
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, SERVER, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"HF_HOME": os.path.join(folder, CACHE)},
        )
        os.environ[ADDRESS] = listener.getsockname()
        try:
            yield
        finally:
            del os.environ[ADDRESS]
            process.terminate()
            process.wait()


class Program:
    """What `subprocess.Popen([sys.executable, *arguments])` is, with pipes of text; `arguments` begin with -c or -m."""

    def __init__(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        files: tuple[int, int, int] | None = None,
    ) -> None:
        """Start it. `files` are its input, output and errors in place of nothing and two pipes."""
        assert arguments[0] in ("-c", "-m"), arguments
        request = {
            "arguments": list(map(str, arguments)),
            "folder": str(cwd or Path.cwd()),
            "environment": {
                **(os.environ if env is None else env),
                "HF_HOME": str(Path(os.environ[ADDRESS]).with_name(CACHE)),
            },
        }
        text = json.dumps(request).encode()
        pipes = () if files else (os.pipe(), os.pipe())
        with open(os.devnull) as nothing:
            self.connection = socket.socket(socket.AF_UNIX)
            self.connection.connect(os.environ[ADDRESS])
            given = files or (nothing.fileno(), *(write for _, write in pipes))
            socket.send_fds(self.connection, [b"%d\n" % len(text)], given)
        self.connection.sendall(text)
        for _, write in pipes:
            os.close(write)
        self.streams = [open(read) for read, _ in pipes]  # noqa: SIM115
        self.returncode: int | None = None
        self.pid = self._number()

    @property
    def stdout(self) -> IO[str]:
        return self.streams[0]

    @property
    def stderr(self) -> IO[str]:
        return self.streams[1]

    def _number(self) -> int:
        digits = b""
        while not digits.endswith(b"\n"):
            digit = self.connection.recv(1)
            assert digit, Path(os.environ[ADDRESS]).with_name(LOG).read_text()
            digits += digit
        return int(digits)

    def wait(self, timeout: float | None = None) -> int:
        """How it ended: its exit code, or the signal's number below zero."""
        if self.returncode is None:
            self.connection.settimeout(timeout)
            self.returncode = os.waitstatus_to_exitcode(self._number())
            self.connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """The same, or None while it runs."""
        if self.returncode is None and not select.select([self.connection], [], [], 0)[0]:
            return None
        return self.wait()

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[str, str]:
        """The rest of its output and errors, once it has ended."""
        with ThreadPoolExecutor(1) as pool:
            errors = pool.submit(self.stderr.read)
            output = self.stdout.read()
        self.wait()
        return output, errors.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Gone, whatever happened."""
        self.kill()
        self.wait()
        for stream in self.streams:
            stream.close()


def run(*arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Done:
    """What `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)` returns."""
    with Program(*arguments, cwd=cwd, env=env) as program:
        stdout, stderr = program.communicate()
        return Done(list(map(str, arguments)), program.wait(), stdout, stderr)


def main() -> None:
    """Be the program, for whoever started this one: the same files, the same signals, the same end."""
    passed = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed)  # they wait until there is a program
    program = Program(*sys.argv[1:], files=(0, 1, 2))
    for number in passed:
        signal.signal(number, lambda received, _: os.kill(program.pid, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    code = program.wait()
    if code < 0:
        if -code in passed:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
