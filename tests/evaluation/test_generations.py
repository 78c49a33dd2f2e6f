"""An interrupted evaluation goes on from what it has, and ends as if it had never been interrupted."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sequencematch.data.locks import locked
from sequencematch.evaluation import describe_saved, evaluate, generations
from sequencematch.evaluation.generations import digest_of_weights
from sequencematch.evaluation.record import Record
from sequencematch.policy import Policy
from sequencematch.policy.generation import rollouts
from tests.evaluation.known import Questions, random_policy, words
from tests.policy.tiny_models import character_tokenizer, llama

OPTIONS: dict[str, Any] = {"temperature": 1.0, "backspace_bias": 2.0, "metrics": ["recovery", "rep_n"], "batch_size": 4}
ROWS = words(15)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return random_policy()


def run(policy: Policy, folder: Path | None, **changes: Any) -> Record:
    record = evaluate(policy, Questions(changes.pop("rows", ROWS)), folder=folder, **(OPTIONS | changes))
    return dataclasses.replace(record, seconds=0.0)


@pytest.fixture(scope="module")
def expected(policy: Policy) -> Record:
    """The record of an evaluation that keeps nothing."""
    return run(policy, None)


@pytest.fixture(scope="module")
def evaluated(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a whole evaluation leaves."""
    folder = tmp_path_factory.mktemp("evaluated")
    run(policy, folder)
    return folder


