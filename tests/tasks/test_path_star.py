"""Path-star graphs: the centre of a star, one of its ends, and the path between."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sequencematch.evaluation import find_task
from sequencematch.tasks import PathStar, Row, write_rows
from sequencematch.tasks.path_star import Graph, as_row, graphs

#: Two arms of two edges each from 3: 3 → 12 → 5, and 3 → 8 → 7, where the goal is.
GRAPH = Graph(edges=((12, 5), (3, 8), (8, 7), (3, 12)), path=(3, 8, 7))


def small(**options: Any) -> PathStar:
    return PathStar(**{"train_size": 300, "test_size": 100, **options})


def read(row: Row) -> tuple[set[tuple[str, str]], str, str]:
    """The oracle's reading of a prompt: edges, start and goal."""
    listed, question = row["prompt"].split(" / ")
    start, goal, sign = question.split(" ")
    assert sign == "="
    edges = [tuple(edge.split(" ")) for edge in listed.split(" | ")]
    assert len(set(edges)) == len(edges)
    return {(a, b) for a, b in edges}, start, goal


def walk_back(edges: set[tuple[str, str]], start: str, goal: str) -> list[str]:
    """The oracle: from the goal, the only edge into each node leads back to the start."""
    path = [goal]
    while path[0] != start:
        (before,) = [a for a, b in edges if b == path[0]]
        path.insert(0, before)
    return path


def check_star(row: Row, arms: int, length: int) -> None:
    """From the start, `arms` chains of `length` edges that share no other node; the goal ends one, and the answer leads there."""
    edges, start, goal = read(row)
    nodes = {node for edge in edges for node in edge}
    leaving = Counter(a for a, _ in edges)
    leaves = nodes - leaving.keys()
    assert (len(edges), len(nodes), leaving.pop(start), len(leaves)) == (arms * length, arms * length + 1, arms, arms)
    assert set(leaving.values()) <= {1}
    assert {len(walk_back(edges, start, leaf)) for leaf in leaves} == {length + 1}
    assert goal in leaves
    assert row["completion"] == "".join(f" {node}" for node in walk_back(edges, start, goal)[1:])
    assert set(row["noise_tokens"]) == nodes
    assert len(row["noise_tokens"]) == len(nodes)
    assert row["noise_ends"] == [goal]


def test_a_small_graph_reads_as_expected() -> None:
    assert as_row(GRAPH) == {
        "prompt": "12 5 | 3 8 | 8 7 | 3 12 / 3 7 =",
        "completion": " 8 7",
        "noise_tokens": ["3", "5", "7", "8", "12"],
        "noise_ends": ["7"],
    }
    check_star(as_row(GRAPH), arms=2, length=2)


@pytest.mark.parametrize(
    "graph",
    [
        GRAPH._replace(path=(3, 12, 7)),  # a path that jumps to the other arm
        GRAPH._replace(path=(3, 8)),  # a goal in the middle of an arm
        GRAPH._replace(edges=((12, 5), (3, 8), (8, 7), (8, 12))),  # a fork outside the centre
    ],
)
def test_the_oracle_refuses_other_graphs_and_paths(graph: Graph) -> None:
    with pytest.raises(AssertionError):
        check_star(as_row(graph), arms=2, length=2)


@settings(max_examples=40)
@given(arms=st.integers(1, 5), length=st.integers(1, 6), spare=st.integers(0, 9), seed=st.integers(0, 99))
def test_every_row_is_a_star_with_its_path(arms: int, length: int, spare: int, seed: int) -> None:
    names = arms * length + 1 + spare
    for graph in itertools.islice(graphs(arms, length, names, seed), 5):
        assert {node for edge in graph.edges for node in edge} <= set(range(names))
        check_star(as_row(graph), arms, length)


def test_the_default_is_three_arms_of_four_with_thirty_names() -> None:
    task = PathStar(train_size=50)
    train, test = task.train(), task.test()
    assert (len(train), len(test), task.max_new_tokens) == (50, 2_000, 4)
    assert {name for row in test for name in row["noise_tokens"]} == set(map(str, range(30)))
    for row in train + test:
        check_star(row, arms=3, length=4)


def test_places_are_uniform() -> None:
    """The first listed edge is on the path to the goal in a third of 2,000 prompts, and the start is any name (five σ)."""
    rows = PathStar(train_size=0).test()
    on_path = 0
    for row in rows:
        edges, start, goal = read(row)
        path = walk_back(edges, start, goal)
        first = tuple(row["prompt"].split(" ")[:2])
        on_path += first in list(itertools.pairwise(path))
    assert abs(on_path - 2_000 / 3) < 5 * (2_000 * 2 / 9) ** 0.5
    starts = Counter(read(row)[1] for row in rows)
    assert len(starts) == 30
    assert max(abs(count - 2_000 / 30) for count in starts.values()) < 5 * (2_000 * 29 / 900) ** 0.5


