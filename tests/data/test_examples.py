"""Rows in every known format become the same examples; streams are read in order."""

import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from sequencematch.data.examples import Example, Examples, ExampleStream, Reader, as_examples
from tests.policy.tiny_models import character_tokenizer
from tests.training.tiny_run import rows

EOS = 2
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>;{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def read(row: Any, *, template: bool = False, needs_noise: bool = False, **changes: Any) -> Example:
    tokenizer = character_tokenizer()
    if template:
        tokenizer.chat_template = TEMPLATE
    return Reader(tokenizer, frozenset({EOS}), **({"max_length": 64, "needs_noise": needs_noise} | changes))(row)


def ids(text: str) -> tuple[int, ...]:
    return tuple(character_tokenizer()(text)["input_ids"])


def test_all_formats_give_the_same_example() -> None:
    expected = Example(ids("ca"), ids("t."), is_text=False)
    assert read({"prompt": "ca", "completion": "t."}) == expected
    whole = list(ids("cat."))
    assert read({"input_ids": whole, "completion_mask": [0, 0, 1, 1]}) == expected
    ended = read({"input_ids": [*whole, EOS], "completion_mask": [0, 0, 1, 1, 1]})
    assert ended == replace(expected, end=EOS)  # which is what is added otherwise
    text = Example(ids("c"), ids("at."), is_text=True)
    assert read({"text": "cat."}) == text == read({"input_ids": whole})


def test_the_last_turn_of_a_conversation_is_the_completion() -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "oh"},
        {"role": "user", "content": "eh"},
        {"role": "assistant", "content": "ah."},
    ]
    before = (*ids("u:hi"), EOS, *ids(";a:oh"), EOS, *ids(";u:eh"), EOS, *ids(";a:"))
    expected = Example(before, ids("ah."), is_text=False, end=EOS)
    assert read({"messages": turns}, template=True) == expected
    assert read({"prompt": turns[:3], "completion": turns[3:]}, template=True) == expected


