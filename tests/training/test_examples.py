"""Rows in every known format become the same examples; streams are read in order; noise is a function of row and epoch."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sequencematch.core.mdp import ActionSpace
from sequencematch.training.collator import Collator
from sequencematch.training.examples import Example, Examples, ExampleStream, Reader, as_examples
from sequencematch.training.rollouts import prompt_of
from tests.policy.tiny_models import character_tokenizer
from tests.training.tiny_run import rows, trainer

EOS, SPACE = 2, ActionSpace(vocab_size=48, eos=2, bos=1, pad=0)
LONG = Reader(None, EOS, max_length=128)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>;{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def read(row: Any, *, template: bool = False, needs_noise: bool = False, **changes: Any) -> Example:
    tokenizer = character_tokenizer()
    if template:
        tokenizer.chat_template = TEMPLATE
    return Reader(tokenizer, EOS, **({"max_length": 64, "needs_noise": needs_noise} | changes))(row)


def ids(text: str) -> tuple[int, ...]:
    return tuple(character_tokenizer()(text)["input_ids"])


def test_all_formats_give_the_same_example() -> None:
    expected = Example(ids("ca"), ids("t."), is_text=False)
    assert read({"prompt": "ca", "completion": "t."}) == expected
    whole = list(ids("cat."))
    assert read({"input_ids": whole, "completion_mask": [0, 0, 1, 1]}) == expected
    assert read({"input_ids": [*whole, EOS], "completion_mask": [0, 0, 1, 1, 1]}) == expected  # <eos> is added anyway
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
    expected = Example(before, ids("ah."), is_text=False)
    assert read({"messages": turns}, template=True) == expected
    assert read({"prompt": turns[:3], "completion": turns[3:]}, template=True) == expected


def test_a_token_that_would_span_prompt_and_completion_is_split() -> None:
    """A tokenizer that knows 'ab' as one token: the prompt 'a' alone must stay a prompt."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE({"<eos>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    assert tokenizer("ab")["input_ids"] == [3]
    make = Reader(tokenizer, 0, max_length=8)
    assert make({"prompt": "a", "completion": "b"}) == Example((1,), (2,), is_text=False)


def test_noise_tokens_are_ids_or_tokens_of_the_vocabulary() -> None:
    pair = {"prompt": "a", "completion": "b"}
    assert read({**pair, "noise_tokens": ["0", "1", 7]}, needs_noise=True).noise_tokens == (*ids("01"), 7)
    with pytest.raises(ValueError, match=r"`noise_tokens` that are ids or tokens of the vocabulary. Got .xy."):
        read({**pair, "noise_tokens": ["xy"]}, needs_noise=True)


def test_what_is_too_long_is_cut_where_that_is_asked_for_and_ends_in_a_forced_eos() -> None:
    collate = Collator(SPACE, Reader(None, EOS, max_length=5))
    text = collate.trajectory(read({"text": "abcdefgh"}, max_length=5))
    assert (text.initial, text.chosen) == (ids("a"), ids("bcde"))
    assert text.executed == (*ids("bcd"), EOS)  # the last action is kept and not executed
    assert text.truncated
    pair = read({"prompt": "ab", "completion": "cdefgh"}, max_length=5, truncation=True)
    assert collate.trajectory(pair).executed == (*ids("cd"), EOS)
    whole = collate.trajectory(read({"text": "abcd"}, max_length=5))
    assert not whole.truncated
    with pytest.raises(ValueError, match="must fit `max_length`=5"):
        read({"text": "abcdefgh"}, max_length=5, truncation=False)


def test_eos_inside_what_is_learnt_is_refused() -> None:
    with pytest.raises(ValueError, match="must not hold <eos>"):
        read({"input_ids": [5, 6, EOS, 7]})


def test_noise_is_a_function_of_seed_epoch_and_row() -> None:
    example = Example(ids("c"), ids("at on a mat in a house by the sea"), is_text=False, index=3)
    collate = Collator(SPACE, LONG, seed=1, noise_rate=0.5)
    variants = {
        "same": (collate, example),
        "epoch": (collate, Example(**{**vars(example), "epoch": 1})),
        "row": (collate, Example(**{**vars(example), "index": 4})),
        "seed": (Collator(SPACE, LONG, seed=2, noise_rate=0.5), example),
    }
    first = collate.trajectory(example)
    torch.manual_seed(123)  # nothing global takes part
    drawn = {name: make.trajectory(row) for name, (make, row) in variants.items()}
    assert drawn.pop("same") == first
    assert all(other != first for other in drawn.values())
    assert all(t.final_state == collate.clean(example).final_state for t in drawn.values())


