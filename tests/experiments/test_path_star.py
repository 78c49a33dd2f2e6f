"""The study of networks on path-star graphs: its rows, its peers, its cells."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sequencematch.core import ActionSpace, Trajectory
from sequencematch.experiments import networks, peers
from sequencematch.experiments.networks import Budget, config, new_model, own_steps
from sequencematch.experiments.path_star import study, training
from sequencematch.experiments.path_star.cells import METHODS, Cell
from sequencematch.experiments.path_star.measures import decisive_states
from sequencematch.experiments.path_star.report import Way, table, ways
from sequencematch.experiments.path_star.rows import ReversedRows, TraceRows, teacherless, teacherless_answers
from sequencematch.experiments.path_star.training import Rows, load, run_cell
from sequencematch.experiments.peers import best_by_oracle, best_of, doubts
from sequencematch.experiments.stability import WatchedTrainer
from sequencematch.policy import Policy
from sequencematch.tasks.path_star import PathStar, read_star
from sequencematch.tasks.vocabulary import word_tokenizer

ROOT = Path(__file__).parents[2]
TINY = Budget(layers=1, width=16, steps=4, tuning_steps=2, batch_size=8, test_rows=12)
#: <bos> 7 4 | 2 7 | 2 5 | 5 9 / 2 9 = 5 9, where a node's id is its name and the others are above 20.
IDS = np.array([[1, 7, 4, 21, 2, 7, 21, 2, 5, 21, 5, 9, 22, 2, 9, 23, 5, 9]], dtype=np.uint8)
SPACE = ActionSpace(30, eos=0)


@pytest.fixture(autouse=True)
def few_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below which a model without `<bkspc>` deletes: each is tried on a hundred puzzles."""
    monkeypatch.setattr("sequencematch.experiments.path_star.measures.THRESHOLDS", (0.1, 0.5))


def test_rows_have_the_answer_as_completion_and_the_goal_as_the_end_of_bursts() -> None:
    nodes = np.array([[2, 4, 5, 7, 9]], dtype=np.uint8)
    plain, ending = (Rows(IDS, nodes, 2, noise_ends=ends)[0] for ends in (False, True))
    assert [
        token for token, is_answer in zip(plain["input_ids"], plain["completion_mask"], strict=True) if is_answer
    ] == [5, 9]
    assert plain["noise_tokens"] == [2, 4, 5, 7, 9]
    assert "noise_ends" not in plain
    assert ending["noise_ends"] == [9]


def test_reversed_rows_have_the_same_prompt_and_the_answer_backwards() -> None:
    row = ReversedRows(IDS, 2)[0]
    assert row["input_ids"] == [*IDS[0, :-2], 9, 5]
    assert sum(row["completion_mask"]) == 2


def test_a_trace_walks_into_dead_ends_before_the_goal_and_never_after_it() -> None:
    rows = TraceRows(np.repeat(IDS, 40, 0), 2, back=24)
    traces = {tuple(rows[n]["input_ids"][IDS.shape[1] - 2 :]) for n in range(40)}
    assert traces == {(5, 9), (7, 4, 24, 5, 9)}
    assert rows[3] == rows[3]


def trajectory(*answer: int, end: bool = True) -> Trajectory:
    return Trajectory.rollout(SPACE, (1,), (*answer, 0) if end else (*answer, 3))


def test_the_best_of_some_samples_is_the_first_or_the_one_with_the_largest_score() -> None:
    drawn = [[trajectory(4, 5), trajectory(6, 7)], [trajectory(6, 7), trajectory(8)]]
    answers = [[6, 7], [6, 7]]
    first = best_of(drawn, answers)
    assert first.right == (False, True)
    assert first.accuracy == 0.5
    assert first.passes == 3.5  # 2 + 2 and 2 + 1 tokens in two rows
    assert best_of(drawn, answers, lambda t: t.chosen[0]).right == (True, False)
    assert best_by_oracle(drawn, answers).right == (True, True)


