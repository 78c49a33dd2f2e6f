"""The options of sampling can be discovered: typed for editors and checkers, and a misspelt one is answered with its name."""

import subprocess
import sys
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack

import pytest

import sequencematch
from sequencematch.evaluation import evaluate
from sequencematch.policy import Policy, Sampling, SamplingOptions
from tests.policy.tiny_models import tiny

PACKAGE = Path(sequencematch.__file__).parent


def test_the_options_are_the_fields_of_sampling() -> None:
    hints = typing.get_type_hints(Sampling)
    assert typing.get_type_hints(SamplingOptions) == {field.name: hints[field.name] for field in fields(Sampling)}
    assert SamplingOptions.__required_keys__ == frozenset()


@pytest.mark.parametrize("function", [Policy.generate, Policy.stream, evaluate])
def test_whatever_samples_takes_these_options(function: Callable[..., Any]) -> None:
    assert typing.get_type_hints(function)["sampling"] == Unpack[SamplingOptions]


@pytest.mark.parametrize("call", [Policy.generate, Policy.stream])
def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(call: Callable[..., Any]) -> None:
    text = r"^`max_tokn` is not a field of `Sampling`; did you mean 'max_actions' or 'max_new_tokens'\?$"
    with pytest.raises(TypeError, match=text):
        call(Policy.from_pretrained(tiny("Llama")), [5], max_tokn=3)


def test_an_option_that_is_like_no_other_is_named() -> None:
    with pytest.raises(TypeError, match=r"^`beams` is not a field of `Sampling`\.$"):
        Sampling(beams=4)  # type: ignore[call-arg]


def test_a_type_checker_refuses_a_misspelt_option(tmp_path: Path) -> None:
    """Only the two modules with the signatures are read, which takes seconds instead of half a minute."""
    (tmp_path / "snippet.py").write_text(
        "from sequencematch.policy.policy import Policy\n"
        "def right(policy: Policy) -> None: policy.generate('x', max_new_tokens=3, temperature=0.5, batch_size=2)\n"
        "def misspelt(policy: Policy) -> None: policy.generate('x', max_tokn=3)\n"
        "def mistaken(policy: Policy) -> None: policy.stream('x', top_k='many')\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file=", "--no-incremental", "--follow-imports=skip"]
    files = [tmp_path / "snippet.py", PACKAGE / "policy" / "policy.py", PACKAGE / "policy" / "sampling.py"]
    done = subprocess.run(
        [*command, "--explicit-package-bases", *files],
        env={"MYPYPATH": f"{PACKAGE.parent}:{tmp_path}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("snippet.py") and ": error: " in line] == [
        'snippet.py:3: error: Unexpected keyword argument "max_tokn" for "generate" of "Policy"  [call-arg]',
        'snippet.py:4: error: Argument "top_k" to "stream" of "Policy" has incompatible type "str"; '
        'expected "int | None"  [arg-type]',
    ]
