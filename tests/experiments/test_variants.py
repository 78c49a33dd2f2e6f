"""Settings chosen on questions of their own, and ablations: variants of the methods, and a run at the smallest size."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sequencematch.experiments.fine_tuning import ablations, cells, selection, variants_report
from sequencematch.experiments.fine_tuning.cells import BUDGETS, METHODS, Cell, task
from sequencematch.experiments.fine_tuning.training import config, saved
from sequencematch.experiments.fine_tuning.variants import MODULE, Trial, Variant, distinct, fresh_prompts

TINY = replace(BUDGETS["cpu"], steps=4, batch_size=4, test_rows=6)
#: What `selection` tries with the preset `gpu`.
TRIED = selection.variants(1e-4)
RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing 5,000 questions takes most of the time."""
    options = {"entropy": (2.0, 4.0), "bases": (5, 9), "max_new_tokens": 12, "train_size": 40}
    monkeypatch.setattr(cells, "_SMALL", {MODULE: options})


def found(scores: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """Results of variants: their accuracies at temperature 1 and greedy; 0 for all that are not named."""
    ways = ("temperature 1", "greedy")
    return [
        {
            "variant": variant.name,
            "cell": {"method": variant.method, "noise": "digits", "rate": 0.1, "seed": 0},
            "decodings": {
                way: [{"name": "accuracy", "value": value, "count": 9}]
                for way, value in zip(ways, scores.get(variant.name, (0.0, 0.0)), strict=True)
            },
        }
        for variant in TRIED
    ]


def test_every_method_tries_six_settings_sequencematch_with_both_forms_of_d_and_none_twice() -> None:
    every = selection.tried(1e-3)
    assert {method: len(own) for method, own in every.items()} == {"mle": 6, "bc": 6, "sequencematch": 12}
    assert list(every) == list(METHODS)
    assert {settings["learning_rate"] for settings in every["sequencematch"]} == {1e-3, 3e-3}
    printed, own = every["sequencematch"][:6], every["sequencematch"][6:]
    assert [{**settings, "model_value_from": "data"} for settings in printed] == list(own)
    names = [variant.name for variant in TRIED]
    assert len(set(names)) == len(names) == 24


def test_the_highest_mean_of_both_ways_to_decode_decides() -> None:
    """0.5 and 0.3 have a mean of 0.4; 0.35 twice has less, although its greedy accuracy is higher."""
    scores = {"BC, rate 0.0002": (0.5, 0.3), "BC, rate 0.0003": (0.35, 0.35), "MLE, rate 0.0008": (0.1, 0.0)}
    chosen = selection.best(found(scores), 1e-4)
    assert chosen["bc"] == {"learning_rate": 2e-4}
    assert chosen["mle"] == {"learning_rate": 8e-4}
    assert chosen["sequencematch"] == {"learning_rate": 1e-4, "alpha": 0.01, "gamma": 0.998}  # of equals the first


def test_settings_that_were_not_run_are_not_chosen() -> None:
    """Some records have SequenceMatch with D of its rollouts alone: all of its six scores are 0, and still beat none."""
    ran = [result for result in found({}) if "D of the data" not in result["variant"]][::-1]
    assert selection.best(ran, 1e-4)["sequencematch"] == {"learning_rate": 1e-4, "alpha": 0.01, "gamma": 0.998}
    assert selection.best(ran[:1], 1e-4)["sequencematch"]["offset_lr_multiplier"] == 100.0


@pytest.mark.skipif(not RESULTS.is_dir(), reason="results/ is not part of an installed package")
@pytest.mark.parametrize(("preset", "folder"), [("gpu", "selection"), ("small", "small/selection")])
def test_a_preset_has_the_settings_that_were_chosen(preset: str, folder: str) -> None:
    record = json.loads((RESULTS / folder / "results.json").read_text())
    budget = BUDGETS[preset]
    assert selection.best(record["models"], budget.learning_rate) == record["chosen"] == budget.own


def test_settings_of_a_method_replace_those_of_the_preset_and_of_no_other_method(tmp_path: Path) -> None:
    budget = replace(TINY, own={"bc": {"learning_rate": 0.5, "noise_burst": 2}})
    changed = config(tmp_path, Cell("mul", "bc", "digits", 0.1), budget, room=12)
    assert (changed.learning_rate, changed.noise_burst) == (0.5, 2)
    other = config(tmp_path, Cell("mul", "sequencematch", "digits", 0.1), budget, room=12)
    assert (other.learning_rate, other.noise_burst) == (TINY.learning_rate, 1)


@pytest.mark.parametrize("variant", [*ablations.VARIANTS, *TRIED], ids=lambda variant: variant.name)
def test_the_settings_of_every_variant_are_accepted(variant: Variant, tmp_path: Path) -> None:
    budget = replace(TINY, own={variant.method: {**variant.settings}})
    made = config(tmp_path, Trial(variant, 0).cell, budget, room=12)
    assert {name: getattr(made, name) for name in variant.settings} == dict(variant.settings)


@pytest.mark.parametrize(
    ("preset", "repeated"),
    [
        ("gpu", {"D of the rollouts", "offset head × 100", "α 0.1"}),
        ("small", {"D of the data", "α 0.01", "γ 0.998"}),
    ],
)
def test_variants_that_the_preset_repeats_are_left_out(preset: str, repeated: set[str]) -> None:
    """Fresh prompts stay, although their settings are those of D of the data: they differ in what rollouts start from."""
    kept = [variant.name for variant in distinct(ablations.VARIANTS, BUDGETS[preset])]
    assert kept == [variant.name for variant in ablations.VARIANTS if variant.name not in repeated]
    assert "rollouts from fresh prompts" in kept


@pytest.mark.parametrize(("preset", "seeds"), [("cpu", 1), ("small", 3), ("gpu", 2), ("paper", 2)])
def test_ablations_have_the_seeds_of_their_preset_and_two_on_a_gpu(
    preset: str, seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[Trial] = []

    def keep(given: Sequence[Trial], *_: Any) -> list[Any]:
        trials.extend(given)
        return []

    monkeypatch.setattr(ablations, "arithmetic", lambda *_: None)
    monkeypatch.setattr(ablations, "run_trials", keep)
    ablations.run(tmp_path, "sequencematch reproduce ablations", preset=preset)
    kept = distinct(ablations.VARIANTS, BUDGETS[preset])
    assert trials == [Trial(variant, seed) for seed in range(seeds) for variant in kept]


def test_variants_of_a_method_have_files_of_their_own(tmp_path: Path) -> None:
    for listed in (ablations.VARIANTS, TRIED):
        files = {Trial(variant, seed).file(tmp_path) for variant in listed for seed in (0, 1)}
        assert len(files) == 2 * len(listed)


@pytest.mark.usefixtures("few_questions")
def test_fresh_prompts_are_neither_trained_on_nor_tested() -> None:
    pytest.importorskip("mathematics_dataset")
    questions = task(MODULE, "cpu", replace(TINY, test_rows=40))
    fresh = fresh_prompts(questions)
    known = {row["prompt"] for row in [*questions.train(), *questions.test()]}
    assert len(fresh) == 40
    assert all(set(row) == {"prompt"} and row["prompt"] not in known for row in fresh)


def test_only_models_that_are_measured_again_are_kept() -> None:
    kept = [Cell(MODULE, "mle"), Cell(MODULE, "bc", "digits", 0.1), Cell(MODULE, "sequencematch", "digits", 0.1, 2)]
    assert all(cell.is_kept for cell in kept)
    others = [("bc", "digits", 0.2), ("bc", "uniform", 0.1), ("sequencematch", "none", 0.0)]
    assert not any(Cell(MODULE, *other).is_kept for other in others)
    assert not Cell(MODULE, "sequencematch", "digits", 0.1, divergence="js").is_kept


def test_a_table_has_a_row_per_variant_in_their_order() -> None:
    lines = variants_report.table(found({"MLE, rate 5e-05": (0.25, 0.5)})).splitlines()
    assert lines[0].startswith("| variant | right, temperature 1 | right, greedy | own errors deleted |")
    assert lines[2] == "| MLE, rate 5e-05 | 25.0 | 50.0 | – | – | 1 |"
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == [v.name for v in TRIED]


@pytest.mark.slow
@pytest.mark.usefixtures("few_questions")
def test_variants_are_trained_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablations, "BUDGETS", {"cpu": TINY})
    chosen = [v for v in ablations.VARIANTS if v.prompts is fresh_prompts or v.settings == {"correction_rate": 0.5}]
    monkeypatch.setattr(ablations, "VARIANTS", chosen)
    ablations.run(tmp_path, "sequencematch reproduce ablations")
    record = json.loads((tmp_path / "results.json").read_text())
    assert [model["variant"] for model in record["models"]] == [variant.name for variant in chosen]
    assert record["models"][0]["settings"]["correction_rate"] == 0.5
    assert all(model["commit"] for model in record["models"])
    assert saved(Trial(chosen[0], 0).cell, Trial(chosen[0], 0).within(tmp_path)).is_dir()
    ablations.draw(tmp_path)
    assert (tmp_path / "ablations.png").stat().st_size > 10_000
    assert len((tmp_path / "table.md").read_text().splitlines()) == 2 + len(chosen)
