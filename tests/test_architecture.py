"""The architecture is the folder tree: imports point one way, importing does nothing, and core cites the paper."""

import ast
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import SLOW

PACKAGE = Path(__file__).parents[1] / "src" / "sequencematch"
#: Each layer may import those before it. Layers in one tuple don't import each other.
LAYERS = [
    ("core", "extras", "lazy"),
    ("data",),
    ("policy", "tasks", "metrics"),
    ("training",),
    ("evaluation",),
    ("experiments", "serving", "doctor"),
    ("cli",),
]
RANK = {layer: rank for rank, layers in enumerate(LAYERS) for layer in layers}
#: The packages that a layer may import beside the standard library; other layers may import any.
PACKAGES = {
    "core": {"torch", "jaxtyping", "sequencematch"},
    "data": {"torch", "yaml", "datasets", "jinja2", "sequencematch"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported(source: str) -> set[str]:
    """Every name a file imports: at its top, inside a function, or for type checking only."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write absolute imports"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def wrong_imports(layer: str, source: str) -> list[str]:
    """Imports of a layer that is not above this one, and of packages that this layer must do without."""
    wrong = []
    for name in sorted(imported(source)):
        root, *rest = name.split(".")
        target = rest[0] if rest and rest[0] in RANK else "cli"  # the package itself knows everything
        is_version = name == "sequencematch.__version__"
        if root == "sequencematch" and not is_version and target != layer and RANK[target] >= RANK[layer]:
            wrong.append(name)
        if layer in PACKAGES and root not in PACKAGES[layer] | sys.stdlib_module_names:
            wrong.append(name)
    return wrong


def cycle(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a circle, as module name → source says; empty if there are none."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        # `from package import name` imports the module of that name, or else the package itself.
        targets = {name if name in sources else name.rpartition(".")[0] for name in imported(source)}
        graph[module] = targets & sources.keys() - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))  # so that each imports the next
    return []


def test_the_folders_are_the_layers() -> None:
    print(" ← ".join(", ".join(layers) for layers in LAYERS))
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES} - {"__init__"}
    assert found <= RANK.keys(), "add the new one to LAYERS, where it belongs"
    assert RANK.keys() == found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_up_the_layers_only(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if layer != "__init__":
        assert wrong_imports(layer, path.read_text()) == []


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("core", "from sequencematch.policy.head import score"),
        ("core", "import transformers"),
        ("core", "import sequencematch"),
        ("core", "from sequencematch.data.seeds import hash_seed"),
        ("data", "from transformers import AutoTokenizer"),
        ("data", "def f():\n    from sequencematch.policy import Policy"),
        ("policy", "from sequencematch import Policy"),
        ("metrics", "from sequencematch.policy import Policy"),
        ("training", "def f():\n    from sequencematch.cli import main"),
    ],
)
def test_an_import_the_wrong_way_is_caught(layer: str, line: str) -> None:
    assert wrong_imports(layer, line) != []


def test_no_modules_import_each_other_in_a_circle() -> None:
    sources = {}
    for path in MODULES:
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        sources[name.removesuffix(".__init__")] = path.read_text()
    found = cycle(sources)
    assert not found, " imports ".join(found)


@pytest.mark.parametrize(
    ("a", "b", "c", "found"),
    [
        ("import p.b", "from p import a", "", ["p.a", "p.b", "p.a"]),
        ("from p.b import x", "from p.c import y", "from p.a import z", ["p.a", "p.b", "p.c", "p.a"]),
        ("from p.b import x", "def f():\n    import p.a", "", ["p.a", "p.b", "p.a"]),
        ("from p.b import x", "if TYPE_CHECKING:\n    from p.a import y", "", ["p.a", "p.b", "p.a"]),
        ("from p.b import x", "import p.c", "import torch", []),
        ("import p.b, p.c", "from p.c import x", "", []),
    ],
)
def test_a_circle_of_imports_is_found(a: str, b: str, c: str, found: list[str]) -> None:
    circle = cycle({"p.a": a, "p.b": b, "p.c": c})
    assert sorted(circle[1:]) == sorted(found[1:])
    turned = found[1:] * 2  # it may start anywhere
    assert not circle or any(turned[i : i + len(circle) - 1] == circle[1:] for i in range(len(circle)))


def test_importing_prints_nothing_seeds_nothing_and_leaves_transformers_alone() -> None:
    code = """
import random, sys, torch
before = torch.get_rng_state(), random.getstate(), torch.get_default_dtype(), torch.get_num_threads()
import sequencematch, sequencematch.core
from sequencematch.data import examples, files, markdown, pieces, rows, seeds, settings, spelling
after = torch.get_rng_state(), random.getstate(), torch.get_default_dtype(), torch.get_num_threads()
assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
assert not {"transformers", "beartype", "matplotlib", "datasets"} & sys.modules.keys()
"""
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_warning_raised_in_the_package_fails_a_test() -> None:
    with pytest.raises(UserWarning, match="beware"):
        warnings.warn_explicit("beware", UserWarning, "somewhere.py", 1, module="sequencematch.core.mdp")


def core_functions() -> list[tuple[str, object]]:
    """The public functions of core, and the public classes."""
    found: list[tuple[str, object]] = []
    for path in sorted((PACKAGE / "core").glob("[a-z]*.py")):
        module = importlib.import_module(f"sequencematch.core.{path.stem}")
        members = inspect.getmembers(module, lambda m: inspect.isfunction(m) or inspect.isclass(m))
        found += [
            (f"{path.stem}.{name}", m) for name, m in members if m.__module__ == module.__name__ and name[0] != "_"
        ]
    return found


@pytest.mark.parametrize(("name", "member"), core_functions(), ids=[name for name, _ in core_functions()])
def test_everything_public_in_core_names_its_place_in_the_paper(name: str, member: object) -> None:
    assert re.search(r"§\d|Eq\. \d|Alg\. |App\. [A-I]", inspect.getdoc(member) or ""), f"{name} cites nothing"


def test_everything_listed_as_slow_exists() -> None:
    for entry in SLOW:
        place, _, name = entry.partition("::")
        path = PACKAGE.parents[1] / place
        assert path.exists(), entry
        assert f"def {name}" in (path.read_text() if name else "def "), entry
