"""The studies on fine-tuned models: their cells, their tables, and a whole run at the smallest size."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sequencematch.experiments import registry
from sequencematch.experiments.fine_tuning import cells, mistakes, report, study
from sequencematch.experiments.fine_tuning.cells import BUDGETS, METHODS, NOISES, Cell, task
from sequencematch.experiments.fine_tuning.questions import arithmetic
from sequencematch.experiments.fine_tuning.report import Result, results, table
from sequencematch.experiments.fine_tuning.study import SUMS
from sequencematch.experiments.fine_tuning.training import config, decodings, run_cell, saved
from sequencematch.experiments.reporting import percent
from sequencematch.experiments.tuning import load_base

TINY = replace(BUDGETS["cpu"], steps=4, batch_size=4, test_rows=6)


@pytest.fixture
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing 5,000 questions takes most of the time."""
    options = {"entropy": (2.0, 4.0), "bases": (5, 9), "max_new_tokens": 12, "train_size": 40}
    monkeypatch.setattr(cells, "_SMALL", {"add_or_sub_in_base": options})


def result(
    method: str, accuracy: float, *, rate: float = 0.0, seed: int = 0, decoding: str = "temperature 1"
) -> Result:
    noise = "digits" if rate else "none"
    return Result(method, noise, rate, seed, decoding, {"accuracy": accuracy})


def test_percent_has_the_mean_and_the_range_of_what_is_known() -> None:
    assert percent([0.5]) == "50.0"
    assert percent([0.5, 0.25, math.nan]) == "37.5 [25.0, 50.0]"
    assert percent([math.nan]) == "–"


def test_a_table_has_a_row_per_method_and_noise_beside_the_papers_number() -> None:
    found = [result("mle", 0.5), result("mle", 0.7, seed=1), result("bc", 0.25, rate=0.2)]
    lines = table(found, {("mle", 0.0): "49 ± 4", ("bc", 0.02): "51 ± 2"}).splitlines()
    assert lines[0].split(" | ")[3:] == [
        "right, temperature 1",
        "own errors deleted",
        "right tokens deleted",
        "seeds",
        "paper |",
    ]
    assert lines[2] == "| MLE | – | 0 | 60.0 [50.0, 70.0] | – | – | 2 | 49 ± 4 |"
    assert lines[3] == "| BC | digits | 0.2 | 25.0 | – | – | 1 | – |"
    assert "paper" not in table(found, {}).splitlines()[0]


def test_a_share_of_nothing_is_not_read_as_a_number() -> None:
    measures = [
        {"name": "accuracy", "value": 0.5, "count": 4},
        {"name": "own errors deleted", "value": 0.0, "count": 0},
    ]
    cell = {"module": "mul", "method": "bc", "noise": "digits", "rate": 0.1, "seed": 2, "divergence": "chi2_mixture"}
    (found,) = results([{"cell": cell, "decodings": {"greedy": measures}}])
    assert (found.method, found.seed, found["accuracy"]) == ("bc", 2, 0.5)
    assert math.isnan(found["own errors deleted"])


@pytest.mark.parametrize("name", ["arithmetic", "mul", "primes"])
def test_every_study_compares_the_methods_of_the_paper_on_every_seed(name: str) -> None:
    experiment = registry.find(name)
    assert isinstance(experiment, study.Study)
    assert isinstance(experiment, registry.Experiment)
    for preset, budget in BUDGETS.items():
        models = experiment.cells(preset, budget)
        assert len({cell.file for cell in models}) == len(models)
        assert {cell.seed for cell in models} == set(range(budget.seeds))
        assert {cell.method for cell in models} == set(METHODS)
        assert {cell.noise for cell in models} <= set(NOISES)
        assert all((cell.noise == "none") == (cell.rate == 0) for cell in models)


def test_the_paper_preset_has_the_papers_data_and_adapters() -> None:
    budget = BUDGETS["paper"]
    questions = task("list_prime_factors", "paper", budget)
    assert (questions.train_size, questions.test_size, questions.entropy) == (None, 200, (3.0, 10.0))
    assert (budget.adapter, budget.four_bits, budget.alpha, budget.gamma, budget.batch_size) == (
        True,
        True,
        0.01,
        0.998,
        32,
    )


def test_the_preset_large_has_one_kind_of_noise_for_each_method_and_two_seeds() -> None:
    models = SUMS.cells("large", BUDGETS["large"])
    kinds = [("mle", "none", 0.0), ("bc", "digits", 0.1), ("sequencematch", "digits", 0.1)]
    assert [(c.method, c.noise, c.rate, c.seed) for c in models] == [(*kind, seed) for seed in (0, 1) for kind in kinds]


@pytest.mark.parametrize("name", ["mul", "primes"])
def test_the_preset_small_has_the_papers_rates_of_noise_and_three_seeds(name: str) -> None:
    experiment = registry.find(name)
    assert isinstance(experiment, study.Study)
    noisy = [(method, "digits", rate) for rate in (0.02, 0.2) for method in ("bc", "sequencematch")]
    kinds = [("mle", "none", 0.0), *noisy]
    models = experiment.cells("small", BUDGETS["small"])
    assert [(c.method, c.noise, c.rate, c.seed) for c in models] == [(*k, seed) for seed in (0, 1, 2) for k in kinds]