def test_a_judge_doubts_the_state_in_which_it_would_delete() -> None:
    """Its row of <bkspc> is large for the hidden vector behind one answer's last token: that answer gets the largest doubt."""
    tokenizer = word_tokenizer([str(n) for n in range(8)])
    torch.manual_seed(0)
    judge = Policy(new_model(Budget(layers=1, width=32), tokenizer), tokenizer)
    rollouts = [
        Trajectory.rollout(judge.space, (1, 5), (*answer, judge.space.eos)) for answer in ((6, 7), (8,), (9, 4))
    ]
    with torch.no_grad():
        hidden = judge.base.base_model(input_ids=torch.tensor([[1, 5, 9, 4]])).last_hidden_state[0, -1]
        judge.backspace.row.copy_(hidden * 5 / hidden.norm())
        logits = judge.action_logits(hidden[None]).softmax(-1)
    found = doubts(judge, rollouts)
    assert max(found, key=lambda t: found[t]) == rollouts[2]
    assert found[rollouts[2]] == pytest.approx(float(logits[0, judge.space.bkspc]), rel=1e-4)


def test_an_answer_that_was_cut_is_not_right() -> None:
    assert best_of([[trajectory(6, 7, end=False)]], [[6, 7]]).right == (False,)


def test_the_states_that_decide_are_ends_of_arms_and_a_goal_behind_a_wrong_arm() -> None:
    assert decisive_states(read_star("7 4 | 2 7 | 2 5 | 5 9 / 2 9 =")) == {
        "goal": [("5", "9")],
        "dead end": [("7", "4")],
        "false goal": [("7", "9")],
    }


