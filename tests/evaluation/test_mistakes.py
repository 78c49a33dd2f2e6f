"""Plausible mistakes: the wrong tokens that one fixed scorer finds likeliest, in the places of those drawn at random."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sequencematch.core.mdp import Trajectory
from sequencematch.evaluation import Record, evaluate, report
from sequencematch.evaluation.cases import Case, read_cases
from sequencematch.evaluation.mistakes import load_scorer, plausible, source_of_mistakes, with_mistakes
from sequencematch.policy import Policy
from tests.evaluation.known import ALWAYS_ONE, Questions, known_policy, random_policy, words
from tests.policy.tiny_models import character_tokenizer, llama

#: After a colon 1 is likeliest, and 2 after 1.
ONE_TWO = {":": "1", "1": "2"}


def ids(policy: Policy, text: str) -> tuple[int, ...]:
    tokenizer: Any = policy.tokenizer
    return tuple(tokenizer(text)["input_ids"])


def chosen(scorer: Policy, rows: Sequence[dict[str, Any]], mistakes: int = 1, batch_size: int = 64) -> list[str]:
    """The prompts as text."""
    cases = read_cases(scorer, Questions(rows), rows)
    drawn = with_mistakes(scorer, cases, 0, mistakes)
    return [scorer.tokenizer.decode(p) for p in plausible(scorer, cases, drawn, mistakes, batch_size)]  # type: ignore[union-attr]


# By hand.


def test_the_likeliest_token_is_taken_if_it_is_wrong_and_the_next_if_it_is_right() -> None:
    """3 is right in the first row. In the second 1 is: all others are alike, and the first of them is taken, a letter."""
    scorer = known_policy(ONE_TWO)
    first, second = chosen(scorer, [{"prompt": "a:", "completion": "3"}, {"prompt": "a:", "completion": "1"}])
    assert first == "a:1"
    assert second[:2] == "a:"
    assert second[2] != "1"


def test_after_the_first_wrong_token_the_scorer_goes_on_as_it_likes() -> None:
    assert chosen(known_policy(ONE_TWO), [{"prompt": "a:", "completion": "3"}], mistakes=2) == ["a:12"]


def test_a_token_that_begins_the_right_text_is_not_wrong() -> None:
    """`ab` is one token. The scorer prefers `a`, with which the right text can still be written, then `c`."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["ab"])
    scorer = Policy(llama(vocab_size=52), tokenizer)
    a, ab, c = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "ab", "c"))

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(len(hidden), scorer.space.size)
        found[:, [a, ab, c]] = torch.tensor([3.0, 2.0, 1.0])
        return found

    scorer.action_logits = logits  # type: ignore[method-assign]
    assert chosen(scorer, [{"prompt": "x", "completion": "ab"}]) == ["xc"]
    assert chosen(scorer, [{"prompt": "x", "completion": "b"}]) == ["xa"]  # control


# The model itself, row by row.


@torch.no_grad()
@pytest.mark.parametrize("mistakes", [1, 3])
def test_the_wrong_tokens_are_those_of_fresh_forward_passes(mistakes: int) -> None:
    scorer, rows = random_policy(), words(20)
    cases = read_cases(scorer, Questions(rows), rows)
    drawn = with_mistakes(scorer, cases, 3, mistakes)
    tokenizer: Any = scorer.tokenizer
    banned = {*scorer.space.special, *tokenizer.all_special_ids}
    expected = []
    for case, random in zip(cases, drawn, strict=True):
        state, right = random[:-mistakes], (case.prompt + case.reference)[len(random) - mistakes]
        for place in range(mistakes):
            logits = scorer.model(torch.tensor([state])).logits[0, -1].tolist()
            wrong = [t for t in range(len(tokenizer)) if t not in banned and (place or t != right)]
            state = (*state, max(wrong, key=logits.__getitem__))
        expected.append(state)
    assert plausible(scorer, cases, drawn, mistakes, batch_size=7) == expected
    assert expected != drawn  # control


# An evaluation.


def plausible_record(policy: Policy, tmp_path: Path, **options: Any) -> Record:
    task = Questions([{"prompt": "a:", "completion": "1"}, {"prompt": "b:", "completion": "12"}])
    return evaluate(policy, task, metrics=["recovery"], folder=tmp_path, **options)


