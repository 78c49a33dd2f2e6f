"""Shapes are checked at run time in the package and the benchmarks; randomness is seeded and printed."""

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

import tests.shape_checker  # noqa: F401  (jaxtyping looks the checker up by name)

install_import_hook(["sequencematch", "benchmarks"], "tests.shape_checker.check")

hypothesis.settings.register_profile("default", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("default")
torch.set_num_threads(1)


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator whose seed is printed when a test fails."""
    seed = getattr(request, "param", 0)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
