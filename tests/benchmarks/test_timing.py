"""Ratios are paired, round by round, and memory is what the allocator held."""

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import (
    copy_bandwidth,
    interleaved_seconds,
    measured,
    paired,
    peak_bytes,
    provenance,
)


def test_a_ratio_is_taken_inside_each_round_before_the_median() -> None:
    # The machine is three times slower in the second round: 2, 2 and 3 are the ratios, while that of the medians is 3.
    seconds = {"slow": [2.0, 6.0, 3.0], "fast": [1.0, 3.0, 1.0]}
    assert paired(seconds, "slow", "fast") == [2, 2, 3]
    assert measured("suite", "name", paired(seconds, "slow", "fast")).value == 2


def test_variants_take_turns_in_every_round_in_changing_order() -> None:
    calls: list[str] = []
    variants = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = interleaved_seconds(variants, rounds=11, at_least_s=0)
    rounds = ["".join(calls[n : n + 2]) for n in range(0, len(calls), 2)]
    assert rounds[0] == "ab"  # each is warmed up once
    assert len(rounds) == 12
    assert set(rounds) == {"ab", "ba"}
    assert {name: len(times) for name, times in seconds.items()} == {"a": 11, "b": 11}


def test_a_measurement_holds_the_median_and_the_middle_half() -> None:
    found = measured("suite", "name", [1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.value, found.middle, found.rounds) == (3, (2, 4), 5)
    assert measured("suite", "name", [1.5]).middle == (1.5, 1.5)


def test_peak_memory_counts_what_was_alive_at_once() -> None:
    def call() -> None:
        torch.zeros(1000)  # freed at once
        both = [torch.zeros(1000), torch.zeros(2000)]
        assert len(both) == 2

    assert 4 * 3000 <= peak_bytes(call) < 4 * 3000 + 1000


def test_the_bandwidth_is_that_of_the_fastest_copy_which_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([0.5, 0.25, 1.0, 0.5, 0.5])
    monkeypatch.setattr("benchmarks.timing.seconds_of", lambda *_, **__: next(took))
    assert copy_bandwidth("cpu", size=1000) == 2 * 1000 / 0.25


def test_provenance_names_command_versions_and_machine() -> None:
    found = provenance("python -m benchmarks --quick")
    assert found["command"] == "python -m benchmarks --quick"
    assert torch.__version__ in found["versions"]
    assert "transformers" in found["versions"]
    assert "thread" in found["machine"]


def test_provenance_names_the_commit_that_the_run_began_on(monkeypatch: pytest.MonkeyPatch) -> None:
    timing._commit.cache_clear()
    began = provenance("bench")["commit"]
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("git was asked again"))
    assert provenance("bench")["commit"] == began
