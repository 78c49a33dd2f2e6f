"""Accuracy against test-time computation: ways to decode, costs, the table, and a whole run at the smallest size."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sequencematch.core.mdp import Trajectory
from sequencematch.experiments import registry
from sequencematch.experiments.fine_tuning import mistakes, study, thinking, thinking_report
from sequencematch.experiments.fine_tuning.cells import BUDGETS, Budget, Cell
from sequencematch.experiments.fine_tuning.mistakes import cells
from sequencematch.experiments.fine_tuning.thinking_report import KINDS, Point, peer, points, table
from sequencematch.experiments.fine_tuning.training import saved
from sequencematch.policy import Policy, Sampling
from tests.strategies import BK, SPACE

EOS = SPACE.eos


def point(method: str, kind: str, dose: str, accuracy: float, passes: float) -> Point:
    measures = {
        f"{spent} per {of}": (passes,) for spent in ("actions", "forward passes") for of in ("question", "right answer")
    }
    return Point(method, kind, dose, {"accuracy": (accuracy,), **measures}, 1)


FOUND = [
    point("mle", "greedy", "bias -inf", 0.375, 6.0),
    point("mle", "best of n", "n = 1", 0.25, 6.0),
    point("mle", "best of n", "n = 2", 0.625, 11.0),
    point("bc", "search", "25 actions", 0.5, 10.9),
    point("bc", "greedy", "bias 0", 0.5, 10.0),
    point("bc", "greedy", "bias -inf", 0.125, 5.5),
]


def save_bundled(models: Sequence[Cell], preset: str, budget: Budget, folder: Path, jobs: int) -> None:
    del preset, budget, jobs
    for cell in models:
        name = "sequencematch/arithmetic-base" if cell.method == "mle" else "sequencematch/arithmetic"
        Policy.from_pretrained(name).save_pretrained(saved(cell, folder))


def test_costs_count_every_token_of_every_answer_and_the_question_once() -> None:
    """1 <bkspc> 2 <eos> and 3 <eos>: 6 actions, and passes for the question, 1, 2 and 3. The other question: 2 and 2."""
    twice = [Trajectory.rollout(SPACE, (4, 4), actions) for actions in ((1, BK, 2, EOS), (3, EOS))]
    once = [Trajectory.rollout(SPACE, (4, 4), (3, EOS))]
    found = {m.name: m.value for m in thinking._costs([True, False], [twice, once])}
    assert found == {
        "accuracy": 0.5,
        "actions per question": 4.0,
        "forward passes per question": 3.0,
        "actions per right answer": 8.0,
        "forward passes per right answer": 6.0,
    }


def test_ways_to_decode_are_options_of_sampling_each_with_a_line_in_the_figure() -> None:
    """Seven biases, six of them with a ban as well, greedy and sampled; four searches; four numbers of samples."""
    known = thinking.ways(12, deletes=True)
    assert len({(way.kind, way.dose) for way in known}) == len(known) == 2 * (7 + 6) + 4 + 4
    assert {way.kind for way in known} == set(KINDS)
    used = [Sampling(max_new_tokens=12, **way.options) for way in known if way.samples is None]
    assert all(sampling.protect_prompt for sampling in used)
    assert [sampling.action_limit for sampling in used if sampling.search] == [25, 49, 97, 385]
    assert {way.options["backspace_bias"] for way in thinking.ways(12, deletes=False) if way.samples is None} == {
        -math.inf
    }


def test_a_way_is_compared_with_the_best_that_mle_does_with_as_many_passes() -> None:
    """Two answers take 11.0 passes: as many as 10.9 up to the slack, more than 10.0. No way of MLE is as cheap as 5.5."""
    assert [peer(point, FOUND) for point in FOUND[3:]] == [FOUND[2], FOUND[0], None]
    lines = [line.strip("| ").split(" | ") for line in table(FOUND).splitlines()]
    assert lines[5] == ["BC", "search", "25 actions", "50.0", *["10.9"] * 4, "–", "–", "62.5 (n = 2)", "1"]
    assert [line[-2] for line in lines[6:]] == ["37.5 (greedy)", "–"]


def test_seeds_are_collected_by_method_and_way_and_shares_of_nothing_are_left_out() -> None:
    def model(seed: int, accuracy: float, count: int) -> dict[str, object]:
        measures = [
            {"name": "accuracy", "value": accuracy, "count": 4},
            {"name": "own errors deleted", "value": None, "count": count},
            {"name": "actions per right answer", "value": None, "count": 4},
        ]
        way = {"kind": "greedy", "dose": "bias 0", "measures": measures}
        return {"cell": {"method": "bc", "seed": seed}, "ways": [way]}

    (found,) = points([model(0, 0.25, 0), model(1, 0.75, 0)])
    assert (found.mean("accuracy"), found.seeds) == (0.5, 2)
    assert found.mean("actions per right answer") == math.inf
    assert "own errors deleted" not in found.measures


def test_the_models_are_those_of_the_study_of_sums() -> None:
    for preset, budget in BUDGETS.items():
        assert {cell.file for cell in cells(budget)} <= {cell.file for cell in study.SUMS.cells(preset, budget)}
    assert {thinking.RESULTS, thinking.TABLE, thinking.FIGURE}.isdisjoint(
        {study.SUMS.RESULTS, study.SUMS.TABLE, study.SUMS.FIGURE}
    )


@pytest.mark.slow
def test_every_model_is_decoded_in_all_its_ways_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled models stand for fine-tuned ones; `mistakes` and the studies are tested with models that they train."""
    monkeypatch.setattr(mistakes, "BUDGETS", {"cpu": replace(BUDGETS["cpu"], test_rows=6)})
    monkeypatch.setattr(mistakes, "run_cells", save_bundled)
    monkeypatch.setattr(mistakes, "cells", lambda budget: cells(budget)[:2])
    for name, few in {"BIASES": (-math.inf, 12.0), "BUDGETS_OF_SEARCH": (2,), "SAMPLES": (1, 2)}.items():
        monkeypatch.setattr(thinking, name, few)
    experiment = registry.find("thinking")
    experiment.run(tmp_path, "sequencematch reproduce thinking")
    models = json.loads((tmp_path / "thinking.json").read_text())["models"]
    assert [model["cell"]["method"] for model in models] == ["mle", "bc"]
    found = {(p.method, p.kind, p.dose): p for p in points(models)}
    assert len(found) == 4 + (2 * 3 + 1 + 2)
    passes, actions = "forward passes per question", "actions per question"
    for method in ("mle", "bc"):  # one sample is a sample without deletions
        once, sampled = found[method, "best of n", "n = 1"], found[method, "sampled", "bias -inf"]
        assert (once.mean("accuracy"), once.mean(passes)) == (sampled.mean("accuracy"), sampled.mean(passes))
        assert once.mean(passes) < found[method, "best of n", "n = 2"].mean(passes)
    assert found["bc", "sampled", "bias 12"].mean(actions) > 2 * found["bc", "sampled", "bias -inf"].mean(actions)
    experiment.draw(tmp_path)
    assert len((tmp_path / "thinking.md").read_text().splitlines()) == 2 + len(found)
    assert (tmp_path / "thinking.png").stat().st_size > 10_000

    monkeypatch.setattr(thinking, "_think", pytest.fail)
    experiment.run(tmp_path, "again")
    assert json.loads((tmp_path / "thinking.json").read_text())["models"] == models


def test_kinds_have_names_of_their_own() -> None:
    assert len({name for name, _, _ in thinking_report.KINDS.values()}) == len(KINDS)