def test_recovery_is_measured_after_both_kinds_of_mistakes_and_the_report_says_which(tmp_path: Path) -> None:
    """The policy deletes every digit but 1; the scorer finds 2 likeliest, which is wrong: it deletes it in both rows."""
    record = plausible_record(known_policy(), tmp_path, scorer=known_policy({":": "2", "1": "3"}))
    found = {measure.name: measure for measure in record.measures}
    assert list(found) == ["deletes first", "recovers", "deletes first, plausible", "recovers, plausible"]
    assert found["deletes first, plausible"].value == 1.0
    assert "|wrong tokens:drawn from the vocabulary|" in found["deletes first"].signature
    assert "|wrong tokens:likeliest by LlamaForCausalLM (" in found["recovers, plausible"].signature
    assert "|wrong tokens:the vocabulary|scorer:LlamaForCausalLM (" in record.signature
    assert [sample.is_plausible for sample in record.samples] == [False] * 4 + [True] * 2
    text = report(record)
    assert "a wrong token after the prompt, drawn from the vocabulary.\n" in text
    assert (
        "## After a plausible mistake\n\nThe same rows, with a correct prefix of the answer and a wrong token after"
        in text
    )
    assert "the likeliest by LlamaForCausalLM (" in text
    assert Record.from_json(record.to_json()) == record
    # Control: mistakes that it does not know are not deleted.
    letters = plausible_record(known_policy(), tmp_path / "2", scorer=known_policy({":": "x", "1": "x"}))
    assert {m.name: m.value for m in letters.measures}["deletes first, plausible"] == 0.0


def test_all_policies_are_given_the_same_plausible_mistakes(tmp_path: Path) -> None:
    scorer = random_policy(5)
    for name, policy in (("one", known_policy()), ("two", random_policy())):
        plausible_record(policy, tmp_path / name, scorer=scorer)
    headers = [
        json.loads((tmp_path / name / "recoveries_plausible.jsonl").read_text().splitlines()[0])
        for name in ("one", "two")
    ]
    assert headers[0]["prompts"] == headers[1]["prompts"]
    assert headers[0]["weights"] != headers[1]["weights"]


def test_without_a_scorer_nothing_plausible_is_measured_and_older_records_are_read(tmp_path: Path) -> None:
    record = plausible_record(known_policy(), tmp_path)
    assert [measure.name for measure in record.measures] == ["deletes first", "recovers"]
    assert (record.scorer, record.wrong_tokens) == (None, "the vocabulary")
    older = {k: v for k, v in json.loads(record.to_json()).items() if k not in ("scorer", "wrong_tokens")}
    older["samples"] = [{k: v for k, v in s.items() if k != "is_plausible"} for s in older["samples"]]
    assert Record.from_json(json.dumps(older)) == dataclasses.replace(record, wrong_tokens=None)


def test_the_source_of_mistakes_is_named() -> None:
    own, other = (Case({}, (1,), (2,), False, tokens) for tokens in ((3, 4), None))
    assert [source_of_mistakes(cases) for cases in ([own], [other], [own, other])] == [
        "noise_tokens",
        "the vocabulary",
        "noise_tokens or the vocabulary",
    ]


def test_a_scorer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["ab"])
    other = Policy(llama(vocab_size=52), tokenizer)
    with pytest.raises(
        ValueError, match=r"`scorer` must have the vocabulary of the policy: .* Got another; name the model"
    ):
        load_scorer(other, known_policy(ALWAYS_ONE))
    with pytest.raises(
        ValueError, match=r"`scorer` must be a folder or a model on the hub\. Got '.*none', which can't be"
    ):
        load_scorer(str(tmp_path / "none"), known_policy())
    with pytest.raises(ValueError, match="`scorer` would be ignored: recovery is not measured"):
        evaluate(known_policy(), Questions([{"prompt": "a:", "completion": "1"}]), metrics=["accuracy"], scorer=other)


def test_a_rollout_after_a_plausible_mistake_starts_where_the_random_one_does() -> None:
    policy, rows = known_policy(), words(12)
    cases = read_cases(policy, Questions(rows), rows)
    drawn = with_mistakes(policy, cases, 0, 2)
    for random, likely in zip(drawn, plausible(policy, cases, drawn, 2, 5), strict=True):
        assert (len(random), random[:-2]) == (len(likely), likely[:-2])
        assert Trajectory.demonstration(policy.space, likely, ()).final_size == len(likely) + 1
