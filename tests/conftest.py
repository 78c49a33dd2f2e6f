"""One thread per process, shapes checked at run time in the package and the benchmarks, randomness seeded and printed."""

import gc
import importlib.util
import os
from importlib.machinery import SourceFileLoader
from types import ModuleType

#: Set before torch is imported, and inherited by every process that a test starts: tests run side by side, and threads
#: that outnumber the cores wait for each other.
gc.disable()  # until everything is imported
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

import tests.shape_checker  # noqa: F401  (jaxtyping looks the checker up by name)


def run_instrumented(loader: SourceFileLoader, module: ModuleType) -> None:
    """Run a module of the package with its annotations checked.

    jaxtyping's own loader caches the instrumented code under a tag of its own. While the module runs, the tag also applies to
    modules it imports: torch and transformers would be compiled again, in every process (15 s).
    """
    exec(loader.source_to_code(loader.get_data(loader.path), loader.path), vars(module))


install_import_hook(["sequencematch", "benchmarks"], "tests.shape_checker.check")
spec = importlib.util.find_spec("sequencematch")
if spec is not None and type(spec.loader) is not SourceFileLoader:  # as with JAXTYPING_DISABLE
    type(spec.loader).exec_module = run_instrumented  # type: ignore[method-assign, union-attr]

hypothesis.settings.register_profile("default", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("default")


def pytest_collection_finish() -> None:
    """Leave what was imported, millions of objects, out of garbage collection: each trainer collects garbage when it starts."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator whose seed is printed when a test fails."""
    seed = getattr(request, "param", 0)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
