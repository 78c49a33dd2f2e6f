"""Ratios are paired, round by round, and memory is what the allocator held."""

import pytest
import torch

from sequencematch.bench import measure
from sequencematch.bench.measure import (
    copy_bandwidth,
    interleaved_seconds,
    median_row,
    paired,
    peak_bytes,
    signature,
)


def test_a_ratio_is_taken_inside_each_round_before_the_median() -> None:
    # The machine is three times slower in the second round: 2, 2 and 3 are the ratios, while that of the medians is 3.
    seconds = {"slow": [2.0, 6.0, 3.0], "fast": [1.0, 3.0, 1.0]}
    assert paired(seconds, "slow", "fast") == [2, 2, 3]
    assert median_row("suite", "name", paired(seconds, "slow", "fast")).value == 2


def test_variants_take_turns_in_every_round_in_changing_order() -> None:
    calls: list[str] = []
    variants = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = interleaved_seconds(variants, rounds=11, at_least_s=0)
    rounds = ["".join(calls[n : n + 2]) for n in range(0, len(calls), 2)]
    assert rounds[0] == "ab"  # each is warmed up once
    assert len(rounds) == 12
    assert set(rounds) == {"ab", "ba"}
    assert {name: len(times) for name, times in seconds.items()} == {"a": 11, "b": 11}


def test_a_row_holds_the_median_and_the_middle_half() -> None:
    row = median_row("suite", "name", [1.0, 2.0, 3.0, 4.0, 100.0])
    assert (row.value, row.middle, row.rounds) == (3, (2, 4), 5)
    assert median_row("suite", "name", [1.5]).middle == (1.5, 1.5)


def test_peak_memory_counts_what_was_alive_at_once() -> None:
    def call() -> None:
        torch.zeros(1000)  # freed at once
        both = [torch.zeros(1000), torch.zeros(2000)]
        assert len(both) == 2

    assert 4 * 3000 <= peak_bytes(call) < 4 * 3000 + 1000


def test_a_copy_moves_a_byte_in_less_than_a_nanosecond() -> None:
    assert 1e9 < copy_bandwidth("cpu", size=2**24) < 1e12


def test_a_signature_names_command_versions_and_machine() -> None:
    found = signature("sequencematch bench --quick")
    assert found["command"] == "sequencematch bench --quick"
    assert torch.__version__ in found["versions"]
    assert "transformers" in found["versions"]
    assert "thread" in found["machine"]


def test_a_number_is_signed_with_the_commit_its_run_began_on(monkeypatch: pytest.MonkeyPatch) -> None:
    measure._commit.cache_clear()
    began = measure.signature("bench")["commit"]
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("git was asked again"))
    assert measure.signature("bench")["commit"] == began
