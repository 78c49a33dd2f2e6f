"""The path-star graph as a table: which objectives leave a dead end without memory? Every expectation is exact.

A star has `arms` arms of `length` nodes. The prompt names the goal, the last node of one arm, drawn at random. Until an arm's last
node is reached nothing tells arms apart; then the policy sees whether it is the goal or a dead end. Data holds right paths and the
noise of §4.2, so it never shows a dead end.
"""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch import __version__
from sequencematch.core.divergences import CHI2, CHI2_MIXTURE, FORWARD_KL, HELLINGER, JS, REVERSE_KL, Divergence
from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.experiments import exact_search_report as report
from sequencematch.experiments import tabular
from sequencematch.experiments.tabular import Demonstration, Table

#: Actions: end, delete, go on along an arm (at the centre: one of the arms), push a node that is not next on any arm.
EOS, BKSPC, ARM, OTHER = range(4)
ALPHAS = (0.01, 0.03, 0.1, 0.3, 0.5, 1.0)
GAMMAS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998)
#: Every divergence without an on-policy term but total variation: its φ is piecewise linear, so that Newton's method has no use.
SILENT = (CHI2, REVERSE_KL, FORWARD_KL, JS, HELLINGER)
#: A budget of actions: a policy without memory may need millions to be right.
WITHIN = 100
RESULTS, FIGURE = "results.json", "exact_search.png"


