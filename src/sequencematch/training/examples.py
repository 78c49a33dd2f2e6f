"""Rows of a dataset, in the formats TRL knows, as prompts and completions in tokens."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

#: How many rows are read before training starts, to find bad ones early.
CHECKED_ROWS = 10_000


@dataclass(frozen=True)
class Example:
    """A sequence to learn: s₀ and the tokens behind it, `<eos>` left out; and which row, in which epoch, it is.

    Plain text has no prompt: its first token is s₀ and `is_text` is set. `noise_tokens` are what noise may be for this row.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    is_text: bool
    noise_tokens: tuple[int, ...] | None = None
    index: int = 0
    epoch: int = 0


#: A row of a dataset → its example, or a `ValueError` that says what is wrong with it.
Read = Callable[[Any], Example]


class Examples(Dataset[Example]):
    """A dataset with random access, tokenised as it is read. Noise depends on row and epoch, so both travel along."""

    def __init__(self, rows: Any, read: Read) -> None:
        """`rows` is a `datasets.Dataset` or a plain list of dicts."""
        self.rows, self.read = rows, read
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()  # seen by worker processes that live on

    def begin_epoch(self, epoch: int) -> None:
        """Which pass over the rows this is. Not called `set_epoch`: accelerate calls that, for held-out data, too."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        """One row; a bad one is named by its number."""
        return _numbered(self.rows[index], self.read, index, int(self._epoch))

    @property
    def first(self) -> Example:
        """The first row."""
        return self[0]

    def prompts(self, start: int, count: int, seed: int) -> list[Example]:
        """The examples that rollouts `start` to `start + count` begin from, each drawn at random from all rows."""
        generators = (torch.Generator().manual_seed(hash_seed(seed, start + i)) for i in range(count))
        return [self[int(torch.randint(len(self), (), generator=generator))] for generator in generators]


class ExampleStream(IterableDataset[Example]):
    """A dataset that can only be read in order."""

    def __init__(self, rows: Any, read: Read) -> None:
        """`rows` is a streaming `datasets.IterableDataset`, or anything that can be iterated over again."""
        self.rows, self.read = rows, read
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()
        self._prompts: tuple[int, Iterator[Example]] | None = None

    def begin_epoch(self, epoch: int) -> None:
        """Which pass over the rows this is."""
        self._epoch.fill_(epoch)
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[Example]:
        """The rows in order, those of other worker processes left out."""
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for index, row in itertools.islice(enumerate(self.rows), first, None, step):
            yield _numbered(row, self.read, index, int(self._epoch))

    @property
    def first(self) -> Example:
        """The first row."""
        return next(iter(self))

    def prompts(self, start: int, count: int, seed: int) -> list[Example]:  # noqa: ARG002
        """The examples that rollouts `start` to `start + count` begin from: the rows in order, over and over."""
        if self._prompts is None or self._prompts[0] != start:
            endless = (_numbered(row, self.read, i, 0) for _ in itertools.count() for i, row in enumerate(self.rows))
            self._prompts = (start, itertools.islice(endless, start, None))
        found = list(itertools.islice(self._prompts[1], count))
        self._prompts = (start + count, self._prompts[1])
        return found


def as_examples(rows: Any, read: Read, name: str) -> Examples | ExampleStream:
    """Wrap a dataset, after reading as many rows as it takes to be confident: the first 10,000."""
    if not hasattr(rows, "__iter__") and not hasattr(rows, "__getitem__"):
        raise ValueError(f"`{name}` must be a dataset or a list of dicts. Got {type(rows).__name__}.")
    if isinstance(rows, str | Mapping):
        kind = "text" if isinstance(rows, str) else "one dict; for a DatasetDict pass one of its splits"
        raise ValueError(f"`{name}` must be a dataset or a list of dicts. Got {kind}.")
    has_access = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    examples = Examples(rows, read) if has_access else ExampleStream(rows, read)
    first = range(min(len(rows), CHECKED_ROWS)) if has_access else itertools.islice(rows, 100)
    found = 0
    for index, item in enumerate(first):
        _numbered(rows[item] if has_access else item, read, index, 0)
        found += 1
    if not found:
        raise ValueError(f"`{name}` must hold at least one row. Got none.")
    return examples


def reader(
    tokenizer: PreTrainedTokenizerBase | None,
    eos: int | None,
    *,
    max_length: int,
    truncation: bool | None,
    needs_noise: bool,
) -> Read:
    """How rows of any known format become examples.

    A row has `text`; or `prompt` and `completion`, as text or as messages; or `messages`, whose last turn is the completion;
    or `input_ids`, with a `completion_mask` that is 0 for the prompt. `noise_tokens` is optional: ids, or tokens as the
    tokenizer spells them.
    """

    def read(row: Any) -> Example:
        if not isinstance(row, Mapping):
            raise ValueError(f"must be a dict. Got {type(row).__name__}.")
        found = next((name for name in _FORMATS if name in row and (name != "prompt" or "completion" in row)), None)
        if found is None:
            raise ValueError(
                "must have the columns `text`, `prompt` and `completion`, `messages`, or `input_ids`. "
                f"Got {', '.join(map(repr, row)) or 'none'}."
            )
        if found != "input_ids" and tokenizer is None:
            raise ValueError(f"`{found}` needs a tokenizer: pass `processing_class`, or a row of `input_ids`.")
        example = _FORMATS[found](row, tokenizer)
        example = replace(example, completion=_without_final(example.completion, eos))
        if eos in example.completion:
            raise ValueError(
                f"must not hold <eos> (id {eos}) inside what is learnt: nothing comes after it. Split the row there."
            )
        room = max_length - len(example.prompt)
        if room < 1:
            raise ValueError(
                f"must leave room behind its prompt in `max_length`={max_length}. Got a prompt of {len(example.prompt)} tokens."
            )
        is_cut = len(example.completion) + 1 > room
        if is_cut and not (example.is_text if truncation is None else truncation):
            raise ValueError(
                f"must fit `max_length`={max_length}. Got a prompt of {len(example.prompt)} and a completion of "
                f"{len(example.completion)} tokens and <eos>. Raise `max_length`, or cut such rows with `truncation=True`."
            )
        if needs_noise and "noise_tokens" not in row:
            raise ValueError("must have a column `noise_tokens` for `noise_source='tokens'`. Got none.")
        return (
            replace(example, noise_tokens=_noise_tokens(row.get("noise_tokens"), tokenizer)) if needs_noise else example
        )

    return read


def _from_text(row: Mapping[str, Any], tokenizer: Any) -> Example:
    tokens = _tokenize(row["text"], tokenizer, "text")
    return Example(tuple(tokens[:1]), tuple(tokens[1:]), is_text=True)


def _from_pair(row: Mapping[str, Any], tokenizer: Any) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(prompt, str):
        return _from_messages({"messages": [*prompt, *completion]}, tokenizer, last=len(completion))
    before = _without_final(_tokenize(prompt, tokenizer, "prompt"), tokenizer.eos_token_id)
    if not isinstance(completion, str):
        raise ValueError(f"must have a `completion` of the kind of its `prompt`. Got {type(completion).__name__}.")
    whole = _tokenize(prompt + completion, tokenizer, "prompt")
    if tuple(whole[: len(before)]) != tuple(before):
        # A token would span prompt and completion, and a prompt alone could never be continued so.
        whole = [*before, *tokenizer(completion, add_special_tokens=False)["input_ids"]]
    return Example(tuple(before), tuple(whole[len(before) :]), is_text=False)


def _from_messages(row: Mapping[str, Any], tokenizer: Any, last: int = 1) -> Example:
    messages = list(row["messages"])
    if len(messages) <= last or not all(isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in messages):
        raise ValueError(
            "must have `messages`, dicts with role and content, a prompt and an answer. Got something else."
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("`messages` need a tokenizer with a chat template. Got none; set `tokenizer.chat_template`.")
    options = {"tokenize": True, "return_dict": False}
    before = tokenizer.apply_chat_template(messages[:-last], add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template(messages, **options)
    if whole[: len(before)] != before:
        raise ValueError("`messages` need a chat template whose prompt is a prefix of the whole. This one's is not.")
    answer, eos = whole[len(before) :], tokenizer.eos_token_id
    end = answer.index(eos) if eos in answer else len(answer)  # templates may write more, such as a newline
    return Example(tuple(before), tuple(answer[:end]), is_text=False)


def _from_tokens(row: Mapping[str, Any], tokenizer: Any) -> Example:  # noqa: ARG001
    tokens, mask = [int(token) for token in row["input_ids"]], row.get("completion_mask")
    if not tokens:
        raise ValueError("must have at least one token in `input_ids`. Got none.")
    if mask is None:
        return Example(tuple(tokens[:1]), tuple(tokens[1:]), is_text=True)
    mask = [bool(m) for m in mask]
    start = mask.index(True) if True in mask else len(mask)
    if len(mask) != len(tokens) or not 0 < start < len(mask) or not all(mask[start:]):
        raise ValueError("must have a `completion_mask` as long as `input_ids`, 0 for the prompt and 1 from there on.")
    return Example(tuple(tokens[:start]), tuple(tokens[start:]), is_text=False)


#: A column that says what a row is → how to read it.
_FORMATS: Mapping[str, Callable[[Mapping[str, Any], Any], Example]] = {
    "input_ids": _from_tokens,
    "messages": _from_messages,
    "prompt": _from_pair,
    "text": _from_text,
}


def _tokenize(text: Any, tokenizer: Any, column: str) -> list[int]:
    if not isinstance(text, str):
        raise ValueError(f"must have text in `{column}`. Got {type(text).__name__}.")
    tokens = list(tokenizer(text)["input_ids"])
    if not tokens and tokenizer.bos_token_id is not None:
        tokens = [tokenizer.bos_token_id]
    if not tokens:
        raise ValueError(f"must have at least one token in `{column}`, or a tokenizer with <bos>. Got {text!r}.")
    return tokens


def _without_final(tokens: Sequence[int], eos: int | None) -> tuple[int, ...]:
    return tuple(tokens[:-1]) if tokens and tokens[-1] == eos else tuple(tokens)


def _noise_tokens(tokens: Any, tokenizer: Any) -> tuple[int, ...]:
    ids = []
    for token in tokens:
        known = token if isinstance(token, int) else tokenizer.convert_tokens_to_ids(token) if tokenizer else None
        is_unknown = (
            isinstance(token, str) and tokenizer and known == tokenizer.unk_token_id and token != tokenizer.unk_token
        )
        if known is None or is_unknown:
            raise ValueError(f"must have `noise_tokens` that are ids or tokens of the vocabulary. Got {token!r}.")
        ids.append(int(known))
    return tuple(ids)


def _numbered(row: Any, read: Read, index: int, epoch: int) -> Example:
    try:
        return replace(read(row), index=index, epoch=epoch)
    except ValueError as error:
        raise ValueError(f"Row {index} of the dataset {error}") from error


def hash_seed(*numbers: int) -> int:
    """One 63-bit seed from several numbers: neighbouring ones give unrelated streams."""
    mixed = 0x243F6A8885A308D3
    for number in numbers:
        mixed = (mixed ^ (number % 2**64)) * 0x9E3779B97F4A7C15 % 2**64
        mixed ^= mixed >> 29
        mixed = mixed * 0xBF58476D1CE4E5B9 % 2**64
        mixed ^= mixed >> 32
    return mixed >> 1