@pytest.fixture
def folder(evaluated: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(evaluated, tmp_path / "copy")


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> list[int]:
    """Press Ctrl-C when so many rows have ended; the list fills with the numbers of all rows that were begun."""
    begun: list[int] = []

    def interrupted(*arguments: Any, rows: list[int]) -> Iterator[Any]:
        begun.extend(rows)
        for rollout in rollouts(*arguments, rows=rows):
            nonlocal after
            if not after:
                raise KeyboardInterrupt
            after -= 1
            yield rollout

    monkeypatch.setattr(generations, "rollouts", interrupted)
    return begun


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# 15 rows, and the same with a mistake: after 20, the first are whole and 5 of the second are there.
@pytest.mark.parametrize("after", [0, 1, 6, 15, 20, 29])
def test_resumed_after_an_interruption_a_record_is_what_it_would_have_been(
    policy: Policy, expected: Record, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, after)
    with pytest.raises(KeyboardInterrupt):
        run(policy, tmp_path)
    kept = {row["row"] for row in lines(tmp_path / "generations.jsonl")[1:]}
    assert len(kept) == min(after, 15)
    begun = interrupt(monkeypatch, 1000)
    assert run(policy, tmp_path) == expected
    assert begun[: 15 - len(kept)] == sorted(set(range(15)) - kept)  # and none of those that were there
    assert len(begun) == 30 - after


def test_if_missing_rows_were_numbered_anew_the_record_would_be_another(
    policy: Policy, expected: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, 6)
    with pytest.raises(KeyboardInterrupt):
        run(policy, tmp_path)

    def renumbered(*arguments: Any, rows: list[int]) -> Iterator[Any]:
        for rollout in rollouts(*arguments):
            yield dataclasses.replace(rollout, row=rows[rollout.row])

    monkeypatch.setattr(generations, "rollouts", renumbered)
    assert run(policy, tmp_path) != expected


def test_what_is_whole_is_not_made_again_and_can_be_measured_otherwise(
    policy: Policy, expected: Record, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = interrupt(monkeypatch, 0)
    assert run(policy, folder) == expected
    assert run(policy, folder, metrics=["diversity"]) == run_unpatched(policy, monkeypatch, metrics=["diversity"])
    assert begun == []


def run_unpatched(policy: Policy, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Record:
    monkeypatch.setattr(generations, "rollouts", rollouts)
    return run(policy, None, **changes)


@pytest.mark.parametrize("cut", [1, 10, 10_000])
def test_a_last_line_that_was_cut_is_made_again(policy: Policy, expected: Record, cut: int, folder: Path) -> None:
    path = folder / "generations.jsonl"
    whole = path.read_bytes()
    last = len(whole) - whole[:-1].rfind(b"\n") - 1
    path.write_bytes(whole[: -min(cut, last - 1)])
    assert run(policy, folder) == expected
    assert len(lines(path)) == 16


def test_an_empty_file_is_begun_anew(policy: Policy, expected: Record, tmp_path: Path) -> None:
    (tmp_path / "generations.jsonl").write_bytes(b'{"weights": "cut sho')
    assert run(policy, tmp_path) == expected


def test_a_protected_prompt_is_protected_when_it_is_read_again(policy: Policy, tmp_path: Path) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "backspace_bias": 6.0, "protect_prompt": True}
    prompts = [row["prompt"] for row in ROWS[:5]]
    expected = policy.generate(prompts, max_new_tokens=6, seed=0, **options)
    assert any(policy.space.bkspc in t.chosen for t in expected.trajectories)
    assert not any(t.chosen[0] == policy.space.bkspc for t in expected.trajectories)  # there it would do nothing
    tokenizer: Any = policy.tokenizer
    pairs = zip(prompts, expected.trajectories, strict=True)
    behind = [tokenizer.decode(list(t.final_state.tokens[len(prompt) : -1])) for prompt, t in pairs]
    for _ in range(2):
        record = run(policy, tmp_path, **options, metrics=["backspace_rate"])
        assert [sample.final for sample in record.samples] == behind


def test_what_is_kept_can_be_said(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_saved(tmp_path / "nowhere") == "There are no generations yet."
    interrupt(monkeypatch, 20)
    with pytest.raises(KeyboardInterrupt):
        run(policy, tmp_path)
    kept = f"15 in {tmp_path / 'generations.jsonl'}, 5 in {tmp_path / 'recoveries.jsonl'}"
    assert describe_saved(tmp_path) == f"Generations kept: {kept}."


def test_a_plain_model_has_the_same_digest_each_time_it_is_loaded(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    one, other = (Policy.from_pretrained(tmp_path) for _ in range(2))
    assert not torch.equal(one.backspace.offset_in.weight, other.backspace.offset_in.weight)  # it is drawn
    assert digest_of_weights(one) == digest_of_weights(other)
    assert digest_of_weights(Policy.from_pretrained(tmp_path, dtype="bfloat16")) != digest_of_weights(one)


# Errors.


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"seed": 1}, "seed"),
        ({"temperature": 0.5}, "sampling"),
        ({"limit": 14}, "prompts"),
        ({"rows": words(16)[1:]}, "task, prompts"),
    ],
)
def test_generations_of_other_settings_are_refused_and_left_alone(
    policy: Policy, changes: dict[str, Any], differs: str, folder: Path
) -> None:
    before = (folder / "generations.jsonl").read_bytes()
    message = (
        f"`folder` must be new, or hold generations of the same settings to resume. Got {folder / 'generations.jsonl'}"
    )
    with pytest.raises(ValueError, match=re.escape(f"{message}, which differs in {differs}. Choose another folder")):
        run(policy, folder, **changes)
    assert (folder / "generations.jsonl").read_bytes() == before


def test_generations_of_other_weights_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("which differs in weights.")):
        run(random_policy(seed=2), folder)


@pytest.mark.parametrize("content", ['{"a": 1}\n{"b": 2}\n', "[1]\n", "text\n", "1\n2\n", "\xff\n"])
def test_another_file_of_that_name_is_refused_and_left_alone(policy: Policy, content: str, tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=re.escape(f"`folder` must hold no other generations.jsonl. Got {path}")):
        run(policy, tmp_path)
    assert path.read_text(encoding="latin-1") == content


def test_a_folder_to_which_another_process_writes_is_refused(policy: Policy, tmp_path: Path) -> None:
    """Two evaluations would make every row twice."""
    with (
        locked(tmp_path, "folder", ".generations.jsonl.lock"),
        pytest.raises(ValueError, match=r"`folder` must not be in use\. Got .*, to which this process writes\."),
    ):
        run(policy, tmp_path)
    run(policy, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generations.jsonl", "recoveries.jsonl"]
