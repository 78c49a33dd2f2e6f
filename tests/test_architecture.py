"""The architecture is the folder tree: imports point one way, importing does nothing, and core cites the paper."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "sequencematch"
#: Each layer may import those before it. Layers in one tuple don't import each other.
LAYERS = [
    ("core", "extras"),
    ("data",),
    ("policy", "tasks", "metrics"),
    ("training",),
    ("evaluation",),
    ("bench", "experiments", "serving"),
    ("cli",),
]
RANK = {layer: rank for rank, layers in enumerate(LAYERS) for layer in layers}
#: The packages that a layer may import beside the standard library; other layers may import any.
PACKAGES = {"core": {"torch", "jaxtyping", "sequencematch"}, "data": {"torch", "yaml", "datasets", "sequencematch"}}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported(source: str) -> set[str]:
    """Every module a file imports, at its top or inside a function."""
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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_up_the_layers_only(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if layer != "__init__":
        assert layer in RANK, f"{layer} is not a layer; add it where it belongs"
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


def test_importing_prints_nothing_seeds_nothing_and_leaves_transformers_alone() -> None:
    code = """
import random, sys, torch
before = torch.get_rng_state(), random.getstate(), torch.get_default_dtype(), torch.get_num_threads()
import sequencematch, sequencematch.core
from sequencematch.data import examples, rows, seeds, settings, spelling
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
