"""Examples are found from any folder, and the package alone, without extras, shows a model that deletes."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sequencematch.data.packaged import find_packaged
from sequencematch.evaluation import find_task
from sequencematch.training.recipe import read_recipe
from tests.cli.program import check_error, run

ROOT = Path(__file__).parents[2]
#: A program that hides every package that `pip install sequencematch` would not install, then runs the demo on a few graphs.
ALONE = """
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from packaging.requirements import Requirement

needed, left = set(), ["sequencematch"]
while left:
    name = left.pop().lower().replace("_", "-")
    if name not in needed:
        needed.add(name)
        try:
            listed = map(Requirement, requires(name) or [])
        except PackageNotFoundError:  # for another system
            continue
        left += [r.name for r in listed if r.marker is None or r.marker.evaluate({"extra": ""})]
for module, distributions in packages_distributions().items():
    if not {d.lower().replace("_", "-") for d in distributions} & needed:
        sys.modules[module] = None  # as if it were not installed
assert sys.modules["matplotlib"] is sys.modules["datasets"] is sys.modules["mathematics_dataset"] is None

from sequencematch.cli import app
from sequencematch.experiments import demo

demo.search = partial(demo.search, graphs=8)
app(["demo", "--quick"])
"""


def test_an_example_is_found_from_any_folder_and_a_file_of_that_name_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_packaged("examples/train_small.yaml") == ROOT / "examples" / "train_small.yaml"
    for other in (
        "examples/none.yaml",
        "train_small.yaml",
        str(tmp_path / "examples" / "train_small.yaml"),
        "a/examples/x",
    ):
        assert find_packaged(other) == Path(other)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "train_small.yaml").touch()
    assert find_packaged("examples/train_small.yaml") == Path("examples/train_small.yaml")


def test_the_readmes_commands_find_their_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("train", "examples/train_small.yaml", "--learning-rate", "1e-4", "--use-cpu", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "# dataset: 64 rows" in result.stdout
    assert len(read_recipe(find_packaged("examples/train_small.yaml"), ["--use-cpu"]).rows()[0]) == 64
    assert find_task("examples/new_task.py:Reverse").name == "reverse"
    assert len(find_task("examples/arithmetic_test.jsonl").test()) == 8
    check_error(run("train", "examples/train_smal.yaml"), "Got examples/train_smal.yaml, which is not a file.")
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_has_the_examples() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"examples": "sequencematch/examples"}


def test_the_package_alone_shows_a_model_that_deletes_and_then_names_the_extra(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    walk, _, rest = done.stdout.partition("Of 8 such graphs")
    assert "<bkspc>" in walk
    assert "In base 7, what is 25 + 14? Solution: 5<bkspc>42<eos>" in rest
    assert rest.splitlines()[-1].startswith(
        "The comparison of three trainings needs the package mathematics_dataset: pip"
    )
