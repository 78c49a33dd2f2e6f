"""What is wrong with a row is said with its number and, for a file, its line; long texts are not tokenised whole."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sequencematch.data.columns import MARGIN, tokenize
from sequencematch.data.examples import Example, Reader, as_examples
from sequencematch.data.rows import read_rows
from tests.policy.tiny_models import character_tokenizer

EOS = 2
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'banned' %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ m['role'][0] }}:{{ m['content'] }}<eos>;{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
ASK, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "oh"}
PAIR = {"prompt": "a", "completion": "b", "noise_tokens": ["0", "1"]}


def turns(column: str, least: int, got: str) -> str:
    return f"must have messages in `{column}`: a list of dicts with `role` and `content`, at least {least}. Got {got}."


#: A line of JSON → what is said of it.
MALFORMED: list[tuple[Any, str]] = [
    (5, "must be a dict. Got int."),
    ([], "must be a dict. Got list."),
    ({}, "must have the columns"),
    ({"text": None}, "must have text in `text`. Got NoneType."),
    ({"text": "\ud800"}, "must have text in `text` that can be written in UTF-8. Got 'utf-8' codec can't encode"),
    ({"prompt": None, "completion": "b"}, turns("prompt", 1, "None")),
    ({"prompt": 5, "completion": "b"}, turns("prompt", 1, "5")),
    ({"prompt": "a", "completion": None}, "must have a `completion` of the kind of its `prompt`. Got NoneType."),
    ({"prompt": "a", "completion": "\ud800"}, "must have text in `completion` that can be written in UTF-8."),
    ({"prompt": ["a"], "completion": "b"}, turns("prompt", 1, "'a'")),
    ({"prompt": ASK, "completion": [ANSWER]}, turns("prompt", 1, "{'role': 'user', 'content': 'hi'}")),
    ({"prompt": [ASK], "completion": None}, turns("completion", 1, "None")),
    ({"prompt": [ASK], "completion": []}, turns("completion", 1, "0")),
    ({"messages": None}, turns("messages", 2, "None")),
    ({"messages": 5}, turns("messages", 2, "5")),
    ({"messages": "hi"}, turns("messages", 2, "'hi'")),
    ({"messages": [ANSWER]}, turns("messages", 2, "1")),
    ({"messages": [{"role": "user"}, ANSWER]}, turns("messages", 2, "{'role': 'user'}")),
    ({"messages": [{"role": None, "content": "a"}, ANSWER]}, turns("messages", 2, "{'role': None, 'content': 'a'}")),
    ({"messages": [ASK, {"role": "assistant", "content": None}]}, "Got {'role': 'assistant', 'content': None}."),
    (
        {"messages": [{"role": "banned", "content": "a"}, ANSWER]},
        "the chat template accepts. It says: Roles must alternate.",
    ),
    ({"input_ids": None}, "must have a list in `input_ids`. Got None."),
    ({"input_ids": 5}, "must have a list in `input_ids`. Got 5."),
    ({"input_ids": "abc"}, "must have token ids in `input_ids`: whole numbers from 0 on. Got 'a'."),
    ({"input_ids": [1.5, 2]}, "must have token ids in `input_ids`: whole numbers from 0 on. Got 1.5."),
    ({"input_ids": [[5, 6]]}, "must have token ids in `input_ids`: whole numbers from 0 on. Got [5, 6]."),
    ({"input_ids": [5, None]}, "must have token ids in `input_ids`: whole numbers from 0 on. Got None."),
    ({"input_ids": [5, -3]}, "must have token ids in `input_ids`: whole numbers from 0 on. Got -3."),
    (
        {"input_ids": [5, 6], "attention_mask": [1]},
        "must have an `attention_mask` as long as `input_ids`. Got 1 and 2.",
    ),
    ({"input_ids": [5, 6], "attention_mask": 3}, "must have a list in `attention_mask`. Got 3."),
    ({"input_ids": [5, 6], "completion_mask": 3}, "must have a list in `completion_mask`. Got 3."),
    ({"input_ids": [5, 6], "labels": 5}, "must have a list in `labels`. Got 5."),
    ({**PAIR, "noise_tokens": None}, "must have a column `noise_tokens` for"),
    ({**PAIR, "noise_tokens": 5}, "must have a list in `noise_tokens`. Got 5."),
    ({**PAIR, "noise_tokens": {"0": 1}}, "must have a list in `noise_tokens`. Got {'0': 1}."),
    ({**PAIR, "noise_tokens": [1.5, 2]}, "must have token ids in `noise_tokens`: whole numbers from 0 on. Got 1.5."),
    ({**PAIR, "noise_tokens": [-1, 5]}, "must have token ids in `noise_tokens`: whole numbers from 0 on. Got -1."),
    ({**PAIR, "noise_ends": 5}, "must have a list in `noise_ends`. Got 5."),
]


def reader(**changes: Any) -> Reader:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Reader(tokenizer, frozenset({EOS}), **({"max_length": 64} | changes))


@pytest.mark.parametrize(("row", "text"), MALFORMED, ids=[str(number) for number in range(len(MALFORMED))])
def test_a_malformed_row_is_named_with_its_number_file_and_line(row: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(PAIR), "", json.dumps(row)]))
    rows = read_rows("dataset", str(path))
    noise = isinstance(row, dict) and "noise_tokens" in row
    place = f"Row 1 of the dataset ({path}, line 3) "
    with pytest.raises(ValueError, match=rf"^{re.escape(place)}.*{re.escape(text)}"):
        as_examples(rows, reader(needs_noise=noise), "dataset")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text": ', "line 2, column 10: Expecting value"),
        ('{"input_ids": [' + "9" * 5000 + "]}", "line 2: Exceeds the limit"),
        ("[" * 100_000, "line 2: maximum recursion depth exceeded"),
    ],
)
def test_a_line_that_is_not_json_is_named(line: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(PAIR) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"`dataset` must be JSON lines\. Got .*rows\.jsonl: {re.escape(text)}"):
        read_rows("dataset", str(tmp_path / "rows.jsonl"))


def test_rows_of_other_files_are_named_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([PAIR, 5]))
    rows = read_rows("dataset", str(tmp_path / "rows.json"))
    with pytest.raises(ValueError, match=r"Row 1 of the dataset \(.*rows\.json\) must be a dict\."):
        as_examples(rows, reader(), "dataset")
    with pytest.raises(ValueError, match=r"^Row 1 of the dataset must be a dict\."):
        as_examples(list(rows), reader(), "dataset")


def test_a_turn_that_calls_a_tool_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    assert reader()({"messages": [ASK, call, ASK, ANSWER]}).prompt


# Long texts.


class Counting:
    """A tokenizer that notes how much it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.given = tokenizer, 0
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, text: str) -> Any:
        self.given += len(text)
        return self.tokenizer(text)


