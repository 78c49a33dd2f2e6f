"""The first five minutes: what is shown, what is compared, what is left of it."""

import dataclasses
import importlib.util
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from sequencematch.cli import app
from sequencematch.core.mdp import ActionSpace
from sequencematch.experiments import demo
from sequencematch.experiments.demo import ALSO_SHOWN, COMPARED, MISTAKEN, OBJECTIVES, Budget, Outcome
from sequencematch.metrics import Measure
from sequencematch.policy import Policy, display
from sequencematch.policy.decoding.decoder import ActionEvent

TINY = Budget(steps=4, batch_size=4, train_questions=40, test_questions=24)
SPACE = ActionSpace(27, eos=26)  # a token is a letter
CODES = {"": "", "0": "", "2": "dim", "32": "green", "9;31": "red strike"}
#: The parts of each answer to MISTAKEN: kept from the prompt, deleted, its replacement, the rest.
MADE = (("", "5", "4", "2"), ("64", "3", "7", ""), ("", "3", "-", "321"), ("100", "0", "1", "1"))


def measure(name: str, value: float, low: float, high: float) -> Measure:
    return Measure(name, value, low, high, 200, f"{name}|n:200")


def outcome(objective: str, seed: int = 0, **values: float) -> Outcome:
    """Made up: every measure is 0.5 unless given, with an interval of ± 0.1."""
    given = dict.fromkeys((*COMPARED, "backspace rate"), 0.5)
    given |= {name.replace("_", " "): value for name, value in values.items()}
    measures = tuple(measure(name, v, v - 0.1, v + 0.1) for name, v in given.items())
    return Outcome(objective, seed, measures, ((1, 2.5), (2, 0.125)), 10.5, 1.25)


def printed(table: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    return written(console)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100)


def frames(console: Console) -> list[list[tuple[str, str]]]:
    """Everything one line of a terminal has shown: pieces of text with their style."""
    found = []
    for frame in re.sub(r"\x1b\[\?25[lh]", "", written(console)).split("\r\x1b[2K"):
        first, *others = re.split(r"\x1b\[([\d;]*)m", frame.rstrip("\n"))
        pieces = [("", first), *zip(others[::2], others[1::2], strict=True)]
        found.append([(text, CODES[code]) for code, text in pieces if text])
    return found


