"""The engine is `policy.generate` for rows that come, go and differ: same actions, whoever the neighbours are."""

from collections.abc import Iterator

import numpy
import pytest

from sequencematch.serving.engine import Engine
from tests.serving.rows import VOCAB, policy, random_settings, submit


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = Engine(policy(), slots=16, queue=100).start()
    yield running
    running.close()


def test_64_concurrent_rows_with_different_settings_equal_the_same_rows_alone(engine: Engine) -> None:
    rng = numpy.random.default_rng(0)
    settings = [random_settings(rng) for _ in range(64)]
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 12)).tolist() for _ in settings]
    together = submit(engine, prompts, settings)
    assert sum(VOCAB in row.chosen for row in together) > 25, "too few rows delete"
    for prompt, options, row in zip(prompts, settings, together, strict=True):
        assert row.error is None
        alone = policy().generate(prompt, **options).trajectories[0]
        assert row.chosen == list(alone.chosen), options
