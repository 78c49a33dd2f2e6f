"""A profile: what a variant does and how often, the busiest first."""

import torch

from benchmarks.profile import Busy, Profile, markdown, profile


def test_what_is_called_is_found_as_often_as_it_was_called_and_the_busiest_comes_first() -> None:
    small, large = torch.randn(4, 4), torch.randn(400, 400)
    called = []

    def call() -> None:
        called.append(0)
        for _ in range(3):
            large @ large
        for _ in range(5):
            small.cos()

    found = profile(call, "cpu")
    assert len(called) == 2  # one to warm up
    calls = {entry.name: entry.calls for entry in found.busy}
    assert (calls["aten::mm"], calls["aten::cos"]) == (3, 5)
    assert found.busy[0].name == "aten::mm"
    assert sum(entry.seconds for entry in found.busy) > 0


def test_a_table_gives_shares_of_what_was_busy() -> None:
    found = Profile(0.5, (Busy("attention", 0.3, 32), Busy("addition", 0.1, 64)))
    assert markdown({"step: MLE": found}, {"command": "as typed"}).splitlines() == [
        "# Where the time goes",
        "",
        "- command: as typed",
        "",
        "## step: MLE",
        "",
        "500.00 ms under the profiler, busy for 400.00 in 96 calls",
        "",
        "| ms | of all | calls | what |",
        "|---:|---:|---:|---|",
        "| 300.00 | 75.0% | 32 | `attention` |",
        "| 100.00 | 25.0% | 64 | `addition` |",
    ]
