"""The study of divergences: its models, how steadily they train, its tables, and a whole run at the smallest size."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sequencematch.core.divergences import DIVERGENCES
from sequencematch.core.integral_metrics import INTEGRAL_METRICS
from sequencematch.experiments import divergences, networks, registry, stability
from sequencematch.experiments.divergences import NAMES, PRESETS, Preset, star_cell, sum_cell
from sequencematch.experiments.divergences_report import (
    CLONING,
    COLUMNS,
    STARS,
    SUMS,
    TITLES,
    Run,
    as_run,
    draw,
    table,
    tables,
)
from sequencematch.experiments.fine_tuning import cells, training
from sequencematch.experiments.networks import Budget, steadiness
from sequencematch.experiments.path_star.cells import METHODS
from sequencematch.experiments.stability import run_or_stop
from sequencematch.training.callbacks import NonFiniteError

#: The way to decode and the measure of each task's first column.
COLUMN = {task: next(iter(columns.values())) for task, columns in COLUMNS.items()}
TINY = Preset(
    replace(PRESETS["cpu"].sums, steps=4, batch_size=4, test_rows=4),
    Budget(layers=1, width=16, steps=2, tuning_steps=4, batch_size=4, test_rows=4),
    arms=2,
    length=2,
    star_seeds=1,
)


def test_every_divergence_is_compared_on_both_tasks_with_the_same_settings(tmp_path: Path) -> None:
    """But for D of Eq. 4, which comes from rollouts as in the paper where there are any."""
    assert isinstance(registry.find("divergences"), registry.Experiment)
    assert set(NAMES) == {CLONING, *DIVERGENCES, *INTEGRAL_METRICS} == set(TITLES)
    size, settings = PRESETS["gpu"], []
    for name in (*DIVERGENCES, *INTEGRAL_METRICS):
        star = METHODS[star_cell(name, 0, size).method]
        made = (
            training.config(tmp_path, sum_cell(name, 0), size.sums, room=12),
            networks.config(tmp_path, star, size.stars, 0, steps=8, room=6),
        )
        own = [config.own_values() for config in made]
        assert {one.pop("divergence") for one in own} == {name}
        expected = "rollouts" if name in (*INTEGRAL_METRICS, "chi2_mixture") else "data"
        assert {one.pop("model_value_from") for one in own} == {expected}
        settings.append(own)
    assert all(own == settings[0] for own in settings)
    assert settings[0][1]["noise_source"] == "uniform"
    files = {sum_cell(name, 0).file for name in NAMES} | {star_cell(name, 0, TINY).file for name in NAMES}
    assert len(files) == 2 * len(NAMES)


def test_a_spike_is_ten_times_the_median_of_the_last_three_quarters() -> None:
    norms = [1.0, 2.0, 2.0, 2.0, 20.0, 21.0]
    assert steadiness([900.0, 800.0, *norms]) == {"median": 2.0, "largest": 21.0, "spikes": 1 / 6}


def test_a_run_that_stops_is_a_result_and_is_not_run_again(tmp_path: Path) -> None:
    cell, calls = sum_cell("js", 0), list[str]()

    def stop(cell: cells.Cell, budget: Any, folder: Path) -> dict[str, Any]:  # noqa: ARG001
        calls.append(cell.divergence)
        raise NonFiniteError("The loss is nan", 7, "The weights were not updated.", folder)

    found = run_or_stop(cell, stop, TINY.sums, tmp_path)
    assert found["stopped"].startswith("The loss is nan at step 7.")
    written = json.loads((tmp_path / "cells" / cell.file).read_text())
    assert written["cell"]["divergence"] == "js"

    def fail(_: cells.Cell, **__: Any) -> dict[str, Any]:
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        run_or_stop(sum_cell("mmd", 0), fail, TINY.sums, tmp_path)
    run = as_run(SUMS, {"divergence": "js", **written})
    assert run.stopped
    assert math.isnan(run.peak)
    assert table([run], SUMS).splitlines()[2] == "| Jensen-Shannon | – | – | – | – | – | – | – | – | 1 of 1 | 60 |"


def test_a_table_has_shares_spikes_and_stops_over_seeds() -> None:
    def run(right: float, largest: float) -> Run:
        return Run(
            STARS,
            "chi2",
            {("search", "accuracy"): right},
            {"median": 2.0, "largest": largest, "spikes": 0.01},
            stopped=False,
        )

    lines = table([run(0.5, 6.0), run(1.0, 8.0), Run(STARS, "chi2", {}, {}, stopped=True)], STARS).splitlines()
    assert lines[2] == ("| Pearson χ² | 75.0 [50.0, 100.0] | – | – | – | 1.0 [1.0, 1.0] | 3.5 [3.0, 4.0] | 1 of 3 |")


def test_a_task_that_was_not_run_has_no_table_and_no_panel(tmp_path: Path) -> None:
    runs = [
        Run(task, "chi2", {COLUMN[task]: 0.5}, {"median": 1.0, "largest": 2.0, "spikes": 0.0}, stopped=False)
        for task in (SUMS, STARS)
    ]
    assert "Path-star" in tables(runs)
    assert tables(runs[:1]) == f"Sums:\n\n{table(runs, SUMS)}"
    widths = []
    for given in (runs, runs[:1]):
        draw(given, tmp_path / "drawn.png")
        widths.append(int.from_bytes((tmp_path / "drawn.png").read_bytes()[16:20]))  # of the PNG's header
    assert 0.6 * widths[0] < widths[1] < 0.8 * widths[0]


def test_the_preset_small_has_sums_alone_in_three_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on: list[cells.Cell] = []

    def once(run: Any, models: list[cells.Cell], jobs: int) -> None:  # noqa: ARG001
        run_on.extend(models)

    monkeypatch.setattr(networks, "side_by_side", once)
    monkeypatch.setattr(networks, "without_curves", lambda _: {})
    monkeypatch.setattr("sequencematch.experiments.path_star.training.load", pytest.fail)
    divergences.run(tmp_path, "sequencematch reproduce divergences", preset="small")
    assert run_on == [sum_cell(name, seed) for seed in range(3) for name in NAMES]
    assert json.loads((tmp_path / "results.json").read_text())[STARS] == []


def test_a_share_of_nothing_is_left_out() -> None:
    measures = [{"name": "accuracy", "value": 0.5, "count": 4}, {"name": "recovers", "value": 0.0, "count": 0}]
    run = as_run(SUMS, {"divergence": "mmd", "decodings": {"greedy": measures}})
    assert run.measures == {("greedy", "accuracy"): 0.5}


def test_the_study_trains_both_tasks_and_goes_on_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One divergence stops at its first loss; of the others the norms of all steps are recorded."""
    options: Mapping[str, Any] = {"entropy": (2.0, 4.0), "bases": (5, 9), "max_new_tokens": 12, "train_size": 40}
    monkeypatch.setattr(cells, "_SMALL", {"add_or_sub_in_base": options})
    monkeypatch.setattr(divergences, "PRESETS", {"cpu": TINY})
    monkeypatch.setattr(divergences, "NAMES", ("js", "mmd"))
    compute = stability.WatchedTrainer.compute_loss

    def stopping(self: Any, *given: Any, **options: Any) -> Any:
        loss = compute(self, *given, **options)
        if self.args.objective == "sequencematch" and self.args.divergence == "js":
            raise NonFiniteError("The loss is nan", self.state.global_step + 1, "", self.args.output_dir)
        return loss

    monkeypatch.setattr(stability.WatchedTrainer, "compute_loss", stopping)
    divergences.run(tmp_path, "sequencematch reproduce divergences")
    record = json.loads((tmp_path / "results.json").read_text())
    whole_sums = record[SUMS][1]
    for task in (SUMS, STARS):
        stopped, whole = record[task]
        assert [stopped["divergence"], whole["divergence"]] == ["js", "mmd"]
        assert "at step 1." in stopped["stopped"]
        assert set(whole["gradient"]) == {"median", "largest", "spikes"}
        assert "log" not in whole
        assert "gradient_norms" not in whole
    cell = json.loads((tmp_path / SUMS / "cells" / sum_cell("mmd", 0).file).read_text())
    assert len(cell["gradient_norms"]) == 4
    assert whole_sums["gradient"] == steadiness(cell["gradient_norms"])
    assert cell["gradient_norms"][-1] == pytest.approx(cell["log"][3]["grad_norm"])
    assert {"accuracy", "recovers"} <= {measure["name"] for measure in cell["decodings"]["greedy"]}
    monkeypatch.setattr(stability.WatchedTrainer, "__init__", pytest.fail)
    divergences.run(tmp_path, "again")
    assert json.loads((tmp_path / "results.json").read_text())[STARS] == record[STARS]
    divergences.draw(tmp_path)
    assert "| Jensen-Shannon | – |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "divergences.png").stat().st_size > 10_000
