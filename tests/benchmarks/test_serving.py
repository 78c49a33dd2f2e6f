"""The benchmark of the server runs, and counts what it says."""

import json
from pathlib import Path

import pytest

from benchmarks.serving import Seen, main


def test_the_engine_is_measured_beside_its_peers_on_equal_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.timing.provenance", lambda *_: {})
    out = tmp_path / "engine.json"
    sizes = ["--streams", "4", "--prompt", "6", "--new-tokens", "5", "--rounds", "2"]
    main(["engine", *sizes, "--without-peer", "--out", str(out)])
    record = json.loads(out.read_text())
    assert record["is_captured"] is False
    assert set(record["ratios"]) == {
        "engine / engine (A/A control), tokens per second",
        "engine / Policy.generate, tokens per second",
    }
    assert all(rate > 0 for rate in record["actions_per_s"].values())


def test_quantiles_are_of_the_ordered_times() -> None:
    # 1 … 100 ms: half are below 51 ms, and 99 below 100 ms.
    seen = Seen(tokens=40, actions=50, first_s=[n / 1000 for n in range(100, 0, -1)], memory_bytes=[2**20, 2**21])
    record = seen.record(seconds=2.0)
    assert record["first_token_ms"] == pytest.approx({"p50": 51.0, "p99": 100.0})
    assert (record["tokens_per_s"], record["actions_per_s"], record["memory_growth"]) == (20, 25, 1.0)
