"""What the documents say is so: numbers were measured, names exist, nothing public is left out. Code: test_code_blocks.py."""

import ast
import importlib.util
import itertools
import json
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.report import markdown, read
from benchmarks.suites import SUITES
from sequencematch.evaluation import Record
from sequencematch.experiments import demo
from sequencematch.metrics import Measure
from tests.test_architecture import PACKAGE, core_functions

ROOT = PACKAGE.parents[1]
REFERENCE = re.compile(r"`((?:core|data|policy|tasks|metrics|training|evaluation|experiments)/[\w/]+\.py)::(\w+)`")
PAPER_TO_CODE = (ROOT / "docs" / "paper_to_code.md").read_text()


@cache
def functions(path: Path) -> dict[str, str]:
    """The source of every function at the top of a file, by its name."""
    return {
        node.name: ast.unparse(node) for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }


@cache
def defined(path: Path) -> set[str]:
    """The functions, classes and values at the top of a file."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names |= {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return names


def test_the_comparison_of_the_demo_is_what_was_measured() -> None:
    """Means over three seeds with their range, in percent; a measure that is 0 in all is written 0."""
    outcomes = demo.read(ROOT / "results" / "demo")
    rows = dict(
        re.findall(
            r"^\| (MLE|BC|SequenceMatch) \| (.*) \|$", (ROOT / "docs" / "get_started.md").read_text(), flags=re.M
        )
    )
    assert len(outcomes) == 9
    for objective, name in demo.OBJECTIVES.items():
        of = [outcome for outcome in outcomes if outcome.objective == objective]
        cells = [[100 * outcome[measure].value for outcome in of] for measure in demo.COMPARED]
        shown = [f"{sum(c) / 3:.1f} [{min(c):.1f}, {max(c):.1f}]" if any(c) else "0" for c in cells]
        assert rows[name].split(" | ") == shown


def test_the_numbers_of_the_guide_to_noise_are_what_was_measured() -> None:
    """The table has a row for each run; its last two columns are measured at temperature 1."""
    guide = (ROOT / "docs" / "noise.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (0\.\d+) \| (.*) \|$", guide, flags=re.MULTILINE)
    assert len(rows) == 5
    for source, rate, cells in rows:
        name = f"bc_{source}_{rate}"
        found = [*measured(name, "accuracy", "recovers", "recovers, plausible")]
        found += measured(f"{name}_temperature_1", "own errors deleted", "right tokens deleted")
        assert cells.split(" | ") == [f"{100 * m.value:.1f} [{100 * m.low:.1f}, {100 * m.high:.1f}]" for m in found]
    for measure in measured("run", "accuracy", "recovers", "deletes first, plausible", "recovers, plausible"):
        value, interval = str(measure).removeprefix(f"{measure.name} ").split(" ", 1)
        shown = rf"│ {measure.name} +│ +{value} │ +{interval.strip('[]').replace(', ', ' – ')} │ 300 │"
        assert re.search(shown, guide), measure
    (flattering,) = measured("bc_uniform_0.2_vocabulary", "recovers")
    assert f"recovers from {100 * flattering.value:.1f} % of mistakes drawn from the whole vocabulary" in guide
    (with_space,) = measured("run_space", "recovers, plausible")
    assert f"{100 * with_space.value:.1f} %" in guide


def measured(name: str, *measures: str) -> list[Measure]:
    """Measures of a run on dates."""
    record = Record.from_json((ROOT / "results" / "dates" / f"{name}.json").read_text())
    return [next(measure for measure in record.measures if measure.name == wanted) for wanted in measures]


def test_every_name_in_paper_to_code_exists() -> None:
    references = REFERENCE.findall(PAPER_TO_CODE)
    assert len(references) > 60
    for file, name in references:
        is_test = Path(file).name.startswith("test_")
        path = (ROOT / "tests" if is_test else PACKAGE) / file
        assert path.is_file(), file
        assert name in defined(path), f"{file} has no {name}"


def test_everything_public_in_core_is_in_paper_to_code() -> None:
    mentioned = {f"{Path(file).stem}.{name}" for file, name in REFERENCE.findall(PAPER_TO_CODE)}
    assert {name for name, _ in core_functions()} - mentioned == set()


def test_every_test_named_in_paper_to_code_is_a_sentence_that_can_fail() -> None:
    """A named test asserts something, itself or through a checking function."""
    for file, name in REFERENCE.findall(PAPER_TO_CODE):
        if name.startswith("test_"):
            source = functions(ROOT / "tests" / file)[name]
            assert "assert" in source or "check_" in source, name


def test_deviations_are_numbered_without_a_gap() -> None:
    numbers = re.findall(r"^(\d+)\. \*\*", (ROOT / "docs" / "deviations.md").read_text(), flags=re.MULTILINE)
    assert [int(n) for n in numbers] == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 11


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_the_tables_and_figures_of_performance_are_what_was_measured(machine: str) -> None:
    folder = ROOT / "results" / "bench" / machine
    report = read(folder)
    assert report.is_full
    assert markdown(report) == (folder / "bench.md").read_text()
    assert markdown(report) in (ROOT / "docs" / "performance.md").read_text()
    assert (folder / "bench.png").read_bytes() == (ROOT / "docs" / "images" / f"bench_{machine}.png").read_bytes()


def test_a_page_names_the_run_whose_times_of_compiled_layers_it_has() -> None:
    """Two runs measured them: 649.6 and 1,389.6 ms, 643.8 and 1,397.4 ms."""

    def said(file: str) -> tuple[str, str]:
        rows = json.loads((ROOT / "results" / file).read_text())["rows"]
        (times,) = (row["detail"]["ms"] for row in rows if "MLE, compiled" in (row["detail"] or {}).get("ms", {}))
        return f"{times['MLE, compiled']:.0f} ms", f"{times['compiled']:,.0f} ms"

    page = (ROOT / "docs" / "performance.md").read_text()
    (paragraph,) = (text for text in page.split("\n\n") if text.startswith("**Compiled layers**"))
    (file,) = re.findall(r"`results/(\S+\.json)`", paragraph)
    assert all(time in paragraph for time in said(file))
    assert re.findall(r"With compiled layers MLE takes\s+(\d+ ms)", page) == [said(file)[0]]
    assert not any(time in page for time in said("bench/h200/step_decoding.json"))  # the control: the other run


def test_every_recorded_result_is_listed_with_a_commit_and_a_command_that_exists() -> None:
    """Files, command, commit, machine, and whether the numbers are current or historical."""
    line = re.compile(
        r"^\| (`.+`) \| `(.+?)`.* \| [0-9a-f]{7} \| [^|]+ \| (?:current|historical)[^|]* \|$", re.MULTILINE
    )
    results = ROOT / "results"
    listed: list[str] = []
    for files, command in line.findall((results / "README.md").read_text()):
        for pattern in re.findall(r"`(.+?)`", files):
            found = [str(path.relative_to(results)) for path in results.glob(pattern)]
            assert found, pattern
            listed += found
        if command.startswith("python -m "):
            module, *words = command.removeprefix("python -m ").split()
            assert importlib.util.find_spec(module), command
            named = itertools.takewhile(lambda word: not word.startswith("-"), words)
            assert module != "benchmarks" or set(named) <= SUITES.keys(), command
    recorded = [path for path in results.rglob("*") if path.is_file() and path != results / "README.md"]
    assert sorted(listed) == sorted(str(path.relative_to(results)) for path in recorded)


def tree(page: str) -> str:
    """The tree of files on a page."""
    found = re.search(r"```\n(src/sequencematch/\n.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("layer", ["core", "policy", "training", "serving"])
def test_the_tour_names_every_file_of_a_layer(layer: str) -> None:
    part = re.search(rf"^  {layer}/.*?(?=^  \w+/|^\w)", tree("docs/tour.md"), flags=re.DOTALL | re.MULTILINE)
    assert part is not None
    named = set(re.findall(r"^ {4,6}(\w+\.py)", part[0], flags=re.MULTILINE))
    files = {path.name for path in (PACKAGE / layer).rglob("*.py")} - {"__init__.py"}
    assert named == files


@pytest.mark.parametrize("page", ["README.md", "docs/tour.md"])
def test_a_tree_names_every_folder_and_only_what_is_there(page: str) -> None:
    """Folders of the package are indented by two, what is in them by four."""
    folder, folders = ROOT, set[str]()
    for line in tree(page).splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        if not re.fullmatch(r"[\w./-]+[/.]\w*", name) or depth > 2:
            continue  # a line that goes on, or a folder inside a folder
        if depth == 0:
            assert (ROOT / name).exists(), name
        elif depth == 1:
            folder = PACKAGE / name
            folders |= {name} if folder.is_dir() else set()
            assert folder.exists(), name
        else:
            assert (folder / name).exists(), f"{folder.name}/{name}"
    layers = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and list(path.rglob("*.py"))}
    assert folders - {"models/"} == layers
