"""`sequencematch lm-eval` passes everything on to lm-eval, with our model where none is named."""

import pytest

from sequencematch.cli.lm_eval import completed
from tests.cli.program import check_error, run


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--tasks", "a"], ["run", "--model", "sequencematch", "--batch_size", "64", "--tasks", "a"]),
        (["run", "--tasks", "a", "-b", "2"], ["run", "--model", "sequencematch", "--tasks", "a", "-b", "2"]),
        (["--model=hf", "--batch_size=1"], ["run", "--model=hf", "--batch_size=1"]),
        (["run", "--config", "a.yaml"], ["run", "--config", "a.yaml"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        (["run", "--help"], ["run", "--help"]),
        (["--help"], ["--help"]),
        ([], ["--help"]),
    ],
)
def test_our_model_is_the_default(given: list[str], passed: list[str]) -> None:
    assert completed(given) == passed


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check_error(run("lm-eval", "--tasks", "a"), "needs the package lm_eval: pip install 'sequencematch[lm-eval]'.")


@pytest.mark.parametrize("given", [["--help"], []])
def test_without_the_package_help_is_our_own(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = run("lm-eval", *given)
    assert result.exit_code == 0
    assert "--model_args pretrained=" in result.output
    assert "pip install 'sequencematch[lm-eval]'" in result.output
