"""Rollouts by actors of a Ray cluster. Ray asks outside addresses, so its tests run in a network namespace with loopback alone."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.alone import ALONE, ENVIRONMENT, can_be_alone

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name("ray_cases.py")
NAMES = [
    n.name for n in ast.parse(CASES.read_text()).body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of a test → what went wrong in it, or nothing."""
    if not can_be_alone():
        pytest.skip("Ray asks outside addresses. `unshare` must be allowed to make a network namespace without them.")
    folder = tmp_path_factory.mktemp("ray")
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES), f"--junitxml={report}"]
    own = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": "/tmp"}
    with (folder / "log.txt").open("w") as log:
        subprocess.run([*ALONE, *command], cwd=ROOT, env=os.environ | own, stdout=log, stderr=log, check=False)
    assert report.is_file(), (folder / "log.txt").read_text()[-10_000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = [case.find("failure"), case.find("error"), case.find("skipped")]
        found[str(case.get("name"))] = "\n".join(str(part.text) for part in wrong if part is not None)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_with_ray(results: dict[str, str], name: str) -> None:
    assert name in results
    assert not results[name], results[name]
