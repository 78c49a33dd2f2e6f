"""On a GPU: rows with settings of their own on captured steps."""

from typing import Any

import numpy
import pytest
import torch

from sequencematch.policy import Policy
from sequencematch.serving.engine import Engine
from tests.policy.test_generation import MODELS, with_row
from tests.serving.rows import VOCAB, random_settings, submit

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("error:A decoding step of .* can't be captured"),
]


def test_64_concurrent_rows_equal_rows_of_policy_generate_but_for_ties() -> None:
    """In float32 a random number decides otherwise if it lies within 1e-5 of a boundary: 48 boundaries, 2,000 actions, one row."""
    policy: Policy = with_row(MODELS["float32"]().cuda())
    rng = numpy.random.default_rng(0)
    settings = [random_settings(rng) for _ in range(64)]
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 12)).tolist() for _ in settings]
    engine = Engine(policy, slots=64).start()
    assert engine.is_captured
    together = submit(engine, prompts, settings)
    decoder: Any = engine.decoder
    assert not decoder.is_uncaptured
    assert all(uses is not None for uses in decoder.graphs)
    engine.close()
    alone = [policy.generate(p, **s).trajectories[0].chosen for p, s in zip(prompts, settings, strict=True)]
    assert all(row.error is None for row in together)
    equal = sum(row.chosen == list(wanted) for row, wanted in zip(together, alone, strict=True))
    print(f"{equal} of 64 rows are equal; {len(decoder.graphs)} graphs")
    assert equal >= 60
