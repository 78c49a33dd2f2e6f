"""Path-star graphs: find the path from the centre of a star to the end of one arm   (Bachmann & Nagarajan 2024)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sequencematch.data.seeds import hash_seed
from sequencematch.tasks.task import Row, Task, check_at_least

EDGE_END, QUESTION, ANSWER = "|", "/", "="
_BATCH = 1000  # graphs drawn at once; part of what a seed means


class Graph(NamedTuple):
    """A star's edges in the order of the prompt, and the path from its centre to the goal, both included."""

    edges: tuple[tuple[int, int], ...]
    path: tuple[int, ...]

    @property
    def identity(self) -> tuple[int, int, frozenset[tuple[int, int]]]:
        """Start, goal and the set of edges: equal for prompts that differ only in the order of their edges."""
        return self.path[0], self.path[-1], frozenset(self.edges)


@dataclass(frozen=True)
class PathStar(Task):
    """`12 5 | 3 12 | … / 3 7 =` is answered ` 12 5 … 7`: directed edges in random order, start and goal, and the path between.

    The start is the centre of `arms` paths of `length` edges each, and the goal is the end of one of them (Bachmann & Nagarajan
    2024, "The pitfalls of next-token prediction"). Node names are drawn without replacement. Only the first node of the path is
    a choice: next-token prediction learns to follow edges, and is right in 1/`arms` of all graphs. An answer without deletions
    has `length` + 1 decisions, <eos> included.

    Noise may be any node of the row's graph (`noise_tokens`), and bursts of noise may end in the goal (`noise_ends`). Both are
    spelled as by `word_tokenizer(task.words())`. No test graph is in training, not even with its edges in another order, and
    none occurs twice in the test. `train_size` does not change the test.
    """

    name: ClassVar[str] = "path_star"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "own_errors", "cost", "backspace_rate")
    arms: int = field(default=3, metadata={"help": "Paths that start in the centre."})
    length: int = field(default=4, metadata={"help": "Edges of each path."})
    names: int = field(default=30, metadata={"help": "Node names to draw from: 0, 1, 2 and so on."})
    train_size: int = field(default=200_000, metadata={"help": "Graphs to train on."})
    test_size: int = field(default=2_000, metadata={"help": "Graphs held out."})
    seed: int = field(default=0, metadata={"help": "Which graphs are drawn."})
    max_new_tokens: int | None = field(  # a number after __post_init__
        default=None,
        metadata={"help": "Longest answer in tokens. Default: length, for one token a node."},
    )

    def __post_init__(self) -> None:
        """Refuse options that make no sense, and set the default of `max_new_tokens`."""
        check_at_least(self, {"arms": 1, "length": 1, "train_size": 0, "test_size": 0})
        nodes = self.arms * self.length + 1
        if self.names < nodes:
            raise ValueError(
                f"`names` must be at least `arms` × `length` + 1, a name for every node: {nodes} here. Got names={self.names}. "
                f"Raise `names`, or lower `arms` or `length`."
            )
        possible = math.perm(self.names, nodes) // math.factorial(
            self.arms - 1
        )  # the order of the other arms does not matter
        if 2 * self.test_size > possible:
            raise ValueError(
                f"`test_size` must be at most half of all graphs, {possible // 2:,} here: the others are for training. "
                f"Got test_size={self.test_size}. Lower it, or raise `names`."
            )
        if self.max_new_tokens is None:
            object.__setattr__(self, "max_new_tokens", self.length)
        elif self.max_new_tokens < self.length:
            raise ValueError(
                f"`max_new_tokens` must be at least `length`, a token for every node of the path: {self.length} here. "
                f"Got max_new_tokens={self.max_new_tokens}. None stands for `length`."
            )

    def train(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        """Rows whose graphs are not in the test."""
        return [as_row(graph) for graph in _as_graphs(*self.train_arrays())]

    def train_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The graphs of `train` as numbers: edges [graph, edge, 2], and paths with their start [graph, node]."""
        held_out: dict[tuple[int, ...], set[Any]] = {}
        for graph in self._held_out():
            held_out.setdefault(graph.path, set()).add(graph.identity)
        kept, count = list[tuple[np.ndarray, np.ndarray]](), 0
        drawn = star_arrays(self.arms, self.length, self.names, hash_seed("train", self.seed))
        while count < self.train_size:
            edges, paths = next(drawn)
            is_new = np.ones(len(paths), bool)
            for row, path in enumerate(map(tuple, paths.tolist())):
                if path in held_out:
                    (graph,) = _as_graphs(edges[row : row + 1], paths[row : row + 1])
                    is_new[row] = graph.identity not in held_out[path]
            kept.append((edges[is_new], paths[is_new]))
            count += int(is_new.sum())
        if not kept:
            return np.zeros((0, self.arms * self.length, 2), int), np.zeros((0, self.length + 1), int)
        edges, paths = (np.concatenate(part)[: self.train_size] for part in zip(*kept, strict=True))
        return edges, paths

    def test(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        """Rows held out."""
        return [as_row(graph) for graph in self._held_out()]

    def is_right(self, answer: str, row: Row) -> bool:
        """Whether `answer` has the words of the completion, whatever the spaces between them."""
        return super().is_right(" ".join(answer.split()), row)

    def words(self) -> list[str]:
        """Every word of a prompt or an answer, for `word_tokenizer`."""
        return [EDGE_END, QUESTION, ANSWER, *map(str, range(self.names))]

    def _held_out(self) -> list[Graph]:
        found: dict[Any, Graph] = {}
        drawn = graphs(self.arms, self.length, self.names, hash_seed("test", self.seed))
        while len(found) < self.test_size:
            graph = next(drawn)
            found.setdefault(graph.identity, graph)
        return list(found.values())


def graphs(arms: int, length: int, names: int, seed: int) -> Iterator[Graph]:
    """An endless stream of random path-star graphs, repeats included; the nodes are some of 0 … names − 1."""
    for edges, paths in star_arrays(arms, length, names, seed):
        yield from _as_graphs(edges, paths)


def star_arrays(arms: int, length: int, names: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same graphs in batches: edges [graph, edge, 2] in the order of the prompt, and paths [graph, node]."""
    rng = np.random.default_rng(seed)
    while True:
        # Sorting random numbers gives random orders. Arms are drawn alike, so the goal may always be at the end of the first.
        nodes = rng.random((_BATCH, names)).argsort(1)[:, : arms * length + 1]
        ends = nodes[:, 1:].reshape(_BATCH, arms, length)
        centre = np.broadcast_to(nodes[:, :1, None], (_BATCH, arms, 1))
        starts = np.concatenate([centre, ends[:, :, :-1]], axis=2)
        order = rng.random((_BATCH, arms * length)).argsort(1)
        sides = [np.take_along_axis(side.reshape(_BATCH, -1), order, 1) for side in (starts, ends)]
        yield np.stack(sides, 2), nodes[:, : length + 1]


def _as_graphs(edges: np.ndarray, paths: np.ndarray) -> Iterator[Graph]:
    for listed, path in zip(edges.tolist(), paths.tolist(), strict=True):
        yield Graph(tuple(map(tuple, listed)), tuple(path))


def as_row(graph: Graph) -> Row:
    """A graph as text, with the nodes that noise may insert, and those in which a burst of noise may end."""
    start, goal = graph.path[0], graph.path[-1]
    names = {node: str(node) for node in sorted({start, *(end for _, end in graph.edges)})}
    edges = f" {EDGE_END} ".join([f"{names[a]} {names[b]}" for a, b in graph.edges])
    return {
        "prompt": f"{edges} {QUESTION} {start} {goal} {ANSWER}",
        "completion": " " + " ".join([names[node] for node in graph.path[1:]]),
        "noise_tokens": list(names.values()),
        "noise_ends": [names[goal]],
    }


class Star(NamedTuple):
    """A prompt's graph as it is drawn: the centre, the goal, and the nodes of each arm, in the order of their first edges."""

    centre: str
    goal: str
    arms: tuple[tuple[str, ...], ...]


def read_star(prompt: str) -> Star:
    """The graph of a prompt, `12 5 | 3 12 | … / 3 7 =`."""
    listed, _, question = prompt.partition(QUESTION)
    after: dict[str, list[str]] = {}
    for edge in listed.split(EDGE_END):
        start, end = edge.split()
        after.setdefault(start, []).append(end)
    centre, goal, _ = question.split()
    arms = []
    for first in after[centre]:
        arm = [first]
        while arm[-1] in after:
            arm += after[arm[-1]]
        arms.append(tuple(arm))
    return Star(centre, goal, tuple(arms))
