"""A program that is forked runs and ends like one that Python starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

#: What a program can see and do, and how it can end.
SNIPPETS = {
    "what it was asked for": "import sys; print(sys.argv, sys.path[0], __name__, __file__ if '__file__' in vars() else '')",
    "where it is": "import os; print(os.getcwd(), os.environ['OWN'], os.getenv('PATH'), 'HOME' in os.environ)",
    "no input": "import sys; print(repr(sys.stdin.read()))",
    "its main module": "import __main__, sys; here = 1; print(__main__.here, sys.modules['__main__'].__name__)",
    "what is left to do": "import atexit, threading, time; atexit.register(print, 'last'); print('a', end='')\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
    "an exit code": "raise SystemExit(7)",
    "no exit code": "import sys; sys.exit()",
    "an exit text": "import sys; sys.exit('no')",
    "an error": "1 / 0",
    "ctrl-c": "raise KeyboardInterrupt",
    "a kill": "import os; print('lost', end=''); os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("code", SNIPPETS.values(), ids=SNIPPETS)
def test_a_forked_program_sees_and_does_and_ends_as_one_that_is_started(code: str, tmp_path: Path) -> None:
    given = {"cwd": tmp_path, "env": {"OWN": "ü", "PATH": os.environ["PATH"]}}
    arguments = ["-c", code, "--flag", "a b"]
    command = [sys.executable, *arguments]
    started = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, **given)  # type: ignore[call-overload]
    forked = programs.run(*arguments, **given)  # type: ignore[arg-type]
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_a_module_is_run_as_a_program(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import sys; print(__name__, __file__, sys.argv, __spec__.name)")
    command = ["-m", "shown", "x"]
    started = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert programs.run(*command, cwd=tmp_path).stdout == started.stdout


def test_it_has_torch_at_once_and_imports_the_library_itself() -> None:
    code = "import sys; print([name in sys.modules for name in ('torch', 'transformers', 'peft', 'sequencematch', 'tests')])"
    assert programs.run("-c", code).stdout == "[True, True, True, False, False]\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_it_and_is_how_it_ended(number: signal.Signals) -> None:
    with programs.Program("-c", "import signal; print('here', flush=True); signal.pause()") as program:
        assert program.stdout.readline() == "here\n"
        assert program.poll() is None
        program.send_signal(number)
        assert program.wait() == program.poll() == -number


def test_a_launcher_can_start_it_as_a_program_of_its_own() -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print('here', flush=True); signal.pause()"
    command = [sys.executable, "-S", programs.__file__, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launched:
        assert launched.stdout is not None
        assert launched.stdout.readline() == "here\n"
        launched.terminate()
        assert launched.wait() == 5
    killed = [*command[:-1], "import os; os.kill(os.getpid(), 9)"]
    assert subprocess.run(killed, check=False).returncode == -signal.SIGKILL
