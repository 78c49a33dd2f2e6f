"""`sequencematch bench`: its list, its results, its errors, and what an interruption leaves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sequencematch import cli
from sequencematch.bench import run as bench_run
from sequencematch.bench.measure import Row
from sequencematch.bench.profile import Profile
from sequencematch.bench.session import Session
from tests.bench.known import session


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def check_error(result: Any, *texts: str) -> None:
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    assert all(text in result.stderr for text in texts), result.stderr


def test_it_lists_its_suites() -> None:
    result = run("--list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(bench_run.SUITES)


def test_a_wrong_suite_is_answered_with_the_one_that_was_meant() -> None:
    check_error(run("decodin"), "`SUITE` must be one of encoding", "did you mean 'decoding'?")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rounds", "3"], "`--rounds` must be at least 11"),
        (["--quick", "--rounds", "0"], "`--rounds` must be at least 1"),
        (["--device", "nowhere"], "`--device` must be a device of this machine. Got 'nowhere'"),
    ],
)
def test_bad_options_are_answered_in_one_line(arguments: list[str], text: str) -> None:
    check_error(run(*arguments), text)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_error(run("--out", tmp_path / "file"), "`--out` must be a folder")


def test_results_are_printed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "session_for", lambda *_, **__: session())
    result = run("encoding", "--quick", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "Algorithm A as printed / alive intervals" in result.stdout
    assert "Measuring encoding" in result.stderr
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["is_complete"]
    assert record["signature"]["command"] == f"sequencematch bench encoding --quick --out {tmp_path}"
    assert (tmp_path / "bench.png").exists()


def test_a_profile_is_written_in_place_of_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "session_for", lambda *_, **options: session(is_profiled=options["is_profiled"]))
    result = run("head", "step", "--profile", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["profile.md"]
    found = (tmp_path / "profile.md").read_text()
    assert f"- command: sequencematch bench head step --profile --out {tmp_path}" in found
    assert "## training step: the paper's recipe" in found
    assert "## generation: 4 prompts of 4 and 12 tokens" in found
    assert "`aten::" in found


@pytest.mark.parametrize("title", ["", "head: dense"])
def test_an_interrupted_profile_keeps_what_it_has(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(asked: Session) -> Iterator[Row]:
        if title:
            asked.profiles[title] = Profile(0.1, ())
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(bench_run, "session_for", lambda *_, **options: session(is_profiled=options["is_profiled"]))
    monkeypatch.setattr(bench_run, "SUITES", {"head": interrupted})
    assert run("head", "--profile", "--out", tmp_path).exit_code == 130
    assert (tmp_path / "profile.md").exists() == bool(title)


def test_every_variant_of_every_shape_has_a_profile_of_its_own() -> None:
    asked = session(is_profiled=True, head_hidden=(8, 16), attention_lengths=(8, 16))
    for name in ("head", "attention"):
        list(bench_run.SUITES[name](asked))
    assert len(asked.profiles) == 2 * 2 * 3 + 2 * (2 + 3)  # widths, layers, variants; lengths, masks and kernels


def test_whole_training_runs_are_not_profiled() -> None:
    check_error(
        run("end_to_end", "--profile"), "`SUITE` must be one of encoding, attention, head, step, decoding, length."
    )


def test_an_interruption_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Session) -> Iterator[Row]:
        yield Row("head", "measured", 1.5)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "session_for", lambda *_, **__: session())
    monkeypatch.setattr(bench_run, "SUITES", {"head": interrupted})
    result = run("head", "--out", tmp_path)
    assert result.exit_code == 130
    assert "measured" in result.stdout
    assert f"Interrupted. What is measured is in {tmp_path / 'bench.json'}." in result.stderr
    record = json.loads((tmp_path / "bench.json").read_text())
    assert not record["is_complete"]
    assert [row["name"] for row in record["rows"]] == ["measured"]
