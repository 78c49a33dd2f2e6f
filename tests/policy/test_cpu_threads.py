"""Small models compute on one CPU thread unless the user chose otherwise, and torch has its threads back afterwards."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sequencematch.policy import Policy
from sequencematch.policy.threads import SMALL, cpu_threads, limit_threads
from tests.policy.tiny_models import tiny


@pytest.fixture
def default_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Torch as it starts where nobody chose; the tests themselves run on one thread."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield 8
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("parameters", "environment", "threads", "expected"),
    [
        (SMALL - 1, {}, 8, 1),
        (SMALL - 1, {}, 4, 1),  # torch's default with two threads a core
        (SMALL, {}, 8, 8),
        (SMALL - 1, {"OMP_NUM_THREADS": "8"}, 8, 8),
        (SMALL - 1, {"MKL_NUM_THREADS": "8"}, 8, 8),
        (SMALL - 1, {}, 3, 3),  # torch.set_num_threads(3)
        (SMALL - 1, {}, 16, 16),
        (SMALL, {}, 3, 3),
    ],
)
def test_a_small_model_has_one_thread_unless_the_user_chose(
    parameters: int, environment: dict[str, str], threads: int, expected: int
) -> None:
    assert cpu_threads(parameters, environment, threads, cores=8) == expected


@pytest.mark.parametrize("fails", [False, True])
def test_threads_are_limited_for_a_while(default_threads: int, fails: bool) -> None:
    seen: list[int] = []
    try:
        with limit_threads(Policy.from_pretrained(tiny("Llama"))):
            seen.append(torch.get_num_threads())
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        seen.append(-1)
    assert seen == [1] + [-1] * fails
    assert torch.get_num_threads() == default_threads


def test_a_large_model_keeps_its_threads(default_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sequencematch.policy.threads.SMALL", 10)
    with limit_threads(Policy.from_pretrained(tiny("Llama"))):
        assert torch.get_num_threads() == default_threads


def test_a_model_that_is_not_on_a_cpu_keeps_its_threads(default_threads: int) -> None:
    class Elsewhere(torch.nn.Linear):
        device = torch.device("cuda")

    policy: Any = Elsewhere(2, 2)
    with limit_threads(policy):
        assert torch.get_num_threads() == default_threads