def spell(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def chosen(actions: str, *, is_cut: bool = False) -> list[ActionEvent]:
    """One event a letter: `<` deletes and `.` is <eos>; a row that was cut executes <eos> whatever it chose."""
    ids = [{"<": SPACE.bkspc, ".": SPACE.eos}.get(letter, ord(letter) - ord("a")) for letter in actions]
    executed = [*ids[:-1], SPACE.eos] if is_cut else ids
    return [ActionEvent(0, a, e, -0.5, 1.0, ()) for a, e in zip(ids, executed, strict=True)]


def watched(prompt: str, events: list[ActionEvent], **options: Any) -> list[list[tuple[str, str]]]:
    console = terminal()
    initial = [ord(letter) - ord("a") for letter in prompt]
    display.watch(console, prompt, initial, iter(events), SPACE, spell, **options)
    shown = frames(console)
    assert shown[-1] == shown[-2]  # what rich leaves when it stops
    return shown[:-1]


# By hand: watching.


def test_every_action_is_drawn_as_it_happens() -> None:
    assert watched("ca", chosen("t<r.")) == [
        [("ca", "dim"), ("…", "dim")],
        [("ca", "dim"), ("t", ""), ("…", "dim")],
        [("ca", "dim"), ("t", "red strike"), ("…", "dim")],
        [("ca", "dim"), ("t", "red strike"), ("r", "green"), ("…", "dim")],
        [("ca", "dim"), ("t", "red strike"), ("r", "green"), ("<eos>", "dim")],
    ]


def test_a_deletion_in_the_prompt_is_struck_unless_the_floor_protects_it() -> None:
    assert watched("ca", chosen("<o."))[-1] == [("c", "dim"), ("a", "red strike"), ("o", "green"), ("<eos>", "dim")]
    assert watched("ca", chosen("<o."), floor=2)[-1] == [("ca", "dim"), ("o", ""), ("<eos>", "dim")]


def test_the_action_at_which_a_row_was_cut_is_not_drawn() -> None:
    assert watched("c", chosen("ar", is_cut=True))[1:] == [
        [("c", "dim"), ("a", ""), ("…", "dim")],
        [("c", "dim"), ("a", ""), ("…", "dim")],
    ]
    # Control: had it not been the last, it would have been executed.
    assert watched("c", chosen("ar."))[2] == [("c", "dim"), ("ar", ""), ("…", "dim")]


def test_an_action_is_drawn_after_a_pause_and_before_the_next_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal()
    pauses: list[float] = []
    drawn: list[int] = []

    def events() -> Iterator[ActionEvent]:
        for event in chosen("t<r."):
            drawn.append(len(frames(console)))
            yield event

    monkeypatch.setattr("time.sleep", pauses.append)
    display.watch(console, "ca", [2, 0], events(), SPACE, spell, pause_s=0.25)
    assert drawn == [1, 2, 3, 4]
    assert pauses == [0.25] * 4


def test_text_is_struck_on_a_terminal_with_colours_only() -> None:
    assert display.can_strike(terminal())
    assert not display.can_strike(Console(file=io.StringIO(), force_terminal=True, color_system=None))
    assert not display.can_strike(Console(file=io.StringIO(), force_terminal=False, color_system="truecolor"))


# By hand: comparing.


def test_one_seed_is_shown_with_its_interval() -> None:
    measures = (
        measure("accuracy", 0.5, 0.435, 0.57),
        measure("deletes first", 1.0, 1.0, 1.0),
        measure("recovers", 0.125, 0.08, 0.1749),
    )
    text = printed(demo.table([Outcome("bc", 0, measures, (), 1.0, 1.0)]))
    rows = [re.split("  +", line.strip()) for line in text.splitlines() if "[" in line]
    assert rows == [
        ["right", "50.0 [43.5, 57.0]"],
        ["deletes a wrong digit", "100.0 [100.0, 100.0]"],
        ["right despite it", "12.5 [8.0, 17.5]"],
    ]


def test_own_errors_and_plausible_mistakes_are_shown_where_they_were_measured() -> None:
    """Also the share of nothing, by a model that wrote no wrong digit."""
    nothing = Measure("own errors deleted", math.nan, math.nan, math.nan, 0, "")
    more = (
        measure("deletes first, plausible", 0.25, 0.2, 0.3),
        nothing,
        measure("right tokens deleted", 0.01, 0, 0.02),
    )
    three = [outcome(name) for name in OBJECTIVES]
    text = printed(demo.table([dataclasses.replace(o, measures=o.measures + more) for o in three]))
    rows = {cells[0]: cells[1:] for cells in (re.split("  +", line.strip()) for line in text.splitlines())}
    assert rows["deletes a plausible one"] == ["25.0 [20.0, 30.0]"] * 3
    assert rows["own wrong digits deleted"] == ["–"] * 3
    assert rows["own right digits deleted"] == ["1.0 [0.0, 2.0]"] * 3


def test_several_seeds_are_shown_with_their_mean_and_range() -> None:
    """0.5, 0.7 and 0.9: mean 0.7. Their intervals, [0.4, 0.6] and so on, play no part."""
    seeds = [outcome("bc", seed, accuracy=value) for seed, value in enumerate((0.7, 0.5, 0.9))]
    text = printed(demo.table(seeds))
    assert "70.0 [50.0, 90.0]" in text
    assert text.count("50.0 [50.0, 50.0]") == 2


def test_the_table_has_a_column_for_each_objective_in_their_order() -> None:
    three = [outcome(name, accuracy=value) for name, value in (("sequencematch", 0.9), ("mle", 0.3), ("bc", 0.6))]
    lines = printed(demo.table(three)).splitlines()
    assert "Percent of 200 questions not seen in training" in lines[0]
    assert all(heading in "".join(lines) for heading in COMPARED.values())
    (names,) = (line.split() for line in lines if "MLE" in line)
    assert names == ["MLE", "BC", "SequenceMatch"]
    (right,) = [re.split("  +", line.strip()) for line in lines if line.strip().startswith("right  ")]
    assert right == ["right", "30.0 [20.0, 40.0]", "60.0 [50.0, 70.0]", "90.0 [80.0, 100.0]"]
    # Control: one that is not there has no column.
    text = printed(demo.table(three[:2]))
    assert [name in text for name in OBJECTIVES.values()] == [True, False, True]


def test_bars_are_means_with_their_intervals_and_dots_are_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracies 0.3 and 0.5: a bar of 40 from 30 to 50, the mean of [20, 40] and [40, 60], and dots at 30 and 50."""
    kept: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: kept.append(figure))
    seeds = [outcome(name, s, accuracy=v) for name in ("mle", "bc") for s, v in enumerate((0.3, 0.5))]
    demo.draw(seeds, tmp_path / "x.png")
    demo.draw(seeds[:1], tmp_path / "x.png")
    axes, alone = (figure.axes[0] for figure in kept)
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([40, 50, 50] * 2)
    assert len({to_hex(bar.get_facecolor()) for bar in axes.patches}) == 2
    ends = [collection.get_segments()[0][:, 1].tolist() for collection in axes.collections]
    assert ends == [pytest.approx(pair) for pair in ([30, 50], [40, 60], [40, 60]) * 2]
    dots = [sorted(line.get_ydata()) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [pytest.approx(pair) for pair in ([30, 50], [50, 50], [50, 50]) * 2]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["MLE", "BC"]
    assert [text.get_text() for text in axes.texts] == ["40", "50", "50"] * 2
    # Control: one seed has no dot.
    assert [bar.get_height() for bar in alone.patches] == pytest.approx([30, 50, 50])
    assert not [line for line in alone.lines if line.get_marker() == "o"]


@pytest.mark.parametrize(
    "names",
    [["mle"], ["mle", "bc"], [*OBJECTIVES], [*OBJECTIVES, *OBJECTIVES]],
    ids=["one", "two", "three", "two seeds"],
)
def test_a_picture_is_drawn_of_whatever_is_finished(names: list[str], tmp_path: Path) -> None:
    """Also of none or all right, whose intervals have no width."""
    sure = (measure("accuracy", 0.0, 0.0, 0.0), measure("deletes first", 1.0, 1.0, 1.0))
    outcomes = [outcome(name, seed=i // 3) for i, name in enumerate(names)]
    outcomes[0] = dataclasses.replace(outcomes[0], measures=(*sure, *outcomes[0].measures[2:]))
    demo.save(outcomes, TINY, tmp_path, "", is_complete=False)
    with Image.open(tmp_path / "comparison.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1200, 540))
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1_000_000) or []}
    own = {"mle": (0x9A, 0xA5, 0xB1), "bc": (0xE0, 0xA4, 0x58), "sequencematch": (0x2F, 0x6F, 0x8F)}
    assert {name for name, colour in own.items() if colour in colours} == set(names)


def test_what_is_saved_is_read_again_and_replaced_by_more(tmp_path: Path) -> None:
    outcomes = [outcome(name, seed, recovers=0.1 * seed) for seed in range(2) for name in OBJECTIVES]
    for count in (1, len(outcomes)):
        demo.save(outcomes[:count], TINY, tmp_path / "a" / "b", "sequencematch demo", is_complete=count > 1)
        assert demo.read(tmp_path / "a" / "b") == outcomes[:count]
    assert demo.read(tmp_path / "a" / "b")[0].curve == ((1, 2.5), (2, 0.125))
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == {"results.json", "comparison.png"}
    record = json.loads((tmp_path / "a" / "b" / "results.json").read_text())
    assert (record["command"], record["is_complete"]) == ("sequencematch demo", True)
    assert Budget(**record["scale"]) == TINY


# The bundled model, shown.


def test_elsewhere_than_on_a_terminal_every_action_is_spelled_out() -> None:
    console = Console(file=io.StringIO(), width=30)  # narrower than a line, which stays whole
    demo.show(console)
    lines = written(console).splitlines()
    expected = [f"{prompt}<bkspc>{new}{rest}<eos>" for prompt, (_, _, new, rest) in zip(MISTAKEN, MADE, strict=True)]
    assert [line for line in lines if "Solution" in line] == expected
    answers = [kept + new + rest for kept, _, new, rest in MADE]
    assert answers == ["42", "647", "-321", "10011"]
    assert [int(text, base) for text, base in zip(answers, (7, 8, 5, 2), strict=True)] == [
        int("25", 7) + int("14", 7),
        int("735", 8) - int("66", 8),
        int("10", 5) - int("331", 5),
        int("1101", 2) + int("110", 2),
    ]


def test_on_a_terminal_the_wrong_digit_is_struck() -> None:
    console = terminal()
    demo.show(console, pause_s=0)
    for prompt, (_, deleted, new, rest) in zip(MISTAKEN, MADE, strict=True):
        before = prompt.removesuffix(deleted)
        pieces = f"\x1b[2m{before}\x1b[0m\x1b[9;31m{deleted}\x1b[0m\x1b[32m{new}\x1b[0m{rest}\x1b[2m<eos>\x1b[0m"
        assert pieces in written(console)
    assert "<bkspc>" not in written(console)


def test_the_search_is_drawn_and_compared_with_the_same_network_without_deletions() -> None:
    console = Console(file=io.StringIO(), width=200)
    demo.search(console, graphs=60, watched=3)
    said = written(console)
    assert said.count("◀ goal") == 3
    assert "<bkspc>" in said
    found = re.search(r"Of 60 such graphs it solves (\d+)%, .* solves (\d+)% \(4.0 nodes\), or (\d+)%", said)
    assert found is not None
    solved, straight, sampled = map(int, found.groups())
    assert solved >= 95
    assert straight < 50
    assert sampled < 70


def test_on_a_terminal_the_walk_ends_at_the_goal() -> None:
    console = terminal()
    demo.search(console, graphs=8, watched=1, pause_s=0)
    frames_shown = written(console)
    assert "arrives" in frames_shown
    assert "deletes" in frames_shown


# Training.


def test_the_objectives_differ_in_noise_and_rollouts_alone(tmp_path: Path) -> None:
    configs = [demo.config(name, demo.FULL, 3, str(tmp_path)) for name in OBJECTIVES]
    values = {field.name: [getattr(c, field.name) for c in configs] for field in dataclasses.fields(configs[0])}
    own = {"objective", "noise_rate", "noise_source", "bc_steps", "bc_anneal_steps", "generation_batch_size"}
    own |= {"model_value_from"}
    assert {name for name, found in values.items() if found != [found[0]] * 3} == own
    assert values["objective"] == list(OBJECTIVES)
    assert values["noise_rate"] == [0, 0.3, 0.3]
    assert values["model_value_from"] == ["data", "data", "rollouts"]
    assert [set(found[:2]) for found in (values["bc_steps"], values["bc_anneal_steps"])] == [{None}] * 2  # unused
    # SequenceMatch begins as BC, for half of its steps, and ends as itself.
    steps = (0, demo.FULL.steps // 2, 3 * demo.FULL.steps // 4, demo.FULL.steps)
    assert [configs[2].bc_weight(step) for step in steps] == pytest.approx([1, 1, 0.2, 0.2])


def test_questions_are_in_bases_the_base_model_has_not_seen() -> None:
    bases = {row["prompt"].split()[2] for row in demo.task(TINY).train() + demo.task(TINY).test()}
    assert bases == {"5,", "6,", "7,", "8,", "9,"}


def test_every_objective_is_trained_measured_and_saved(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    outcomes = list(demo.run(TINY, [0], tmp_path, console, "sequencematch demo"))
    assert [(o.objective, o.seed) for o in outcomes] == [(name, 0) for name in OBJECTIVES]
    for o in outcomes:
        assert [o[name].count for name in COMPARED] == [24] * 3
        assert all(name in o for name in ALSO_SHOWN)
        assert "likeliest by sequencematch/arithmetic-base (" in o["recovers, plausible"].signature
        assert [step for step, _ in o.curve] == [1, 2, 3, 4]
        assert o.train_seconds > 0 < o.test_seconds
    assert outcomes[0]["deletes first"].value == 0  # there is no <bkspc> in maximum likelihood
    assert [line for line in written(console).splitlines() if "Fine-tuning" in line] == [
        "Fine-tuning with MLE (1 of 3)",
        "Fine-tuning with BC (2 of 3)",
        "Fine-tuning with SequenceMatch (3 of 3)",
    ]
    assert demo.read(tmp_path) == outcomes

    prompt = demo.task(TINY).test()[0]["prompt"]
    loaded = [Policy.from_pretrained(tmp_path / name) for name in OBJECTIVES]
    scores = [policy.generate(prompt, temperature=0, max_new_tokens=12).log_probs[0].tolist() for policy in loaded]
    assert scores[0] != scores[1] != scores[2]


def test_an_outcome_is_saved_before_the_next_begins_and_one_seeds_policies_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Outcome] = []
    kept: list[Path | None] = []

    def train(objective: str, _: Budget, seed: int, save_to: Path | None) -> Outcome:
        assert not trained or demo.read(tmp_path) == trained
        trained.append(outcome(objective, seed))
        kept.append(save_to)
        return trained[-1]

    monkeypatch.setattr(demo, "fine_tune", train)
    console = Console(file=io.StringIO(), width=100)
    outcomes = list(demo.run(TINY, [5, 7], tmp_path, console, ""))
    assert [(o.seed, o.objective) for o in outcomes] == [(seed, name) for seed in (5, 7) for name in OBJECTIVES]
    assert outcomes == trained == demo.read(tmp_path)
    assert kept == [*(tmp_path / name for name in OBJECTIVES), None, None, None]
    assert "Fine-tuning with MLE (4 of 6, seed 7)" in written(console)


def test_an_interruption_leaves_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(objective: str, *_: object) -> Outcome:
        if objective == "bc":
            raise KeyboardInterrupt
        return outcome(objective)

    monkeypatch.setattr(demo, "fine_tune", train)
    with pytest.raises(KeyboardInterrupt):
        list(demo.run(TINY, [0], tmp_path, Console(file=io.StringIO()), ""))
    assert demo.read(tmp_path) == [outcome("mle")]


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a package look missing."""
    real = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name == package else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(demo, "find_spec", find)


def test_without_its_questions_the_models_are_shown_and_then_the_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without("mathematics_dataset", monkeypatch)
    trained: list[object] = []
    monkeypatch.setattr(demo, "fine_tune", lambda *arguments: trained.append(arguments))
    monkeypatch.setattr(demo, "search", lambda console: console.print("a search"))
    text = "The comparison of three trainings needs the package mathematics_dataset: pip install 'sequencematch[arithmetic]'."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        list(demo.run(TINY, [0], tmp_path / "out", Console(file=io.StringIO()), ""))
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out")])
    assert (result.exit_code, result.stderr) == (0, "")
    shown, _, said = result.stdout.partition(text)
    assert "a search" in shown
    assert "5<bkspc>42<eos>" in shown
    assert said == " To train without it: sequencematch train examples/train_small.yaml\n"
    assert trained == []
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_the_comparison_has_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without("matplotlib", monkeypatch)
    monkeypatch.setattr(demo, "search", lambda _: None)
    monkeypatch.setattr(demo, "fine_tune", lambda objective, _, seed, __: outcome(objective, seed))
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "A figure of it needs the package matplotlib: pip install 'sequencematch[plot]'." in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


# The command.


@pytest.mark.parametrize(("at", "left"), [("mle", []), ("sequencematch", ["mle", "bc"])])
def test_ctrl_c_leaves_what_is_finished_and_says_where(
    at: str, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(objective: str, *_: object) -> Outcome:
        if objective == at:
            raise KeyboardInterrupt
        return outcome(objective)

    monkeypatch.setattr(demo, "search", lambda _: None)
    monkeypatch.setattr(demo, "fine_tune", train)
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path / "out")])
    said = f"Finished results are in {tmp_path / 'out'}." if left else "Nothing was finished."
    assert result.exit_code == 130
    assert result.stderr.endswith(f"Interrupted. {said}\n")
    assert ("Percent of 200 questions" in result.stdout) == bool(left)
    assert (tmp_path / "out" / "comparison.png").is_file() == bool(left)
    if left:
        assert [o.objective for o in demo.read(tmp_path / "out")] == left
        assert not json.loads((tmp_path / "out" / "results.json").read_text())["is_complete"]


def test_the_command_ends_in_the_table_and_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "fine_tune", lambda objective, _, seed, __: outcome(objective, seed))
    result = CliRunner().invoke(app, ["demo", "--quick", "--seeds", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "5<bkspc>42<eos>" in result.stdout
    assert "Percent of 200 questions" in result.stdout
    assert str(tmp_path / "comparison.png") in result.stdout.replace("\n", "")
    record = json.loads((tmp_path / "results.json").read_text())
    assert (record["command"], record["is_complete"]) == ("sequencematch demo --quick --seeds 2", True)
    assert Budget(**record["scale"]) == demo.QUICK
    assert [(o.seed, o.objective) for o in demo.read(tmp_path)] == [(s, name) for s in range(2) for name in OBJECTIVES]


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for flags, text in (
        (["--seeds", "0"], "`--seeds` must be at least 1. Got 0."),
        (["--out", str(tmp_path / "file")], f"`--out` must be a folder. Got {tmp_path / 'file'}, which is a file."),
    ):
        result = CliRunner().invoke(app, ["demo", *flags])
        assert (result.exit_code, result.stderr) == (2, f"Error: {text}\n")
