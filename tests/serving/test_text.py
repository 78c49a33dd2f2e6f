"""A row's text is replayed from its actions; what is handed out early is a beginning of what the row ends with."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sequencematch.data.pieces import text_behind
from sequencematch.policy import Sampling
from sequencematch.serving.jobs import Actions
from sequencematch.serving.text import Row, Speller
from tests.policy.tiny_models import DECODED
from tests.serving.rows import policy
from tests.serving.server import byte_policy

BK, EOS = DECODED["vocab_size"], DECODED["eos_token_id"]


def row_of(speller: Speller, prompt: Sequence[int], stop: Sequence[str] = (), **settings: Any) -> Row:
    return Row(speller, Sampling(**settings), speller.tokens([], prompt), [], stop)


def letters() -> Speller:
    return Speller(policy().tokenizer, policy().space)


def bytes_() -> Speller:
    return Speller(byte_policy().tokenizer, byte_policy().space)


def ids(text: str) -> list[int]:
    tokenizer: Any = policy().tokenizer
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def byte_ids(text: str) -> list[int]:
    tokenizer: Any = byte_policy().tokenizer
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def acted(*chosen: int) -> Actions:
    zeros = [0.0] * len(chosen)
    return Actions(list(chosen), zeros, zeros, zeros, [])


def handed_out(row: Row, chosen: Sequence[int]) -> list[str]:
    """The text that settles after each action."""
    found = []
    for action in chosen:
        row.take(acted(action))
        found.append(row.settle().text)
    return found


def test_a_token_settles_once_two_others_are_above_the_deepest_state() -> None:
    # c a t | delete t: nothing new is final, since the deepest state stays 3 | p s: now 2 behind "caps".
    row = row_of(letters(), ids("the "), hold_back=2)
    assert handed_out(row, [*ids("cat"), BK, *ids("ps"), EOS]) == ["", "", "c", "", "", "a", "ps"]
    assert (row.text, row.finish_reason, row.actions, row.deletions, row.new_tokens) == ("caps", "stop", 7, 1, 4)


def test_without_hold_back_all_text_settles_at_the_end() -> None:
    row = row_of(letters(), ids("the "))
    assert handed_out(row, [*ids("ca"), BK, EOS]) == ["", "", "", "c"]


def test_a_deleted_prompt_is_not_part_of_the_text() -> None:
    row = row_of(letters(), ids("the"), hold_back=2)
    assert handed_out(row, [BK, *ids("is"), EOS]) == ["", "", "", "is"]
    assert row.text == "is"
    assert "".join(token.text for token in row.stack) == "this"


@pytest.mark.parametrize(
    ("limit", "kinds"), [(2, ["write", "write", "cut"]), (9, ["write", "write", "write", "delete", "cut"])]
)
def test_a_row_is_cut_at_full_length_and_at_its_last_action(limit: int, kinds: list[str]) -> None:
    row = row_of(letters(), ids("a"), max_new_tokens=limit, max_actions=5)
    events = row.take(acted(*ids("bcd"), BK, BK))
    assert [event.kind for event in events] == kinds
    assert row.finish_reason == "length"
    assert row.text == "bc"


def test_a_character_of_several_tokens_is_handed_out_when_it_is_complete() -> None:
    row = row_of(bytes_(), byte_ids("a"), hold_back=0)
    euro = byte_ids("€")
    assert len(euro) == 3
    assert handed_out(row, [*euro, *byte_ids("b"), *euro[:2], EOS]) == ["", "", "€", "b", "", "", "\ufffd"]
    assert row.text == "€b\ufffd"


def test_deleting_the_end_of_a_character_takes_it_back() -> None:
    row = row_of(bytes_(), byte_ids("a"))
    euro = byte_ids("€")
    events = row.take(acted(*euro, BK, euro[2], EOS))
    assert [event.token.text for event in events if event.token] == ["", "", "€", "€", "€", ""]
    assert row.text == "€"


def test_a_stop_string_ends_the_row_at_once_and_is_cut_off_with_all_behind_it() -> None:
    row = row_of(letters(), ids("a"), stop=("xy", "z"), hold_back=0)
    assert handed_out(row, ids("bxyz")) == ["", "b", "", ""]  # a "b" could begin nothing, but an "x" may
    assert (row.text, row.finish_reason, row.actions) == ("b", "stop", 3)


def test_a_stop_string_that_was_begun_and_deleted_stops_nothing() -> None:
    row = row_of(letters(), ids("a"), stop=("xy",))
    row.take(acted(*ids("x"), BK, *ids("yx"), BK, *ids("c"), EOS))
    assert (row.text, row.finish_reason, row.actions) == ("yc", "stop", 7)


def test_a_stop_string_in_the_prompt_or_across_its_end_stops_nothing() -> None:
    row = row_of(letters(), ids("xyx"), stop=("xy",))
    row.take(acted(*ids("yb"), EOS))
    assert row.text == "yb"


@given(
    st.lists(st.integers(3, BK), max_size=40),
    st.integers(0, 5),
    st.sampled_from([(), ("ab",), ("é", "b ")]),
    st.booleans(),
)
def test_what_is_handed_out_early_is_the_text_in_the_end(
    wanted: list[int], hold_back: int, stop: tuple[str, ...], is_bytes: bool
) -> None:
    """Deletions that the decoder would not offer are left out."""
    speller = bytes_() if is_bytes else letters()
    prompt = byte_ids("ab é") if is_bytes else ids("ab c")
    row = row_of(speller, prompt, stop, hold_back=hold_back, max_new_tokens=64)
    parts, deepest = [], len(prompt)
    for action in [*wanted, EOS]:
        if action == BK and len(row.stack) <= max(1, deepest - hold_back):
            continue
        row.take(acted(action))
        deepest = max(deepest, len(row.stack))
        parts.append(row.settle().text)
    assert "".join(parts) == row.text
    if row._cut is None and row.stack[row._kept - 1].is_complete:
        tokens = [token.id for token in row.stack]
        assert row.text == text_behind(speller.decode, tokens[: row._kept], tokens[row._kept :])
