"""Build the wheel and the sdist, install the wheel into an empty environment, and use it from an empty folder. Each step is timed.

python dev/wheel_check.py

What is used: the first Python snippet of the README, `sequencematch demo --quick`, `doctor`, and `serve`, which must answer a
request and stop at SIGTERM. torch and all else come in the versions of constraints.txt.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUESTION = "In base 7, what is 25 + 14? Solution:"  # 19 + 11 = 30 = 4·7 + 2
EXTRAS = "serve,arithmetic,plot"


def timed(what: str, work: Callable[[], str]) -> None:
    """Do something, and print what came of it with the seconds that passed and those of all processors together."""
    start, used = time.perf_counter(), _used()
    found = work()
    print(f"{what}: {found}, {time.perf_counter() - start:.1f} s ({_used() - used:.1f} s of CPU)", flush=True)


def _used() -> float:
    """Seconds of CPU of all commands that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def run(*command: str | Path, folder: Path) -> str:
    """A command's output; an error ends the check."""
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, env=environment())
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def environment() -> dict[str, str]:
    """This environment, without what would lead to the repository's own sources or to the network."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"HF_HUB_OFFLINE": "1"}


def check(scratch: Path) -> None:
    """All steps."""
    env, empty, dist = scratch / "env", scratch / "empty", scratch / "dist"
    empty.mkdir()
    python, program = env / "bin" / "python", env / "bin" / "sequencematch"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")

    def build() -> str:
        run(sys.executable, "-m", "venv", scratch / "build", folder=scratch)
        builder = scratch / "build" / "bin" / "python"
        run(builder, "-m", "pip", "install", "--quiet", "build", "hatchling", folder=scratch)
        run(
            builder, "-m", "build", "--no-isolation", "--outdir", dist, ROOT, folder=scratch
        )  # the wheel from the sdist
        return ", ".join(f"{path.name} {path.stat().st_size / 2**20:.1f} MiB" for path in sorted(dist.iterdir()))

    def install() -> str:
        run(sys.executable, "-m", "venv", env, folder=scratch)
        (wheel,) = dist.glob("*.whl")
        run(*pip, "install", "--constraint", ROOT / "constraints.txt", f"{wheel}[{EXTRAS}]", folder=scratch)
        place = run(python, "-c", "import sequencematch; print(sequencematch.__file__)", folder=empty)
        assert place.startswith(str(env)), place
        return f"sequencematch[{EXTRAS}]"

    def snippet() -> str:
        (first, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
        printed = run(python, "-c", first, folder=empty)
        for expected in re.findall(r"print\(.*\)  # (.*)", first):
            assert expected in printed, printed
        return f"printed {printed.splitlines()[-1]!r}"

    def doctor() -> str:
        return "usable" if json.loads(run(program, "doctor", "--json", folder=empty))["usable"] else "broken"

    def demo() -> str:
        printed = run(program, "demo", "--quick", folder=empty)
        assert "SequenceMatch" in printed
        return f"{len(printed.splitlines())} lines"

    def serve() -> str:
        model = "sequencematch/arithmetic"
        command = [str(program), "serve", model, "--port", "0"]
        body = {"model": model, "prompt": QUESTION, "temperature": 0, "max_tokens": 8}
        with subprocess.Popen(
            command, cwd=empty, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        ) as server:
            assert server.stdout is not None
            try:
                address = next(found[0] for line in server.stdout if (found := re.search(r"http://[\w.:]+", line)))
                request = urllib.request.Request(
                    f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=60) as answer:
                    text = json.load(answer)["choices"][0]["text"]
                server.send_signal(signal.SIGTERM)
                code = server.wait(timeout=60)
            finally:
                server.kill()
        assert (text.strip(), code) == ("42", -signal.SIGTERM), (text, code)  # 143 in a shell
        return f"answered {text.strip()}, stopped by SIGTERM"

    steps: Sequence[tuple[str, Callable[[], str]]] = (
        ("build", build),
        ("install", install),
        ("README's snippet", snippet),
        ("sequencematch doctor", doctor),
        ("sequencematch demo --quick", demo),
        ("sequencematch serve", serve),
    )
    for what, work in steps:
        timed(what, work)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        check(Path(name))
