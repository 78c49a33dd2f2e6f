"""What a package offers can be listed without importing torch, and is there."""

import importlib
import subprocess
import sys

import pytest

from tests.test_architecture import PACKAGE

PACKAGES = {
    "sequencematch": ["Policy", "SequenceMatchConfig", "SequenceMatchTrainer", "__version__", "generate"],
    "sequencematch.policy": ["Generation", "Policy", "Sampling", "SamplingOptions", "backtrack", "contrastive_search"],
}


@pytest.mark.parametrize(("package", "names"), PACKAGES.items())
def test_dir_lists_the_public_names_before_torch_is_imported(package: str, names: list[str]) -> None:
    code = f"import sys, {package}; print(dir({package})); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{sorted(names)}\n", "")


@pytest.mark.parametrize(("package", "names"), PACKAGES.items())
def test_every_name_that_is_listed_is_there_and_no_other(package: str, names: list[str]) -> None:
    module = importlib.import_module(package)
    starred: dict[str, object] = {}
    exec(f"from {package} import *", starred)
    assert {name: starred[name] for name in names} == {name: getattr(module, name) for name in dir(module)}
    with pytest.raises(AttributeError, match=rf"^module '{package}' has no attribute 'Polcy'$"):
        module.Polcy  # noqa: B018


def test_generate_is_the_function_for_custom_generate() -> None:
    assert (
        importlib.import_module("sequencematch").generate is importlib.import_module("sequencematch.policy").backtrack
    )


def test_the_page_of_public_names_is_what_the_code_offers() -> None:
    """A name or an argument that is added, renamed or removed changes the page: `python -m dev.api > docs/api.md`."""
    written = (PACKAGE.parents[1] / "docs" / "api.md").read_text()
    done = subprocess.run([sys.executable, "-m", "dev.api"], cwd=PACKAGE.parents[1], capture_output=True, text=True)
    assert done.stdout == written, done.stderr
    for name in ("`Policy.from_pretrained(source, *, tokenizer,", "`sequencematch_loss(data, model, *, divergence,"):
        assert name in written
