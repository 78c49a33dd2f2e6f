"""`python -m benchmarks`: its list, its results, its errors, and the results that an interruption keeps."""

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import suites
from benchmarks.__main__ import main
from benchmarks.profile import Profile
from benchmarks.session import Session
from benchmarks.timing import Measurement
from tests.benchmarks.known import session


def run(*arguments: str | Path) -> int:
    return main([*map(str, arguments)])


def check_error(capsys: pytest.CaptureFixture[str], code: int, *texts: str) -> None:
    error = capsys.readouterr().err
    assert code == 2, error
    assert len(error.splitlines()) == 1
    assert all(text in error for text in texts), error


def test_it_lists_its_suites(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As `python -m benchmarks` does."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--list"])
    monkeypatch.delitem(sys.modules, "benchmarks.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks", run_name="__main__")
    assert ended.value.code == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(suites.SUITES)


def test_a_wrong_suite_is_answered_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    check_error(capsys, run("decodin"), "`SUITE` must be one of encoding", "did you mean 'decoding'?")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rounds", "3"], "`--rounds` must be at least 11"),
        (["--quick", "--rounds", "0"], "`--rounds` must be at least 1"),
        (["--device", "nowhere"], "`--device` must be a device of this machine. Got 'nowhere'"),
    ],
)
def test_bad_options_are_answered_in_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_error(capsys, run(*arguments), text)


def test_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    check_error(capsys, run("--out", tmp_path / "file"), "`--out` must be a folder")


def test_results_are_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suites, "session_for", lambda *_, **__: session())
    assert run("encoding", "--quick", "--out", tmp_path) == 0
    output = capsys.readouterr()
    assert "Algorithm A as printed / alive intervals" in output.out
    assert "Measuring encoding" in output.err
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["is_complete"]
    assert record["signature"]["command"] == f"python -m benchmarks encoding --quick --out {tmp_path}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md", "bench.png"]


def test_a_profile_is_written_in_place_of_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"same_rows": False}
    monkeypatch.setattr(suites, "session_for", lambda *_, **options: session(is_profiled=options["is_profiled"], **few))
    assert run("step", "--profile", "--out", tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["profile.md"]
    found = (tmp_path / "profile.md").read_text()
    assert f"- command: python -m benchmarks step --profile --out {tmp_path}" in found
    assert "## training step: the paper's recipe" in found
    assert "## generation: 4 prompts of 4 and 12 tokens" in found
    assert "`aten::" in found


@pytest.mark.parametrize("title", ["", "head: dense"])
def test_an_interrupted_profile_keeps_what_it_has(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(asked: Session) -> Iterator[Measurement]:
        if title:
            asked.profiles[title] = Profile(0.1, ())
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(suites, "session_for", lambda *_, **options: session(is_profiled=options["is_profiled"]))
    monkeypatch.setattr(suites, "SUITES", {"head": interrupted})
    assert run("head", "--profile", "--out", tmp_path) == 130
    assert (tmp_path / "profile.md").exists() == bool(title)


def test_every_variant_of_every_shape_has_a_profile_of_its_own() -> None:
    asked = session(is_profiled=True, head_hidden=(8, 16), attention_lengths=(8, 16))
    for name in ("head", "attention"):
        list(suites.SUITES[name](asked))
    assert len(asked.profiles) == 2 * 2 * 3 + 2 * (2 + 3)  # widths, layers, variants; lengths, masks and kernels


def test_whole_training_runs_are_not_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    rest = "`SUITE` must be one of encoding, attention, head, step, decoding, search, length."
    check_error(capsys, run("end_to_end", "--profile"), rest)


def test_an_interruption_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Session) -> Iterator[Measurement]:
        yield Measurement("head", "measured", 1.5)
        raise KeyboardInterrupt

    monkeypatch.setattr(suites, "session_for", lambda *_, **__: session())
    monkeypatch.setattr(suites, "SUITES", {"head": interrupted})
    assert run("head", "--out", tmp_path) == 130
    output = capsys.readouterr()
    assert "measured" in output.out
    assert f"Interrupted. The measurements so far are in {tmp_path / 'bench.json'}." in output.err
    record = json.loads((tmp_path / "bench.json").read_text())
    assert not record["is_complete"]
    assert [row["name"] for row in record["rows"]] == ["measured"]
