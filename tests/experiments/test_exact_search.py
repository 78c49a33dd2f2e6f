"""The exact path-star table: its claims, its optima, a simulation, its page and its command."""

import dataclasses
import json
import math
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from sequencematch.core.divergences import CHI2_MIXTURE
from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.core.noise import add_noise, token_noise
from sequencematch.experiments import exact_search, exact_search_report, tabular
from sequencematch.experiments.exact_search import Case, Outcome, Star, World, path_star, solve, worlds
from sequencematch.experiments.registry import EXPERIMENTS
from tests.cli.program import check_error, run
from tests.test_architecture import PACKAGE

ROOT = PACKAGE.parents[1]
CLONING = Case(None, None, None)
solved = cache(solve)


def test_a_star_by_hand() -> None:
    table = path_star(Star())
    # Four paths without a wrong token (centre, on an arm, two ends), each with none, one, … wrong tokens up to a depth of three.
    assert [row for row in table.rows if "<eos>" not in row] == [
        *("centre", "a", "x", "goal", "ax", "dead end", "xx", "goalx", "axx", "dead endx", "xxx")
    ]
    # The centre: <eos>, <bkspc>, three arms, two other names.
    assert table.count[0].tolist() == [1, 1, 3, 2]
    # One arm in three is right, and a policy can't see which: both worlds share a row.
    right, wrong = (worlds(Star()).index(World("a", is_right)) for is_right in (True, False))
    assert table.transition[0, exact_search.ARM, [right, wrong]].tolist() == pytest.approx([1 / 3, 2 / 3])
    assert table.row[right] == table.row[wrong]
    # Noise may precede each of three actions.
    assert len(table.demonstrations) == 8
    assert max(d.probability for d in table.demonstrations) == pytest.approx(0.85**3)
    assert sum(d.probability for d in table.demonstrations) == pytest.approx(1)


def test_the_data_is_what_add_noise_draws() -> None:
    space = ActionSpace(vocab_size=10, eos=8, bos=9)  # arms begin with 0, 1, 2 and end with 3, 4, 5; others are 6 and 7
    clean, source = Trajectory.demonstration(space, [9], [0, 3]), token_noise(space, [6, 7])
    generator = torch.Generator().manual_seed(0)
    drawn = Counter(add_noise(clean, 0.15, source, generator).chosen for _ in range(1500))
    names = {exact_search.EOS: 8, exact_search.BKSPC: 10}
    expected = {}
    for demonstration in path_star(Star()).demonstrations:
        found = worlds(Star())
        onward = [names.get(action, 3 if found[world].path else 0) for world, action, _ in demonstration.steps]
        expected[tuple(onward)] = demonstration.probability
    assert drawn.keys() <= expected.keys()
    for outcome, p in expected.items():  # four standard deviations of a binomial count
        assert abs(drawn[outcome] - 1500 * p) <= 4 * math.sqrt(1500 * p * (1 - p))


@pytest.mark.parametrize("start", [None, 0, 1])
@pytest.mark.parametrize("objective", [CLONING, *map(Case, exact_search.SILENT)], ids=lambda case: case.objective)
def test_without_the_on_policy_term_a_dead_end_stays_as_it_was_and_one_in_d_is_right(
    objective: Case, start: int | None
) -> None:
    table = path_star(Star())
    first = tabular.policy(table, exact_search.start_logits(table, start))[table.rows.index("dead end")]
    outcome = solved(dataclasses.replace(objective, start=start))
    assert outcome.accuracy == pytest.approx(1 / 3, abs=1e-12)
    assert outcome.dead_end_ends == pytest.approx(float(first[exact_search.EOS]), abs=1e-12)
    assert outcome.arm_deletes == pytest.approx(0, abs=1e-12)


def test_the_mixture_leaves_dead_ends_if_the_horizon_is_long() -> None:
    short, long = solved(Case(gamma=0.9)), solved(Case())
    assert (short.accuracy, short.dead_end_ends) == pytest.approx((0.333, 0.003), abs=1e-3)
    assert long.accuracy > 1 - 1e-12
    assert long.dead_end_ends < 1e-20
    assert long.actions == pytest.approx(178, abs=1)
    assert long.law is not None
    assert long.law.value_right_end == pytest.approx(15.8, abs=0.1)