def identities(rows: Sequence[Row]) -> list[Any]:
    return [(frozenset(edges), start, goal) for edges, start, goal in map(read, rows)]


def test_no_test_graph_is_in_training_nor_twice_in_the_test() -> None:
    """Five names and two arms of two: 5! = 120 graphs, the goal's arm first, half of them held out."""
    task = small(arms=2, length=2, names=5, test_size=60, train_size=2000)
    train, test = identities(task.train()), identities(task.test())
    assert (len(train), len(test), len(set(test))) == (2000, 60, 60)
    assert len(set(train)) == 60  # all that are left: 2,000 draws miss one of them with a chance of 60 e⁻³³
    assert not set(train) & set(test)


def test_without_that_care_a_test_graph_would_be_in_training_with_other_words() -> None:
    train, test = ([*itertools.islice(graphs(2, 2, 5, seed), 300)] for seed in (0, 1))
    same = {graph.identity for graph in train} & {graph.identity for graph in test}
    assert same
    assert {as_row(g)["prompt"] for g in train if g.identity in same} != {
        as_row(g)["prompt"] for g in test if g.identity in same
    }


def test_the_order_of_edges_does_not_make_another_graph() -> None:
    assert GRAPH._replace(edges=GRAPH.edges[::-1]).identity == GRAPH.identity
    assert GRAPH._replace(path=(3, 12, 5)).identity != GRAPH.identity


def test_the_seed_decides() -> None:
    assert small().train() == small().train()
    assert small().test() == small().test()
    assert small().train() != small(seed=1).train()
    assert small().test() != small(seed=1).test()
    assert not {row["prompt"] for row in small().train()} & {row["prompt"] for row in small().test()}


def test_more_rows_change_neither_the_test_nor_those_before() -> None:
    few, many = small(), small(train_size=2500)
    assert many.test() == few.test()
    assert many.train()[:300] == few.train()
    assert small(train_size=0).train() == []
    assert small(test_size=50).test() == few.test()[:50]


def test_an_answer_is_right_if_it_has_the_words_of_the_path() -> None:
    row = as_row(GRAPH)
    answers = ("8 7", " 8 7", "8  7\n", "87", "8", "7", "12 7", "8 7 7", "")
    assert [small().is_right(answer, row) for answer in answers] == [True] * 3 + [False] * 6


def test_every_word_is_listed() -> None:
    task = small(names=20)
    words = task.words()
    assert (len(words), len(set(words))) == (23, 23)
    rows = task.train() + task.test()
    assert {word for row in rows for word in (row["prompt"] + row["completion"]).split()} == set(words)


def test_flags_make_the_task_and_datasets_reads_its_files(tmp_path: Path) -> None:
    task = find_task("path_star", ["--arms", "5", "--length", "5", "--train-size", "20", "--test-size", "4"])
    assert task == PathStar(arms=5, length=5, train_size=20, test_size=4)
    assert task.max_new_tokens == 5
    write_rows(task, tmp_path / "rows")
    loaded = datasets.load_dataset(str(tmp_path / "rows"), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"].to_list() == task.train()
    assert loaded["test"].to_list() == task.test()


def test_wrong_options_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"arms": 0}, "`arms` must be at least 1. Got arms=0."),
        ({"length": 0}, "`length` must be at least 1. Got length=0."),
        ({"train_size": -1}, "`train_size` must be at least 0. Got train_size=-1."),
        ({"test_size": -1}, "`test_size` must be at least 0. Got test_size=-1."),
        ({"names": 12}, "a name for every node: 13 here. Got names=12. Raise `names`, or lower `arms` or `length`."),
        (
            {"arms": 2, "length": 2, "names": 5, "test_size": 61},
            "at most half of all graphs, 60 here: the others are for training. Got test_size=61.",
        ),
        ({"max_new_tokens": 3}, "`max_new_tokens` must be at least `length`, a token for every node of the path: 4"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            PathStar(**options)
    with pytest.raises(ValueError, match=re.escape("Got max_new_tokens=4. None stands for `length`.")):
        replace(PathStar(), length=6)
    assert replace(PathStar(), length=6, max_new_tokens=None).max_new_tokens == 6