def test_settings_of_another_method_do_not_concern_a_model() -> None:
    budget = replace(TINY, own={"mle": {"learning_rate": 0.1}, "bc": {"learning_rate": 0.2}})
    assert budget.of("mle").own == {"mle": {"learning_rate": 0.1}}
    assert Cell("mul", "bc").settings(budget.of("bc")) == Cell("mul", "bc").settings(budget)
    assert Cell("mul", "bc").settings(budget.of("mle")) != Cell("mul", "bc").settings(budget)


@pytest.mark.slow
@pytest.mark.usefixtures("few_questions")
def test_adapters_train_beside_a_frozen_model_in_bfloat16(tmp_path: Path) -> None:
    policy, adapter = load_base(TINY.model, adapter=True)
    assert policy.base.dtype == torch.bfloat16
    assert (adapter.r, adapter.modules_to_save) == (64, None)
    budget = replace(TINY, adapter=True)
    cell = Cell("add_or_sub_in_base", "sequencematch", "digits", 0.1)
    found = run_cell(cell, arithmetic("add_or_sub_in_base", "cpu", budget), budget, tmp_path)
    assert found["budget"]["adapter"]
    assert (saved(cell, tmp_path) / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("preset", ["cpu", "small"])
@pytest.mark.parametrize("module", ["add_or_sub_in_base", "mul", "list_prime_factors"])
def test_the_bundled_base_model_has_questions_enough_that_fit_it(module: str, preset: str) -> None:
    """Of 128 tokens one is <bos>; nearly every character is a token of its own."""
    pytest.importorskip("mathematics_dataset")
    questions = task(module, preset, BUDGETS[preset])
    rows = [*questions.train(), *questions.test()]
    assert len(rows) == 5000 + BUDGETS[preset].test_rows
    assert max(len(row["completion"]) for row in rows) <= questions.max_new_tokens
    assert max(len(row["prompt"]) for row in rows) + 2 * questions.max_new_tokens < 127


def test_a_base_model_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^`--model`, or the preset's base model, must be a folder or .* Got '.*none'"
    ):
        load_base(str(tmp_path / "none"), adapter=False)


def test_a_model_without_bkspc_is_decoded_as_a_plain_language_model() -> None:
    ways = decodings(Cell("mul", "mle"))
    assert list(ways) == ["greedy", "temperature 1"]
    assert all(how["backspace_bias"] == -math.inf for how in ways.values())
    assert "backspace_bias" not in decodings(Cell("mul", "bc"))["temperature 1"]


def test_methods_differ_in_their_own_settings_alone(tmp_path: Path) -> None:
    made = {m: config(tmp_path, Cell("mul", m, "digits", 0.1), TINY, room=12) for m in ("bc", "sequencematch")}
    settings = {name: args.to_dict() for name, args in made.items()}
    differing = {key for key in settings["bc"] if settings["bc"][key] != settings["sequencematch"][key]}
    assert differing == {"objective", "alpha", "gamma", "bc_steps", "bc_anneal_steps", "model_value_from"}
    assert made["bc"].noise_rate == made["sequencematch"].noise_rate == 0.1
    other = config(tmp_path, Cell("mul", "sequencematch", "digits", 0.1, divergence="js"), TINY, room=12)
    assert other.divergence == "js"
    assert Cell("mul", "bc").file != Cell("mul", "bc", seed=1).file


@pytest.mark.slow
@pytest.mark.usefixtures("few_questions")
def test_a_study_trains_measures_and_draws_and_does_not_run_finished_models_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "BUDGETS", {"cpu": TINY})
    small = study.Study("add_or_sub_in_base", ("digits",), (0.2,))
    small.run(tmp_path, "sequencematch reproduce arithmetic")
    record = json.loads((tmp_path / "results.json").read_text())
    kinds = [(cell["cell"]["method"], cell["cell"]["rate"]) for cell in record["cells"]]
    assert kinds == [("mle", 0.0), ("sequencematch", 0.0), ("bc", 0.2), ("sequencematch", 0.2)]
    assert [len(cell["decodings"]) for cell in record["cells"]] == [2, 3, 3, 3]
    assert all("evaluation|" in cell["signature"] for cell in record["cells"])
    small.draw(tmp_path)
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
    assert len((tmp_path / "table.md").read_text().splitlines()) == 6

    monkeypatch.setattr("sequencematch.experiments.fine_tuning.training._run", pytest.fail)
    small.run(tmp_path, "again")
    assert json.loads((tmp_path / "results.json").read_text())["cells"] == record["cells"]


@pytest.mark.slow
@pytest.mark.usefixtures("few_questions")
def test_mistakes_are_given_to_each_method_one_to_three_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mistakes, "BUDGETS", {"cpu": TINY})
    mistakes.run(tmp_path, "sequencematch reproduce mistakes")
    models = json.loads((tmp_path / "mistakes.json").read_text())["models"]
    assert [model["cell"]["method"] for model in models] == list(METHODS)
    names = {"deletes first", "recovers", "deletes first, plausible", "recovers, plausible"}
    assert all({m["name"] for m in model["after"][str(n)]} == names for model in models for n in (1, 2, 3))
    (mle,) = (model for model in models if model["cell"]["method"] == "mle")
    assert all(m["value"] == 0 for m in mle["after"]["1"] if m["name"].startswith("deletes"))
    assert "After a mistake" in (tmp_path / "rows" / "bc_2.md").read_text()
    mistakes.draw(tmp_path)
    assert len((tmp_path / "mistakes.md").read_text().splitlines()) == 2 + 3 * len(METHODS)
    assert (tmp_path / "mistakes.png").stat().st_size > 10_000


def test_every_method_has_a_colour() -> None:
    assert set(report.COLOURS) == set(METHODS)
