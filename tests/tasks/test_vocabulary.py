"""One token per word."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sequencematch.data.examples import Reader
from sequencematch.data.pieces import text_behind
from sequencematch.tasks import PathStar, word_tokenizer

WORDS = ["a", "b", "12", "1", "2", ".", "|", "="]
#: A prompt and a completion of those words.
PAIRS = st.tuples(*[st.lists(st.sampled_from(WORDS), min_size=1, max_size=9)] * 2)


def test_ids_follow_the_order_of_the_words() -> None:
    """0 to 3 are <pad>, <bos>, <eos> and <unk>; then a is 4, b 5, 12 6, and so on."""
    tokenizer = word_tokenizer(WORDS)
    assert tokenizer("12 a  . b")["input_ids"] == [1, 6, 4, 9, 5]
    assert tokenizer("12 a", add_special_tokens=False)["input_ids"] == [6, 4]
    assert tokenizer.decode([6, 4, 9, 5]) == "12 a . b"
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert (special, len(tokenizer)) == ((0, 1, 2, 3), 4 + len(WORDS))


@given(PAIRS)
def test_a_prompt_is_a_prefix_and_a_completion_comes_back(pair: tuple[list[str], list[str]]) -> None:
    tokenizer = word_tokenizer(WORDS)
    prompt, completion = " ".join(pair[0]), " " + " ".join(pair[1])
    before, whole = tokenizer(prompt)["input_ids"], tokenizer(prompt + completion)["input_ids"]
    assert whole[: len(before)] == before
    rest = whole[len(before) :]
    assert len(rest) == len(pair[1])
    assert tokenizer.decode(rest).split() == pair[1]
    assert text_behind(tokenizer.decode, before, rest) == completion


def test_a_word_that_is_not_listed_is_unknown_and_not_cut_into_known_ones() -> None:
    assert word_tokenizer(WORDS)("121 ab a")["input_ids"] == [1, 3, 3, 4]


def test_a_saved_tokenizer_is_loaded_as_it_was(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(WORDS)
    tokenizer.save_pretrained(tmp_path)
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path)
    text = "12 a . b = 2"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(tokenizer(text)["input_ids"][1:]) == text
    assert (loaded.pad_token, loaded.bos_token, loaded.eos_token) == ("<pad>", "<bos>", "<eos>")


def test_the_trainer_reads_the_rows_of_a_task() -> None:
    task = PathStar(train_size=20, test_size=0)
    tokenizer = word_tokenizer(task.words())
    read = Reader(tokenizer, frozenset({tokenizer.eos_token_id}), max_length=64, needs_noise=True)
    for row in task.train():
        example = read(row)
        assert tokenizer.convert_ids_to_tokens(list(example.prompt)) == ["<bos>", *row["prompt"].split()]
        assert tokenizer.convert_ids_to_tokens(list(example.completion)) == row["completion"].split()
        assert tokenizer.convert_ids_to_tokens(list(example.noise_tokens or ())) == row["noise_tokens"]
        assert len(example.completion) == task.max_new_tokens


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "`words` must hold at least one word. Got none."),
        (["a b"], "`words` must hold words without spaces, none of them empty. Got 'a b'."),
        (["a", ""], "none of them empty. Got ''."),
        (["a", "b", "a"], "`words` must hold each word once, and no special token. Got the same word twice: 'a'."),
        (["<eos>"], "Got a special token: '<eos>'."),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        word_tokenizer(words)
