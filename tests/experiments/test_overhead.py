"""The timing tables: what a log says, what is written from it, and a whole run at the smallest size."""

import json
from pathlib import Path

import pytest

from sequencematch.experiments import overhead, overhead_report, registry
from sequencematch.experiments.overhead import MODELS, SIZES, WORKLOADS, Size, Workload, seconds
from sequencematch.training.replay import ReplayBuffer

TIMED = {
    "cell": {"recipe": "text", "length": 128, "completion": 64, "steps_per_sample": 16, "batch_size": 8},
    "budget": {"model": "a model"},
    "device": "a machine",
    "rounds": [
        {"MLE": {"step": 1.0}, "MLE again": {"step": 1.5}, "SequenceMatch": {"step": 2.0, "sampling": 16.0}},
        {"MLE": {"step": 2.0}, "MLE again": {"step": 2.0}, "SequenceMatch": {"step": 4.0, "sampling": 32.0}},
        {"MLE": {"step": 4.0}, "MLE again": {"step": 4.0}, "SequenceMatch": {"step": 8.0, "sampling": 64.0}},
    ],
}


def test_a_step_is_timed_without_its_rollouts_and_without_the_first_steps() -> None:
    """Median of 3, 4 - 0.5 and 5; of the two batches of rollouts the first warms up."""
    steps = [
        {"step_seconds": 90.0, "rollouts/seconds": 80.0, "completions/mean_length": 7.0},
        {"step_seconds": 9.0, "rollouts/seconds": 0.0},
        {"step_seconds": 9.0, "rollouts/seconds": 0.0},
        {"step_seconds": 3.0, "rollouts/seconds": 0.0},
        {"step_seconds": 4.0, "rollouts/seconds": 0.5, "completions/mean_length": 8.0},
        {"step_seconds": 5.0, "rollouts/seconds": 0.0},
    ]
    assert seconds(steps) == {"step": 3.5, "sampling": 0.5, "rollout_length": 8.0}
    assert seconds([{"step_seconds": 9.0}] * 3 + [{"step_seconds": 2.0}]) == {"step": 2.0}


def test_ratios_are_taken_round_by_round_and_the_papers_lines_are_as_printed() -> None:
    """In every round a step takes 2 x MLE's, and sampling 16/16 = 1 x MLE's more. Totals are 3, 6 and 12."""
    lines = [line.strip("| ").split(" | ") for line in overhead_report.table(TIMED).splitlines()]
    assert lines[2] == ["MLE", "the paper", "1.5 ± 0.1", "–", "–", "1.5 ± 0.1", "1.00", "1.00"]
    assert lines[3] == ["SequenceMatch", "the paper", "5.3 ± 0.5", "50 ± 10", "16", "8.1 ± 0.2", "3.53", "5.40"]
    assert lines[4][2:] == ["2.00 [1.50, 3.00]", "–", "–", "2.00 [1.50, 3.00]", *["1.00 [1.00, 1.00]"] * 2]
    assert lines[5][-1] == "1.00 [1.00, 1.25]"
    assert lines[6][2:4] == ["4.00 [3.00, 6.00]", "32.0 [24.0, 48.0]"]
    assert lines[6][4:] == ["16", "6.00 [4.50, 9.00]", "2.00 [2.00, 2.00]", "3.00 [3.00, 3.00]"]


def test_a_run_makes_rollouts_a_second_time_after_as_many_steps_as_in_the_papers_table(tmp_path: Path) -> None:
    for preset, size in SIZES.items():
        for workload in WORKLOADS[preset]:
            args = workload.config(str(tmp_path), "sequencematch", checkpointing=size.checkpointing)
            buffer, due = ReplayBuffer(args.replay_size, args.replay_reuse), []
            for step in range(args.max_steps):
                if buffer.is_due(workload.batch_size):
                    buffer.made, buffer.rollouts = buffer.made + args.generation_batch_size, [None]  # type: ignore[list-item]
                    due.append(step)
                buffer.drawn += workload.batch_size
            assert due == [0, overhead_report.PAPER[workload.recipe]["SequenceMatch"].steps_per_sample]
            assert args.bc_weight(0) == pytest.approx(0.2)


def test_the_presets_have_models_and_only_one_of_them_runs_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(SIZES) == set(MODELS) == set(WORKLOADS)
    assert isinstance(registry.find("overhead"), registry.Experiment)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for preset in set(SIZES) - {"cpu"}:
        with pytest.raises(ValueError, match=f"`--preset` {preset} needs a GPU.*Use --preset cpu."):
            overhead.run(tmp_path, "", preset=preset)


@pytest.mark.slow
def test_a_run_times_all_variants_with_rollouts_of_full_length_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workloads = (Workload("text", 32, 4, 24, 2, batch_size=4), Workload("arithmetic", 32, 8, 24, 2, batch_size=4))
    monkeypatch.setattr(overhead, "SIZES", {"cpu": Size("bundled", 1, needs_gpu=False)})
    monkeypatch.setattr(overhead, "WORKLOADS", {"cpu": workloads})
    monkeypatch.setattr(overhead, "REST", 2)
    overhead.run(tmp_path, "sequencematch reproduce overhead")
    record = json.loads((tmp_path / "results.json").read_text())
    assert [timed["cell"]["recipe"] for timed in record["tables"]] == ["text", "arithmetic"]
    for timed in record["tables"]:
        (once,) = timed["rounds"]
        assert list(once) == list(overhead.VARIANTS)
        assert once["SequenceMatch"]["rollout_length"] == 24
        assert 0 < once["MLE"]["step"] < 10
    overhead.draw(tmp_path)
    assert (tmp_path / "overhead.png").stat().st_size > 10_000
    assert (tmp_path / "table.md").read_text().count("| SequenceMatch | ours |") == 2

    monkeypatch.setattr(overhead, "_timed", pytest.fail)
    overhead.run(tmp_path, "again")
    assert json.loads((tmp_path / "results.json").read_text())["tables"] == record["tables"]
