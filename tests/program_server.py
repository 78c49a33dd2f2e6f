"""A process that has imported what takes seconds to import, and forks programs; tests/programs.py starts it and asks it.

A program runs as `python -c …` and `python -m …` run it: as `__main__`, in its own environment and folder, to its own end.
The library and the tests are imported by each program for itself; only other packages are there already, so what they read of the
environment while they are imported is the server's.
"""

import atexit
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

IMPORTED = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *(
        "transformers.trainer",
        "transformers.models.llama.modeling_llama",
        "peft",
        "datasets",
        "accelerate",
        "safetensors.torch",
    ),
)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and the files that are the program's input, output and errors."""
    start, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    with connection.makefile("rb") as rest:
        length, _, text = start.partition(b"\n")
        return json.loads(text + rest.read(int(length) - len(text))), files


def wait_for_program(listener: socket.socket) -> dict[str, Any]:
    """Serve; returns in the process of a program, with what it is to run.

    Each program has a parent of its own, which tells the program's id and then how it ended.
    """
    parent, is_ready = os.getppid(), False
    listener.settimeout(5)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if not is_ready:
            prepare()
            is_ready = True
        while reaped():
            pass
        if os.fork() == 0:
            listener.close()
            return forked(connection)
        connection.close()
    raise SystemExit


def prepare() -> None:
    """Import; no thread of Python's may be there, because a fork has none but its own.

    On a machine with a GPU programs import for themselves: CUDA can't be used in a fork of a process that looked for it.
    """
    if os.path.exists("/dev/nvidiactl"):
        return
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    assert threading.active_count() == 1, threading.enumerate()


def reaped() -> bool:
    """Whether there was an ended child, which is now gone."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def forked(connection: socket.socket) -> dict[str, Any]:
    """Fork once more: the child becomes the program, its parent waits for it."""
    connection.settimeout(None)
    request, files = receive(connection)
    program = os.fork()
    if program:
        for file in files:
            os.close(file)
        try:
            connection.sendall(b"%d\n" % program)
            connection.sendall(b"%d\n" % os.waitpid(program, 0)[1])
        finally:
            os._exit(0)
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    output = open(1, "wb", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = io.TextIOWrapper(output, encoding, errors, write_through=is_unbuffered)
    return request


def run(kind: str, what: str, *arguments: str) -> None:
    """Run a program as the interpreter does."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if kind == "-c":
        sys.argv[:], sys.path[0] = ["-c", *arguments], ""
        exec(compile(what, "<string>", "exec"), vars(main))
    else:
        sys.argv[:], sys.path[0] = ["-m", *arguments], os.getcwd()
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]


def end(*arguments: str) -> NoReturn:
    """Run a program and end as the interpreter does, but leave memory to the system: to tear down what was imported takes 0.3 s."""
    code = 0
    try:
        run(*arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else ended.code is not None
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as waiting:
        asked = wait_for_program(waiting)
    end(*asked["arguments"])