def words_tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs of words with the space before them, as GPT-2 has them: where a text is cut inside a word, tokens differ."""
    letters = [chr(place) for place in range(97, 123)]
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("a", "n"), ("an", "d"), ("Ġ", "and"), ("in", "g")]
    vocabulary = ["<eos>", "Ġ", *letters, *dict.fromkeys(a + b for a, b in merges)]
    core = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


@pytest.mark.parametrize("make", [character_tokenizer, words_tokenizer])
def test_the_first_tokens_of_a_long_text_are_those_of_the_whole(make: Any) -> None:
    tokenizer, generator = make(), random.Random(0)
    print("seed 0")
    for _ in range(50):
        count = generator.randrange(4000)
        text = " ".join(generator.choice(["the", "and", "thing", "in", "hand", "x" * 30]) for _ in range(count))
        whole, limit = tokenize(text, tokenizer, "text") if text else [], generator.randrange(1, 200)
        if text:
            assert tokenize(text, tokenizer, "text", limit)[:limit] == whole[:limit]


def test_a_text_of_a_megabyte_is_not_tokenised_whole() -> None:
    tokenizer = Counting(character_tokenizer())
    read = Reader(tokenizer, frozenset({EOS}), max_length=100)
    found = read({"text": "ab" * 500_000})
    assert tokenizer.given <= 8 * (101 + MARGIN)
    assert len(found.prompt + found.completion) == 101  # one more than fits, so that it counts as cut
    assert found == Example(found.prompt, found.completion, is_text=True)


def test_a_text_whose_tokens_are_long_is_read_further() -> None:
    """A word of a hundred letters is one token: eight characters per token are too few."""
    core = Tokenizer(models.WordLevel({"<eos>": 0, "x" * 100: 1}, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Counting(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>"))
    text = " ".join(["x" * 100] * 10_000)
    assert tokenize(text, tokenizer, "text", 50) == [1] * 50
    assert tokenizer.given < len(text) / 10


def test_a_text_that_may_not_be_cut_is_read_whole_and_its_length_named() -> None:
    read = Reader(character_tokenizer(), frozenset({EOS}), max_length=100, truncation=False)
    with pytest.raises(
        ValueError, match=r"must fit `max_length`=100\. Got a prompt of 1 and a completion of 4999 tokens"
    ):
        read({"text": "a" * 5000})
