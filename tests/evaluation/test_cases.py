"""Rows as tokens, and the final text after a question."""

from typing import Any

import pytest

from sequencematch.core.mdp import Trajectory
from sequencematch.evaluation.cases import Case, answer, read_cases
from sequencematch.evaluation.mistakes import with_mistakes
from sequencematch.policy import Policy
from tests.evaluation.known import Questions, Texts, known_policy, words
from tests.policy.tiny_models import character_tokenizer, llama


@pytest.fixture(scope="module")
def policy() -> Policy:
    """One token per character, and one for `ab`."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["ab"])
    return Policy(llama(vocab_size=52), tokenizer)  # three more than the tokenizer knows, as models have


def tokens(policy: Policy, text: str) -> list[int]:
    """`<` deletes, `.` ends, and `|` separates letters that would be one token."""
    actions = {"<": policy.space.bkspc, ".": policy.space.eos}
    encode: Any = policy.tokenizer
    found: list[int] = []
    for part in text.split("|"):
        for piece in part.replace("<", "\0<\0").replace(".", "\0.\0").split("\0"):
            found += [actions[piece]] if piece in actions else encode(piece)["input_ids"]
    return found


def rollout(policy: Policy, prompt: str, actions: str, floor: int = 1) -> tuple[Case, Trajectory]:
    case = Case({}, tuple(tokens(policy, prompt)), (), is_text=False)
    return case, Trajectory.rollout(policy.space, case.prompt, tokens(policy, actions), floor)


@pytest.mark.parametrize(
    ("prompt", "actions", "expected"),
    [
        ("c:", "12.", "12"),
        ("c:", "1<2.", "2"),
        ("c:", ".", ""),
        ("c:", "1<<.", None),
        ("c:", "<1.", None),
        ("c:", "<:1.", "1"),  # written again
        ("cab", "<a|b1.", "1"),  # in other tokens
        ("cab", "<a1.", None),
        ("c:", "12", "1"),  # cut: the last action is not executed
    ],
)
def test_the_answer_is_what_stands_behind_the_question(
    policy: Policy, prompt: str, actions: str, expected: str | None
) -> None:
    assert answer(policy, *rollout(policy, prompt, actions)) == expected


def test_a_special_token_inside_an_answer_is_part_of_it(policy: Policy) -> None:
    case, trajectory = rollout(policy, "c:", "1?2.")
    unknown = policy.tokenizer.unk_token_id  # type: ignore[union-attr]
    chosen = [unknown if action == tokens(policy, "?")[0] else action for action in trajectory.chosen]
    assert answer(policy, case, Trajectory.rollout(policy.space, case.prompt, chosen)) == "1<unk>2"


def test_texts_are_cut_behind_their_prompt_and_pairs_are_not(policy: Policy) -> None:
    (text,) = read_cases(policy, Texts(prompt_length=3, max_new_tokens=4), [{"text": "cdefghijkl"}])
    assert (text.prompt, text.reference) == (tuple(tokens(policy, "cde")), tuple(tokens(policy, "fghi")))
    (pair,) = read_cases(policy, Questions(), [{"prompt": "c", "completion": "defghijkl"}])
    assert (pair.prompt, pair.reference) == (tuple(tokens(policy, "c")), tuple(tokens(policy, "defghijkl")))
    assert (text.is_text, pair.is_text) == (True, False)


def test_mistakes_are_of_the_rows_noise_or_of_the_vocabulary_special_and_unknown_tokens_aside(policy: Policy) -> None:
    rows = [{"prompt": "c:", "completion": "1"}] * 400
    cases = read_cases(policy, Questions(), rows)
    drawn = {handed[-1] for handed in with_mistakes(policy, cases, 0, 1)}
    special = set(policy.tokenizer.all_special_ids)  # type: ignore[union-attr]
    assert drawn == set(range(49)) - special - set(
        tokens(policy, "1")
    )  # 44 of them: 400 draws miss one in a hundred times
    vowels = read_cases(policy, Questions(), [row | {"noise_tokens": ["2", "3"]} for row in rows])
    assert {handed[-1] for handed in with_mistakes(policy, vowels, 0, 1)} == {
        *tokens(policy, "2"),
        *tokens(policy, "3"),
    }


def test_a_rows_mistake_depends_on_its_number_and_the_seed_alone() -> None:
    policy = known_policy()
    cases = read_cases(policy, Questions(), words(12))
    whole = with_mistakes(policy, cases, 5, 2)
    assert with_mistakes(policy, cases[:4], 5, 2) == whole[:4]
    assert with_mistakes(policy, cases[4:], 5, 2) != whole[4:]
    assert with_mistakes(policy, cases, 6, 2) != whole
    assert all(handed[: len(case.prompt)] == case.prompt for handed, case in zip(whole, cases, strict=True))