def test_teacherless_training_learns_an_answer_that_the_prompt_holds() -> None:
    """The answer is the prompt's first word, twice. It never sees its own answer: with other inputs it must fail."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer([str(n) for n in range(8)])
    model = new_model(Budget(layers=1, width=32), tokenizer)
    words = np.random.default_rng(0).integers(4, 12, (200 * 16, 1), dtype=np.uint8)
    ids = np.concatenate([np.ones_like(words), words, words, words], 1)
    teacherless(model, ids, 2, dummy=3, eos=2, steps=200, batch=16, lr=1e-2)
    prompts, answers = [[1, n] for n in range(4, 12)], [[n, n] for n in range(4, 12)]
    assert teacherless_answers(model, prompts, answers, dummy=3, eos=2).accuracy == 1.0
    assert teacherless_answers(model, prompts, answers[::-1], dummy=3, eos=2).accuracy == 0.0


def test_the_rows_of_a_task_are_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("bc", 0, arms=2, length=2)
    ids, nodes = load(cell, TINY, tmp_path)
    assert len(ids) == len(nodes) == 48
    tokenizer = word_tokenizer(cell.task.words())
    rows = PathStar(arms=2, length=2, train_size=48).train()
    assert ids.tolist() == [tokenizer(row["prompt"] + row["completion"])["input_ids"] for row in rows]
    assert nodes[0].tolist() == tokenizer.convert_tokens_to_ids(rows[0]["noise_tokens"])
    monkeypatch.setattr(PathStar, "train_arrays", None)
    assert load(cell, TINY, tmp_path)[0].tolist() == ids.tolist()


@pytest.mark.parametrize("method", ["mle", "mle, traces", "mle, teacherless", "bc, bursts to the goal"])
def test_a_cell_writes_its_result_and_is_not_run_again(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(method, 0, arms=2, length=2)
    found = run_cell(cell, TINY, tmp_path, use_cpu=True)
    assert ("decodings" in found) == METHODS[method].deletes
    assert json.loads((tmp_path / "cells" / cell.file).read_text())["cell"]["method"] == method

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(networks, "new_model", refuse)
    assert run_cell(cell, TINY, tmp_path)["cell"] == found["cell"]
    with pytest.raises(ValueError, match=r"was trained with another budget.*'steps': 4.*Choose another folder"):
        run_cell(cell, dataclasses.replace(TINY, steps=5), tmp_path)


def test_a_method_starts_from_next_token_prediction_and_larger_stars_from_smaller_ones(tmp_path: Path) -> None:
    """Without training, its weights are those of the network before it."""
    cell = Cell("bc", 0, arms=2, length=5)
    smaller, start = Cell("start", 0), Cell("start", 0, 2, 5)
    assert (cell.start, start.start, smaller.start) == (start, smaller, None)
    assert Cell("mle, traces", 0, 5, 5).start is None
    assert [own_steps(name, METHODS[name], TINY) for name in ("bc", "start", "mle, traces")] == [2, 4, 6]
    run_cell(cell, dataclasses.replace(TINY, learning_rate=0.0), tmp_path, use_cpu=True)
    found = [Policy.from_pretrained(tmp_path / "policies" / Path(c.file).stem).base for c in (cell, start, smaller)]
    for weights in zip(*(network.parameters() for network in found), strict=True):
        assert torch.equal(weights[0], weights[1])
        assert torch.equal(weights[1], weights[2])
    torch.manual_seed(1)
    other = new_model(TINY, word_tokenizer([*cell.task.words(), "."]))
    assert not torch.equal(next(other.parameters()), next(found[0].parameters()))


def test_a_start_sees_other_rows_than_the_methods_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[list[int]]] = {}

    class Recorded(WatchedTrainer):
        def __init__(self, model: Any, args: Any, train_dataset: Any, **options: Any) -> None:
            seen[str(args.objective)] = train_dataset.ids.tolist()
            super().__init__(model, args, train_dataset, **options)

    monkeypatch.setattr(training, "WatchedTrainer", Recorded)
    cell = Cell("bc", 0, arms=2, length=2)
    run_cell(cell, TINY, tmp_path, use_cpu=True)
    assert [*seen["mle"], *seen["bc"]] == load(cell, TINY, tmp_path)[0].tolist()


def test_the_experiment_collects_its_cells_and_draws_them_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "BUDGETS", {"cpu": TINY})
    study.run(tmp_path, "sequencematch reproduce path_star", preset="cpu")
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["command"] == "sequencematch reproduce path_star"
    assert [cell["cell"]["method"] for cell in record["cells"]] == ["start", "mle", "mle", "bc", "bc, corrected"]
    (judged,) = (cell for cell in record["cells"] if "judge" in cell)
    assert judged["judge"]["method"] == "bc, corrected"
    assert list(judged["peers"]) == [f"best of {count} judged" for count in (2, 3, 5)]
    assert all(cell["final_loss"] > 0 and "log" not in cell for cell in record["cells"] if cell is not judged)
    monkeypatch.setattr(study, "run_cells", None)
    study.draw(tmp_path)
    assert (tmp_path / "path_star.png").stat().st_size > 10_000


def test_a_table_has_means_and_ranges_over_seeds() -> None:
    def way(seed: int, accuracy: float) -> Way:
        return Way("bc", "search", seed, 3, 4, accuracy, 8.0 + seed)

    assert table([way(0, 0.5), way(1, 1.0), Way("mle", "greedy", 0, 5, 5, 0.2, 5.0)], 3, 4).splitlines()[2:] == [
        "| bc | search | 75.0 [50.0, 100.0] | 8.5 | 2 |"
    ]


def test_passes_of_a_decoding_are_per_graph() -> None:
    """8 passes for each right answer, of which there are 3 in 4 graphs: 6 for each graph, one of them over the prompt."""
    measures = [{"name": "accuracy", "value": 0.75}, {"name": "forward passes per right answer", "value": 8.0}]
    cell = {"method": "bc", "seed": 1, "arms": 3, "length": 4}
    (found,) = ways([{"cell": cell, "decodings": {"search": measures}}])
    assert found == Way("bc", "search", 1, 3, 4, 0.75, 5.0)
    (tuned,) = ways([{"cell": cell, "peers": {"search, deleting below p = 0.3": {"accuracy": 0.5, "passes": 4.0}}}])
    assert tuned.decoding == "search, deleting below a threshold"


def test_the_page_has_the_table_of_the_recorded_cells(tmp_path: Path) -> None:
    recorded = ROOT / "results" / "path_star"
    cells = json.loads((recorded / "results.json").read_text())["cells"]
    page = (ROOT / "docs" / "results" / "search.md").read_text()
    for shape in ((3, 4), (5, 5), (2, 6)):
        assert table(ways(cells), *shape) in page
    (tmp_path / "cells").mkdir()
    for path in (recorded / "cells").iterdir():
        (tmp_path / "cells" / path.name).write_text(path.read_text())
    study.collect(tmp_path, "again")
    assert json.loads((tmp_path / "results.json").read_text())["cells"] == cells


def test_every_method_differs_from_the_others_in_file_and_settings(tmp_path: Path) -> None:
    assert len({Cell(method, 0).file for method in METHODS}) == len(METHODS)
    for method in METHODS:
        args = config(tmp_path, METHODS[method], TINY, 1, steps=8, room=6, use_cpu=True)
        assert args.seed == 1
        assert args.objective == METHODS[method].settings["objective"]
    assert peers.Outcome((True, False), 2.0).accuracy == 0.5