def test_noise_comes_from_the_examples_own_tokens() -> None:
    own = ids("01")
    example = Example(ids("c"), ids("at on a mat in a house"), is_text=False, noise_tokens=own)
    noised = Collator(SPACE, LONG, noise_rate=1.0).trajectory(example)
    wrong = {e for a, e in zip(noised.chosen, noised.executed, strict=True) if a != e}
    assert wrong == set(own)


def test_with_the_whole_sequence_scored_noise_stays_out_of_the_prompt() -> None:
    example = Example(ids("abcdef"), ids("gh"), is_text=False)
    scored = Collator(SPACE, replace(LONG, scores_prompt=True), noise_rate=1.0).trajectory(example)
    assert scored.initial == ids("a")
    assert scored.chosen[:5] == scored.executed[:5] == ids("bcdef")
    assert scored.executed.count(SPACE.bkspc) == 3


class Stream:
    """Can be iterated over again and again, and nothing else."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(rows())


def test_a_stream_is_read_in_order_and_its_prompts_go_round() -> None:
    plain = Reader(character_tokenizer(), EOS, max_length=64)
    stream = as_examples(Stream(), plain, "train_dataset")
    assert isinstance(stream, ExampleStream)
    assert [e.index for e in stream] == list(range(12))
    taken = [e.index for start in (0, 5, 10, 15) for e in stream.prompts(start, 5, seed=0)]
    assert taken == [i % 12 for i in range(20)]
    assert [e.index for e in stream.prompts(7, 4, seed=0)] == [7, 8, 9, 10]  # as after a resume


def test_prompts_of_a_dataset_depend_on_the_rollouts_number_alone() -> None:
    plain = Reader(character_tokenizer(), EOS, max_length=64)
    examples = as_examples(rows(), plain, "train_dataset")
    assert isinstance(examples, Examples)
    whole = examples.prompts(0, 400, seed=3)
    assert whole == [*examples.prompts(0, 150, seed=3), *examples.prompts(150, 250, seed=3)]
    assert {e.index for e in whole} == set(range(12))
    assert whole != examples.prompts(0, 400, seed=4)


def test_a_rollout_of_plain_text_starts_from_a_prefix_of_random_length() -> None:
    text = Example(ids("a"), ids("bcdefghij"), is_text=True)
    lengths = {len(prompt_of(text, number, 0, 4)) for number in range(200)}
    assert lengths == {1, 2, 3, 4}
    assert prompt_of(text, 5, 0, 4) == ids("abcdefghij")[: len(prompt_of(text, 5, 0, 4))]
    assert prompt_of(Example(ids("abc"), ids("d"), is_text=False), 0, 0, 1) == ids("abc")  # a question stays whole


@pytest.mark.parametrize("kind", ["list", "stream", "datasets-like", "text", "tokens"])
def test_every_kind_of_dataset_trains(kind: str, tmp_path: Path) -> None:
    class Columns:
        """Rows by number, like `datasets.Dataset`, and not a list."""

        def __len__(self) -> int:
            return len(rows())

        def __getitem__(self, index: int) -> dict[str, str]:
            return rows()[index]

    made: dict[str, Any] = {
        "list": rows(),
        "stream": Stream(),
        "datasets-like": Columns(),
        "text": [{"text": row["prompt"] + row["completion"]} for row in rows()],
        "tokens": [{"input_ids": list(ids(row["prompt"] + row["completion"]))} for row in rows()],
    }
    run = trainer(tmp_path, dataset=made[kind], max_steps=6)
    run.train()
    assert run.state.global_step == 6
    assert run.on_policy.buffer.made >= 8
    trajectories = [experience.trajectory for experience in run.on_policy.buffer.rollouts]
    assert all(len(t.initial) == 1 for t in trajectories)
    # A prefix of plain text counts as decisions that the policy did not choose.
    assert all(all(t.policy_chosen) for t in trajectories) == (kind in ("list", "stream", "datasets-like"))
    assert all(t.policy_chosen[-1] for t in trajectories)


def test_streaming_a_second_time_draws_other_noise(tmp_path: Path) -> None:
    """Twelve rows in batches of four are three steps a pass."""
    run = trainer(tmp_path, dataset=Stream(), max_steps=6, noise_rate=0.5, objective="bc")
    seen: list[Any] = []
    make = run._data

    def record(batch: dict[str, Any]) -> Any:
        seen.append((batch["examples"], make(batch)))
        return seen[-1][1]

    run._data = record  # type: ignore[method-assign]
    run.train()
    passes = [[t for _, batch in seen[start : start + 3] for t in batch] for start in (0, 3)]
    assert [e.epoch for examples, _ in seen for e in examples] == [0] * 12 + [1] * 12
    assert [t.final_state for t in passes[0]] == [t.final_state for t in passes[1]]
    assert passes[0] != passes[1]


def test_pads_are_left_out_and_labels_say_what_is_learnt() -> None:
    pair = Example((5, 6), (7,), is_text=False)
    padded = {"input_ids": [0, 5, 6, 7, EOS, 0], "attention_mask": [0, 1, 1, 1, 1, 0]}
    assert read({**padded, "labels": [-100, -100, -100, 7, EOS, -100]}) == pair
    assert read({**padded, "completion_mask": [0, 0, 0, 1, 1, 0]}) == pair
    assert read(padded) == Example((5,), (6, 7), is_text=True)
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


def test_an_id_that_the_model_does_not_have_is_named_with_its_row(tmp_path: Path) -> None:
    """48 is `<bkspc>` here, and the id of a token that was added to a tokenizer without growing the model."""
    for wrong in (48, 60):
        rows_with_it = [{"input_ids": [5, 6]}, {"input_ids": [5, wrong, 6]}]
        run = trainer(tmp_path / str(wrong), dataset=rows_with_it)
        with pytest.raises(ValueError, match=r"Row 1 of the dataset does not fit the model. `completion` must"):
            run.train()


def test_noise_that_would_cut_an_answer_is_left_out_and_a_text_is_cut() -> None:
    fits = Reader(None, EOS, max_length=8)
    answer, text = (Example(ids("a"), ids("bcdefg"), is_text=kind) for kind in (False, True))
    kept = [Collator(SPACE, fits, noise_rate=0.3).trajectory(replace(answer, index=i)) for i in range(50)]
    assert not any(t.truncated for t in kept)
    assert {t.num_nodes for t in kept} == {8}
    cut = [Collator(SPACE, fits, noise_rate=0.3).trajectory(replace(text, index=i)) for i in range(50)]
    assert any(t.truncated for t in cut)


def test_rows_with_and_without_prompts_do_not_mix() -> None:
    with pytest.raises(ValueError, match=r"must have prompts in all rows or in none. Row 1 differs"):
        as_examples(
            [{"text": "ab"}, {"prompt": "a", "completion": "b"}], Reader(character_tokenizer(), EOS, 64), "data"
        )


def test_what_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(ValueError, match="Got an iterator, which can be read only once"):
        as_examples((row for row in rows()), Reader(character_tokenizer(), EOS, 64), "data")


def test_datasets_can_be_sent_to_worker_processes() -> None:
    made = Reader(character_tokenizer(), EOS, 64)
    for data in (as_examples(rows(), made, "data"), as_examples(Stream(), made, "data")):
        data.prompts(0, 2, seed=0)
        again = pickle.loads(pickle.dumps(data))
        assert again.first == data.first


def test_a_stream_that_splits_itself_among_workers_is_not_split_again() -> None:
    class Splitting(torch.utils.data.IterableDataset[dict[str, str]]):
        """As `datasets.IterableDataset` does."""

        def __iter__(self) -> Iterator[dict[str, str]]:
            worker = torch.utils.data.get_worker_info()
            return iter(rows()[worker.id :: worker.num_workers] if worker is not None else rows())

    class Plain(Stream):
        pass

    made = Reader(character_tokenizer(), EOS, 64)
    for source in (Splitting(), Plain()):
        loader = torch.utils.data.DataLoader(ExampleStream(source, made), num_workers=2, batch_size=None)
        seen = list(loader)
        assert sorted(e.index for e in seen) == list(range(12))
        assert len({(e.prompt, e.completion) for e in seen}) == 12


def test_the_last_batches_of_a_stream_that_make_no_step_leave_no_gradient(tmp_path: Path) -> None:
    """Twelve rows in batches of four, two to a step: one is left over in every pass."""
    run = trainer(tmp_path, dataset=Stream(), max_steps=4, gradient_accumulation_steps=2, objective="mle")
    batches: list[int] = []
    step = run.training_step

    def count(*arguments: Any, **options: Any) -> Any:
        batches.append(run.state.global_step)
        return step(*arguments, **options)

    run.training_step = count  # type: ignore[method-assign]
    run.train()
    assert batches == [0, 0, 1, 1, 2, 2, 3, 3]