def test_a_token_that_would_span_prompt_and_completion_is_split() -> None:
    """A tokenizer that knows 'ab' as one token: the prompt 'a' alone must stay a prompt."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE({"<eos>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    assert tokenizer("ab")["input_ids"] == [3]
    make = Reader(tokenizer, frozenset({0}), max_length=8)
    assert make({"prompt": "a", "completion": "b"}) == Example((1,), (2,), is_text=False)


def test_noise_tokens_are_ids_or_tokens_of_the_vocabulary() -> None:
    pair = {"prompt": "a", "completion": "b"}
    assert read({**pair, "noise_tokens": ["0", "1", 7]}, needs_noise=True).noise_tokens == (*ids("01"), 7)
    with pytest.raises(ValueError, match=r"`noise_tokens` that are ids or tokens of the vocabulary. Got .xy."):
        read({**pair, "noise_tokens": ["xy"]}, needs_noise=True)


def test_noise_tokens_may_be_a_list_for_each_token_of_the_completion() -> None:
    row = {"prompt": "a", "completion": "bc", "noise_tokens": [["0", 7], ["1", "0"]]}
    found = read(row, needs_noise=True)
    assert found.noise_tokens_by_step == ((*ids("0"), 7), ids("10"))
    assert found.noise_tokens == (*ids("0"), 7, *ids("1"))  # all of them, each once
    flat = read({**row, "noise_tokens": ["0", "1"]}, needs_noise=True)
    assert flat.noise_tokens_by_step == ()
    arrays = {"input_ids": [5, 6, 7, EOS], "completion_mask": [0, 1, 1, 1]}
    for lists in (
        torch.tensor([[8, 9], [9, 10]]).numpy(),
        [(8, 9), (9, 10), ()],
    ):  # one may stand for an <eos> that is written out
        assert read({**arrays, "noise_tokens": lists}, needs_noise=True).noise_tokens_by_step[:2] == ((8, 9), (9, 10))
    rule = "`noise_tokens` that are one list for the row, or a list for each of the completion's 2 tokens. Got "
    for wrong, got in (
        ([["0", "1"]], "1 lists"),
        ([["0"]] * 3, "3 lists"),
        (["0", ["1"]], "lists and tokens side by side"),
    ):
        with pytest.raises(ValueError, match=re.escape(rule + got)):
            read({**row, "noise_tokens": wrong}, needs_noise=True)
    with pytest.raises(ValueError, match=r"two `noise_tokens` or more: one of them may be right. Got 1"):
        read({**row, "noise_tokens": [["0"], ["0"]]}, needs_noise=True)
    with pytest.raises(ValueError, match=r"`noise_tokens` that are ids or tokens of the vocabulary. Got .xy."):
        read({**row, "noise_tokens": [["0"], ["xy"]]}, needs_noise=True)


def test_noise_ends_are_optional_and_read_like_noise_tokens() -> None:
    row = {"prompt": "a", "completion": "b", "noise_tokens": ["0", "1"]}
    assert read({**row, "noise_ends": ["1", 7]}, needs_noise=True).noise_ends == (*ids("1"), 7)
    assert read({**row, "noise_ends": ["1"]}).noise_ends == ()  # without that noise neither column is read
    for none in (row, {**row, "noise_ends": None}, {**row, "noise_ends": []}):
        assert read(none, needs_noise=True).noise_ends == ()
    with pytest.raises(ValueError, match=r"`noise_ends` that are ids or tokens of the vocabulary. Got .xy."):
        read({**row, "noise_ends": ["xy"]}, needs_noise=True)


def test_rows_that_rollouts_start_from_need_no_completion_and_do_not_read_it() -> None:
    expected = Example(ids("ca"), (), is_text=False)
    for row in (
        {"prompt": "ca"},
        {"prompt": "ca", "completion": "t" * 100},  # longer than the context
        {"prompt": "ca", "completion": None},
        {"input_ids": list(ids("cat.")), "completion_mask": [0, 0, 1, 1]},
    ):
        assert read(row, prompts_only=True) == expected
    assert read({"text": "cat."}, prompts_only=True) == read({"text": "cat."})  # a prefix of it is taken
    chat = [{"role": "user", "content": "hi"}]
    answered = {"messages": [*chat, {"role": "assistant", "content": "oh"}]}
    prompt = Example((*ids("u:hi"), EOS, *ids(";a:")), (), is_text=False)
    assert replace(read(answered, template=True, prompts_only=True), end=None) == prompt
    assert read({"prompt": chat}, template=True, prompts_only=True) == prompt
    assert read({"messages": chat}, template=True, prompts_only=True) == prompt
    with pytest.raises(
        ValueError, match=r"must have the columns `text`, `prompt`, `messages`, or `input_ids`. Got 'x'."
    ):
        read({"x": "ca"}, prompts_only=True)
    with pytest.raises(ValueError, match="must have the columns `text`, `prompt` and `completion`, `messages`, or"):
        read({"prompt": "ca"})


def test_eos_inside_what_is_learnt_is_refused() -> None:
    with pytest.raises(ValueError, match="must not hold an end token such as <eos>"):
        read({"input_ids": [5, 6, EOS, 7]})


class Stream:
    """Can be iterated over again and again, and nothing else."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(rows())


def test_a_stream_is_read_in_order_and_its_prompts_go_round() -> None:
    plain = Reader(character_tokenizer(), frozenset({EOS}), max_length=64)
    stream = as_examples(Stream(), plain, "train_dataset")
    assert isinstance(stream, ExampleStream)
    assert [e.index for e in stream] == list(range(12))
    taken = [e.index for start in (0, 5, 10, 15) for e in stream.prompts(start, 5, seed=0)]
    assert taken == [i % 12 for i in range(20)]
    assert [e.index for e in stream.prompts(7, 4, seed=0)] == [7, 8, 9, 10]  # as after a resume


def test_prompts_of_a_dataset_depend_on_the_rollouts_number_alone() -> None:
    plain = Reader(character_tokenizer(), frozenset({EOS}), max_length=64)
    examples = as_examples(rows(), plain, "train_dataset")
    assert isinstance(examples, Examples)
    whole = examples.prompts(0, 400, seed=3)
    assert whole == [*examples.prompts(0, 150, seed=3), *examples.prompts(150, 250, seed=3)]
    assert {e.index for e in whole} == set(range(12))
    assert whole != examples.prompts(0, 400, seed=4)