@dataclass(frozen=True)
class Star:
    """A path-star graph: `others` names that are no next node, `noise` the rate η of §4.2.

    With `noise_on_arms` a wrong token at the centre may also be the first node of a wrong arm, as likely as any other name.
    """

    arms: int = 3
    length: int = 2
    others: int = 2
    noise: float = 0.15
    noise_on_arms: bool = False

    def __post_init__(self) -> None:
        for name, least in (("arms", 2), ("length", 2), ("others", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}. Got {name}={getattr(self, name)}.")
        if not 0 < self.noise < 1:
            raise ValueError(
                f"`noise` must lie strictly between 0 and 1: without noise, data never deletes. Got noise={self.noise}."
            )


@dataclass(frozen=True)
class World:
    """The nodes written, `a` for one along an arm and `x` for any other; whether the arm is right; whether `<eos>` was executed."""

    path: str = ""
    is_right: bool | None = None
    ended: bool = False


@dataclass(frozen=True)
class Case:
    """An objective in a star; behavioural cloning if `divergence` is None.

    `start` is the seed of the logits that optimisation starts from, None for zeros.
    """

    divergence: Divergence | None = CHI2_MIXTURE
    alpha: float | None = 0.1
    gamma: float | None = 0.99
    star: Star = Star()
    start: int | None = None

    def __post_init__(self) -> None:
        if self.divergence is None and (self.alpha, self.gamma) != (None, None):
            raise ValueError(
                f"`alpha` and `gamma` would be ignored: behavioural cloning has neither. "
                f"Got alpha={self.alpha}, gamma={self.gamma}."
            )

    @property
    def objective(self) -> str:
        """The divergence's name, or `bc`."""
        return "bc" if self.divergence is None else self.divergence.name


@dataclass(frozen=True)
class Law:
    """What holds at a dead end: r(s, a) is the same for all a, hence p(a|s) ∝ exp γV(s'), and V = r/(1 − γ) at a wrong end.

    `reward_spread` is the largest difference between rewards, `off_law` that between p(a|s) and exp γV(s') normalised. Actions
    below `tabular.UNVISITED` are left out; the value of a wrong end is None if `<eos>` is one of them.
    """

    value_right_end: float
    value_wrong_end: float | None
    reward: float
    reward_spread: float
    off_law: float


@dataclass(frozen=True)
class Outcome:
    """What an optimal policy does at a dead end, on an arm before its end, and how it ends.

    `within` is the probability of the right answer within WITHIN actions. `law` is None where the dead end keeps its first logits.
    """

    dead_end_ends: float
    dead_end_deletes: float
    arm_deletes: float
    accuracy: float
    within: float
    actions: float
    residual: float | None = None
    law: Law | None = None


def see(star: Star, world: World) -> str:
    """What the policy sees of a world: whether an arm is right shows at its end only."""
    path = world.path
    if path.startswith("a" * star.length):
        path = ("goal" if world.is_right else "dead end") + path[star.length :]
    return (path or "centre") + (" <eos>" if world.ended else "")


def open_actions(star: Star, world: World) -> Mapping[int, int]:
    """The actions of a world, each with the number of tokens it stands for."""
    if world.ended:
        return {EOS: 1}
    on_an_arm = "x" not in world.path and len(world.path) < star.length
    onward = {ARM: 1 if world.path else star.arms} if on_an_arm else {}
    return {EOS: 1, BKSPC: 1, **onward, OTHER: star.others}


def following(star: Star, world: World, action: int) -> list[tuple[float, World]]:
    """The next worlds with their probabilities: one, except that an arm chosen at the centre is right with probability 1/d.

    There is room for a path and one wrong token; a token pushed beyond executes `<eos>` instead (§4.2).
    """
    path = world.path
    if world.ended:
        return [(1.0, world)]
    if action == BKSPC:
        return [(1.0, World(path[:-1], world.is_right if path[:-1].startswith("a") else None))]
    if action == EOS or len(path) > star.length:
        return [(1.0, World(path, world.is_right, ended=True))]
    if action == OTHER:
        return [(1.0, World(path + "x", world.is_right))]
    if path:
        return [(1.0, World(path + "a", world.is_right))]
    return [(1 / star.arms, World("a", True)), (1 - 1 / star.arms, World("a", False))]


def demonstrations(star: Star) -> Iterator[tuple[float, list[tuple[World, int, World]]]]:
    """Every outcome of the noise on a right path: before each action, with probability η, one wrong token is pushed and deleted."""

    def onward(world: World, done: int) -> Iterator[tuple[float, list[tuple[World, int, World]]]]:
        if world.ended:
            yield 1.0, []
            return
        right = ARM if done < star.length else EOS
        after = World("a" * min(done + 1, star.length), True, ended=right == EOS)
        wrong = [(star.others, World(world.path + "x", world.is_right))]
        if star.noise_on_arms and done == 0:
            wrong.append((star.arms - 1, World("a", False)))
        names = sum(count for count, _ in wrong)
        for chance, rest in onward(after, done + 1):
            yield (1 - star.noise) * chance, [(world, right, after), *rest]
            for count, mistake in wrong:
                detour = [(world, right, mistake), (mistake, BKSPC, world), (world, right, after)]
                yield star.noise * count / names * chance, [*detour, *rest]

    return onward(World(), 0)


def worlds(star: Star) -> list[World]:
    """Every world that can be reached; the centre first."""
    found = [World()]
    for world in found:  # grows as it is walked
        reached = dict.fromkeys(n for action in open_actions(star, world) for _, n in following(star, world, action))
        found += [n for n in reached if n not in found]
    return found


def path_star(star: Star) -> Table:
    """The star as a table of logits: one row for each thing the policy can see."""
    found = worlds(star)
    index = {world: number for number, world in enumerate(found)}
    rows = {seen: number for number, seen in enumerate(dict.fromkeys(see(star, world) for world in found))}
    count = torch.zeros(len(rows), 4, dtype=torch.float64)
    transition = torch.zeros(len(found), 4, len(found), dtype=torch.float64)
    for world in found:
        for action, tokens in open_actions(star, world).items():
            count[rows[see(star, world)], action] = tokens
            for probability, after in following(star, world, action):
                transition[index[world], action, index[after]] += probability
    return Table(
        rows=tuple(rows),
        row=torch.tensor([rows[see(star, world)] for world in found]),
        count=count,
        transition=transition,
        is_absorbing=torch.tensor([world.ended for world in found]),
        demonstrations=[
            Demonstration(probability, tuple((index[w], action, index[n]) for w, action, n in steps))
            for probability, steps in demonstrations(star)
        ],
    )


def start_logits(table: Table, seed: int | None) -> Float[Tensor, "row action"]:
    """Where optimisation starts: zeros, or standard normal logits drawn from `seed`."""
    zeros = torch.zeros(table.count.shape, dtype=torch.float64)
    return zeros if seed is None else zeros.normal_(generator=torch.Generator().manual_seed(seed))


def cloned(table: Table, start: Float[Tensor, "row action"]) -> Float[Tensor, "row action"]:
    """Behavioural cloning at its optimum: the data's frequencies in states that it visits, `start` in others (not discounted)."""
    seen = torch.zeros_like(table.count)
    for demonstration in table.demonstrations:
        for world, action, _ in demonstration.steps:
            seen[table.row[world], action] += demonstration.probability
    unlikely = torch.finfo(torch.float64).tiny
    return torch.where(
        seen.sum(1, keepdim=True) > 0, (seen / table.count.clamp(min=1)).clamp(min=unlikely).log(), start
    )


def solve(case: Case) -> Outcome:
    """The optimum of one objective, and what its policy does without any memory of what it deleted."""
    table, star = path_star(case.star), case.star
    logits, residual, law = start_logits(table, case.start), None, None
    if case.divergence is None:
        logits = cloned(table, logits)
    else:
        assert case.alpha is not None
        assert case.gamma is not None
        problem = tabular.Problem(table, case.divergence, case.alpha, case.gamma)
        found = tabular.optimum(problem, logits)
        logits, residual = found.logits, found.residual
        law = dead_end_law(problem, logits) if case.divergence.on_policy else None
    policy, (ended, actions) = tabular.policy(table, logits), tabular.endings(table, logits)
    dead_end, arm = policy[table.rows.index("dead end")], policy[table.rows.index("a")]
    goal = worlds(star).index(World("a" * star.length, True, ended=True))
    return Outcome(
        dead_end_ends=float(dead_end[EOS]),
        dead_end_deletes=float(dead_end[BKSPC]),
        arm_deletes=float(arm[BKSPC]),
        accuracy=float(ended[goal]),
        within=float(tabular.ended_within(table, logits, WITHIN)[goal]),
        actions=actions,
        residual=residual,
        law=law,
    )


def dead_end_law(problem: tabular.Problem, logits: Float[Tensor, "row action"]) -> Law:
    """Rewards, values and the law of `Law` at a dead end."""
    table, gamma = problem.table, problem.gamma
    dead_end, values = table.rows.index("dead end"), tabular.value(table, logits)
    is_visited = tabular.visited(problem, logits)[dead_end]
    world = int((table.row == dead_end).nonzero()[0])
    value_next = values[table.row[table.transition[world].argmax(1)]]
    rewards = (logits[dead_end] - gamma * value_next)[is_visited]
    law = (gamma * value_next + table.count[dead_end].log()).masked_fill(~is_visited, -torch.inf).softmax(0)
    wrong_end = float(values[table.rows.index("dead end <eos>")])
    return Law(
        value_right_end=float(values[table.rows.index("goal <eos>")]),
        value_wrong_end=wrong_end if is_visited[EOS] else None,
        reward=float(rewards.mean()),
        reward_spread=float(rewards.max() - rewards.min()),
        off_law=float((law - tabular.policy(table, logits)[dead_end]).abs().max()),
    )


def cases() -> dict[str, list[Case]]:
    """What is solved, by part of the page: the table, the sweep over α and γ, and other stars."""
    cloning = Case(None, None, None)
    starts = (None, 0, 1, 2)
    changes: list[dict[str, Any]] = [{"noise": noise} for noise in (0.02, 0.05, 0.4)]
    changes += [{"others": 1}, {"others": 4}, {"arms": 2}, {"arms": 5}, {"length": 3}, {"noise_on_arms": True}]
    return {
        "table": [
            *(replace(cloning, start=start) for start in starts),
            *(Case(divergence, start=start) for divergence in SILENT for start in starts),
            Case(gamma=0.9),
            Case(),
            *(Case(alpha=0.5, start=start) for start in starts),
        ],
        "sweep": [Case(alpha=alpha, gamma=gamma) for alpha in ALPHAS for gamma in GAMMAS],
        "stars": [case for change in changes for case in _beside_cloning(Star(**change))],
    }


def _beside_cloning(star: Star) -> list[Case]:
    return [Case(None, None, None, star), Case(gamma=0.9, star=star), Case(star=star), Case(alpha=0.5, star=star)]


def run(folder: Path, command: str, *, only: Mapping[str, Sequence[Case]] | None = None) -> None:
    """Solve every case and write `results.json`; `only` replaces the cases of the page."""
    from tqdm import tqdm

    parts = cases() if only is None else only
    with tqdm(total=sum(map(len, parts.values())), desc="exact optima", leave=False) as bar:
        record: dict[str, Any] = {
            "command": command,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "sequencematch": __version__},
            "tolerance": tabular.TOLERANCE,
        }
        for part, chosen in parts.items():
            record[part] = []
            for case in chosen:
                record[part].append(_as_json(case, solve(case)))
                bar.update()
    write_files(folder, {RESULTS: json_text(record)})


def _as_json(case: Case, outcome: Outcome) -> dict[str, Any]:
    settings = {"objective": case.objective, "alpha": case.alpha, "gamma": case.gamma, "start": case.start}
    return {**settings, "star": asdict(case.star), **asdict(outcome)}


def read(folder: Path) -> dict[str, Any]:
    """What `run` wrote."""
    path = folder / RESULTS
    if not path.is_file():
        raise ValueError(f"`folder` must hold {RESULTS}, which `run` writes. Got {folder}, which has none.")
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return record


def draw(folder: Path) -> None:
    """The figure, made from `results.json` alone."""
    report.draw(read(folder), folder / FIGURE, WITHIN)