def test_every_start_leads_to_the_same_optimum() -> None:
    first, *others = (solved(Case(alpha=0.5, start=start)) for start in (None, 0, 1))
    assert (first.accuracy, first.actions) == pytest.approx((1, 38.1), abs=0.1)
    # Closing an action before the states behind it have settled gave 689 actions from zeros and 716 from elsewhere.
    longer = [solved(Case(alpha=0.3, star=Star(length=3), start=start)) for start in (None, 0)]
    for one, another in [*((first, other) for other in others), longer]:
        for number, again in zip(summary(one), summary(another), strict=True):
            assert number == pytest.approx(again, rel=1e-6, abs=1e-9)


def summary(outcome: Outcome) -> tuple[float, ...]:
    return outcome.accuracy, outcome.actions, outcome.within, outcome.dead_end_deletes, outcome.arm_deletes


@pytest.mark.parametrize("case", [Case(gamma=0.9), Case(), Case(alpha=0.5)], ids=lambda c: f"{c.gamma}, {c.alpha}")
def test_at_a_dead_end_all_rewards_are_alike_and_a_wrong_end_costs_r_over_one_minus_gamma(case: Case) -> None:
    outcome = solved(case)
    assert outcome.residual is not None
    assert outcome.residual <= tabular.TOLERANCE
    law, gamma = outcome.law, case.gamma
    assert law is not None
    assert gamma is not None
    # The residual is the gradient per unit, of which a reward makes up 2 α κ ≥ 0.05.
    assert law.reward_spread <= 100 * tabular.TOLERANCE
    assert law.off_law <= 100 * tabular.TOLERANCE
    assert law.value_wrong_end == pytest.approx(law.reward / (1 - gamma), rel=1e-6)


def test_cloning_does_not_obey_that_law() -> None:
    """A negative control: from random logits rewards at a dead end differ."""
    table = path_star(Star())
    problem = tabular.Problem(table, CHI2_MIXTURE, 0.1, 0.9)
    law = exact_search.dead_end_law(problem, exact_search.cloned(table, exact_search.start_logits(table, 0)))
    assert law.reward_spread > 0.5
    assert law.off_law > 0.1


@pytest.mark.parametrize("star", [Star(arms=2), Star(length=3), Star(noise=0.02), Star(noise_on_arms=True)], ids=str)
def test_other_stars_show_the_same(star: Star) -> None:
    assert solved(dataclasses.replace(CLONING, star=star)).accuracy == pytest.approx(1 / star.arms, abs=0.01)
    assert solved(Case(alpha=0.5, star=star)).accuracy > 0.999


def test_the_exact_numbers_are_those_of_a_simulation() -> None:
    table, count = path_star(Star()), 1000
    logits = tabular.optimum(
        tabular.Problem(table, CHI2_MIXTURE, 1.0, 0.8), exact_search.start_logits(table, None)
    ).logits
    step = torch.einsum("wa,wan->wn", tabular.policy(table, logits)[table.row], table.transition)
    generator = torch.Generator().manual_seed(0)
    world, actions, within = torch.zeros(count, dtype=torch.long), torch.zeros(count), torch.zeros(len(step))
    while not bool(table.is_absorbing[world].all()):
        actions += ~table.is_absorbing[world]
        world = torch.multinomial(step[world], 1, generator=generator).squeeze(1)
        if int(actions.max()) == 10:
            within = world.bincount(minlength=len(step)) * table.is_absorbing / count
    ended, expected = tabular.endings(table, logits)
    four = 4 / math.sqrt(count)  # standard errors; those of a frequency are at most ½
    assert abs(float(actions.mean()) - expected) <= four * float(actions.std())
    assert float((world.bincount(minlength=len(step)) / count - ended).abs().max()) <= four / 2
    assert float((within - tabular.ended_within(table, logits, 10)).abs().max()) <= four / 2