def test_pads_are_left_out_and_labels_say_what_is_learnt() -> None:
    pair = Example((5, 6), (7,), is_text=False, end=EOS)
    padded = {"input_ids": [0, 5, 6, 7, EOS, 0], "attention_mask": [0, 1, 1, 1, 1, 0]}
    assert read({**padded, "labels": [-100, -100, -100, 7, EOS, -100]}) == pair
    assert read({**padded, "completion_mask": [0, 0, 0, 1, 1, 0]}) == pair
    assert read(padded) == Example((5,), (6, 7), is_text=True, end=EOS)
    with pytest.raises(ValueError, match="0 for the prompt and 1 from there on"):
        read({"input_ids": [5, 6, 7], "completion_mask": [0, 1, 0]})


def test_numbers_of_numpy_are_ids_like_others() -> None:
    row = {"input_ids": torch.tensor([5, 6, 7]).numpy(), "noise_tokens": torch.tensor([8, 9]).numpy()}
    assert read(row, needs_noise=True) == Example((5,), (6, 7), is_text=True, noise_tokens=(8, 9))


def test_one_noise_token_is_too_few() -> None:
    with pytest.raises(ValueError, match=r"two `noise_tokens` or more: one of them may be right. Got 1"):
        read({"text": "ab", "noise_tokens": ["a", "a"]}, needs_noise=True)


def test_an_eos_in_a_prompt_is_fine_unless_prompts_are_learnt() -> None:
    row = {"input_ids": [5, EOS, 6, 7], "completion_mask": [0, 0, 0, 1]}
    assert read(row).prompt == (5, EOS, 6)
    with pytest.raises(ValueError, match="or leave its prompt out with `completion_only_loss=True`"):
        read(row, scores_prompt=True)


def test_rows_with_and_without_prompts_do_not_mix() -> None:
    with pytest.raises(ValueError, match=r"must have prompts in all rows or in none. Row 1 differs"):
        as_examples(
            [{"text": "ab"}, {"prompt": "a", "completion": "b"}],
            Reader(character_tokenizer(), frozenset({EOS}), 64),
            "data",
        )


def test_what_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(ValueError, match="Got an iterator, which can be read only once"):
        as_examples((row for row in rows()), Reader(character_tokenizer(), frozenset({EOS}), 64), "data")


def test_datasets_can_be_sent_to_worker_processes() -> None:
    made = Reader(character_tokenizer(), frozenset({EOS}), 64)
    for data in (as_examples(rows(), made, "data"), as_examples(Stream(), made, "data")):
        data.prompts(0, 2, seed=0)
        again = pickle.loads(pickle.dumps(data))
        assert next(iter(again)) == next(iter(data))


def test_a_stream_that_splits_itself_among_workers_is_not_split_again() -> None:
    class Splitting(torch.utils.data.IterableDataset[dict[str, str]]):
        """As `datasets.IterableDataset` does."""

        def __iter__(self) -> Iterator[dict[str, str]]:
            worker = torch.utils.data.get_worker_info()
            return iter(rows()[worker.id :: worker.num_workers] if worker is not None else rows())

    class Plain(Stream):
        pass

    made = Reader(character_tokenizer(), frozenset({EOS}), 64)
    for source in (Splitting(), Plain()):
        loader = torch.utils.data.DataLoader(ExampleStream(source, made), num_workers=2, batch_size=None)
        seen = list(loader)
        assert sorted(e.index for e in seen) == list(range(12))
        assert len({(e.prompt, e.completion) for e in seen}) == 12


class FewPasses:
    """Has rows in its first passes only, as an object whose `__iter__` returns one iterator."""

    def __init__(self, passes: int) -> None:
        self.passes = passes

    def __iter__(self) -> Iterator[dict[str, str]]:
        self.passes -= 1
        return iter(rows() if self.passes >= 0 else [])


def test_prompts_of_a_stream_whose_later_pass_is_empty_are_refused() -> None:
    stream = as_examples(FewPasses(3), Reader(character_tokenizer(), frozenset({EOS}), 64), "train_dataset")
    assert len(stream.prompts(0, 20, seed=0)) == 20  # two passes
    with pytest.raises(ValueError, match=r"A stream must give rows .* each time it is read\. Pass 2 gave too few\."):
        stream.prompts(20, 20, seed=0)