def test_the_page_and_its_figure_are_what_was_solved() -> None:
    folder, page = ROOT / "results" / "exact_search", (ROOT / "docs" / "results" / "search.md").read_text()
    record = exact_search.read(folder)
    assert exact_search_report.markdown(record["table"], exact_search.WITHIN) in page
    assert exact_search_report.stars_markdown(record["stars"], dataclasses.asdict(Star())) in page
    solved_parts = {part: len(cases) for part, cases in exact_search.cases().items()}
    assert solved_parts == {part: len(record[part]) for part in solved_parts}
    residuals = [o["residual"] for part in solved_parts for o in record[part] if o["residual"] is not None]
    assert max(residuals) <= record["tolerance"]
    image = ROOT / "docs" / "images" / exact_search.FIGURE
    assert (folder / exact_search.FIGURE).read_bytes() == image.read_bytes()


def test_the_recorded_table_is_what_the_code_gives() -> None:
    for outcome in exact_search.read(ROOT / "results" / "exact_search")["table"]:
        if outcome["objective"] == "chi2_mixture" and outcome["start"] is None:
            again = solved(Case(alpha=outcome["alpha"], gamma=outcome["gamma"]))
            assert again.actions == pytest.approx(outcome["actions"], rel=1e-6)
            assert again.accuracy == pytest.approx(outcome["accuracy"], rel=1e-9)


def test_the_command_writes_results_and_a_figure_that_can_be_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"table": [CLONING], "sweep": [Case(gamma=gamma) for gamma in (0.8, 0.9)], "stars": []}
    monkeypatch.setattr(exact_search, "cases", lambda: few)
    out = tmp_path / "new"
    done = run("reproduce", "exact_search", "--out", out)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"Wrote {out / 'exact_search.png'}, from results.json beside it.\n"
    record = json.loads((out / "results.json").read_text())
    assert record["command"] == f"sequencematch reproduce exact_search --out {out}"
    assert [len(record[part]) for part in few] == [1, 2, 0]
    figure = (out / "exact_search.png").read_bytes()
    (out / "exact_search.png").unlink()
    monkeypatch.setattr(exact_search, "solve", None)  # drawing solves nothing
    assert run("reproduce", "exact_search", "--out", out, "--redraw").exit_code == 0
    assert (out / "exact_search.png").read_bytes() == figure


def test_wrong_arguments_of_the_command(tmp_path: Path) -> None:
    listed = ", ".join(EXPERIMENTS)
    check_error(run("reproduce", "nothing"), f"`NAME` must be one of: {listed}. Got 'nothing'.")
    check_error(run("reproduce", "exact_search", "--preset", "gpu"), "`--preset` would be ignored by exact_search.")
    check_error(run("reproduce", "arithmetic", "--data", "a.jsonl"), "`--data` would be ignored by arithmetic.")
    check_error(run("reproduce", "path_star", "--model", "a"), "`--model` would be ignored by path_star.")
    check_error(run("reproduce", "path_star", "--jobs", "0"), "`--jobs` must be at least 1. Got 0.")
    check_error(
        run("reproduce", "path_star", "--preset", "gpo", "--out", tmp_path / "x"), "`--preset` must be one of gpu, cpu."
    )
    check_error(run("reproduce", "path_star", "--preset", "gpu", "--redraw"), "`--redraw` needs results.json")
    (tmp_path / "file").write_text("")
    check_error(run("reproduce", "exact_search", "--out", tmp_path / "file"), "`--out` must be a folder.")
    check_error(
        run("reproduce", "exact_search", "--out", tmp_path, "--redraw"),
        "`--redraw` needs results.json in the folder.",
        "Leave out --redraw to run it.",
    )


def test_a_figure_that_cannot_be_drawn_is_said_before_the_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sequencematch.extras.importlib.util.find_spec", lambda _: None)
    monkeypatch.chdir(tmp_path)
    check_error(
        run("reproduce", "exact_search"), "The figure needs the package matplotlib: pip install 'sequencematch[plot]'."
    )
    assert list(tmp_path.iterdir()) == []


def test_wrong_stars_and_cases() -> None:
    with pytest.raises(ValueError, match=r"`arms` must be at least 2\. Got arms=1\."):
        Star(arms=1)
    with pytest.raises(ValueError, match=r"`noise` must lie strictly between 0 and 1.*Got noise=0\."):
        Star(noise=0)
    with pytest.raises(ValueError, match="`alpha` and `gamma` would be ignored"):
        Case(None, alpha=0.1, gamma=None)
    with pytest.raises(ValueError, match=r"`folder` must hold results\.json"):
        exact_search.read(Path("nowhere"))
