"""Rows in the formats of TRL → examples: prompts and completions in tokens."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from sequencematch.data.columns import entries, rendered, token_ids, tokenize, turns
from sequencematch.data.rows import FileRows
from sequencematch.data.seeds import hash_seed

#: Rows checked before training starts. Fewer of a stream: training then reads it again from its start.
CHECKED_ROWS, CHECKED_OF_A_STREAM = 10_000, 100


@dataclass(frozen=True)
class Example:
    """A sequence to learn: the prompt s₀ and the completion, without its end; and the numbers of its row and epoch.

    Plain text has no prompt: `is_text` is set, and its first token is s₀. `noise_tokens` are the tokens that noise may insert,
    `noise_tokens_by_step` which of them at each token of the completion, if that is known; half of all bursts of noise end in
    one of `noise_ends`, if there are any. `end` is the token that the row ended in, None for `<eos>`.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    is_text: bool
    noise_tokens: tuple[int, ...] | None = None
    noise_tokens_by_step: tuple[tuple[int, ...], ...] = ()
    noise_ends: tuple[int, ...] = ()
    index: int = 0
    epoch: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Reader:
    """A row of any known format → its example, or a `ValueError` that says what is wrong with it.

    A row has `text`; or `prompt` and `completion`, as text or as messages; or `messages`, whose last turn is the completion;
    or `input_ids`, with a `completion_mask` that is 0 for the prompt, or `labels` that are -100 there. `noise_tokens` are
    needed with `needs_noise` and not read otherwise: ids, or tokens as the tokenizer spells them, in one list for the row or in
    a list for each token of the completion. So are `noise_ends` beside them, which are optional. `ends` are the tokens that
    end a sequence, `<eos>` and others. `truncation` is the setting of `SequenceMatchConfig`. With `prompts_only` a completion is
    not needed and not read.
    """

    tokenizer: Any
    ends: frozenset[int]
    max_length: int
    truncation: bool | None = None
    needs_noise: bool = False
    scores_prompt: bool = False
    prompts_only: bool = False

    def __call__(self, row: Any) -> Example:
        """Read one row."""
        if not isinstance(row, Mapping):
            raise ValueError(f"must be a dict. Got {type(row).__name__}.")
        formats = {**_FORMATS, **_PROMPT_FORMATS} if self.prompts_only else _FORMATS
        pair = ["prompt"] if self.prompts_only else ["prompt", "completion"]
        found = next((name for name in formats if name in row and (name != "prompt" or set(pair) <= set(row))), None)
        if found is None:
            raise ValueError(
                f"must have the columns `text`, {' and '.join(f'`{name}`' for name in pair)}, `messages`, or `input_ids`. "
                f"Got {', '.join(map(repr, row)) or 'none'}."
            )
        if found != "input_ids" and self.tokenizer is None:
            raise ValueError(f"`{found}` needs a tokenizer: pass `processing_class`, or a row of `input_ids`.")
        limit = {"limit": self._limit()} if found == "text" else {}
        example = formats[found](row, self.tokenizer, self.ends, **limit)
        if self.prompts_only and not example.is_text:
            example = replace(example, completion=())
        if example.completion and example.completion[-1] in self.ends:
            example = replace(example, completion=example.completion[:-1], end=example.completion[-1])
        scored = example.prompt[1:] + example.completion if self.scores_prompt else example.completion
        inside = next((token for token in scored if token in self.ends), None)
        if inside is not None:
            raise ValueError(
                f"must not hold an end token such as <eos> (id {inside}) inside the learnt part. Split the row there"
                f"{', or leave its prompt out with `completion_only_loss=True`' if self.scores_prompt else ''}."
            )
        room = self.max_length - len(example.prompt)
        if room < 1:
            raise ValueError(
                f"must leave room after its prompt in `max_length`={self.max_length}. Got a prompt of "
                f"{len(example.prompt)} tokens."
            )
        if len(example.completion) + 1 > room and not self.may_cut(example):
            raise ValueError(
                f"must fit `max_length`={self.max_length}. Got a prompt of {len(example.prompt)} and a completion of "
                f"{len(example.completion)} tokens and <eos>. Raise `max_length`, or cut such rows with `truncation=True`."
            )
        if not self.needs_noise:
            return example
        if row.get("noise_tokens") is None:
            raise ValueError("must have a column `noise_tokens` for `noise_source='tokens'`. Got none.")
        if isinstance(row["noise_tokens"], str):
            raise ValueError("must have a list in `noise_tokens`. Got text; CSV has no lists, JSON lines have.")
        by_step = _noise_by_step(row["noise_tokens"], example, self.tokenizer)
        noise = (
            tuple(dict.fromkeys(itertools.chain(*by_step)))
            if by_step
            else _noise_tokens("noise_tokens", row["noise_tokens"], self.tokenizer)
        )
        if len(set(noise)) < 2:
            raise ValueError(f"must have two `noise_tokens` or more: one of them may be right. Got {len(set(noise))}.")
        ends = _noise_tokens("noise_ends", () if row.get("noise_ends") is None else row["noise_ends"], self.tokenizer)
        return replace(example, noise_tokens=noise, noise_tokens_by_step=by_step, noise_ends=ends)

    def _limit(self) -> int | None:
        """The most tokens that are needed of plain text: one beyond the context shows that it is cut. Noise may need all."""
        return None if self.truncation is False or self.needs_noise else self.max_length + 1

    def may_cut(self, example: Example) -> bool:
        """Whether an example that is too long is cut rather than refused. By default only plain text is cut."""
        return example.is_text if self.truncation is None else self.truncation


class Examples(Dataset[Example]):
    """A dataset with random access, tokenised as it is read. Examples carry their row and epoch, which seed the noise."""

    def __init__(self, rows: Any, read: Reader) -> None:
        """`rows` is a `datasets.Dataset` or a plain list of dicts."""
        self.rows, self.read = rows, read
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()  # persistent worker processes see it

    def begin_epoch(self, epoch: int) -> None:
        """Set the number of this pass over the rows. Not named `set_epoch`: accelerate would call that, even for held-out data."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        """One row as an example. An error names the row by its number."""
        return _numbered(self.rows[index], self.read, index, int(self._epoch), self.rows)

    def prompts(self, start: int, count: int, seed: int) -> list[Example]:
        """The examples from which rollouts `start` to `start + count` begin, each drawn at random from all rows."""
        generators = (torch.Generator().manual_seed(hash_seed("prompt", seed, start + i)) for i in range(count))
        return [self[int(torch.randint(len(self), (), generator=generator))] for generator in generators]


class ExampleStream(IterableDataset[Example]):
    """A dataset that can only be read in order."""

    def __init__(self, rows: Any, read: Reader) -> None:
        """`rows` is a streaming `datasets.IterableDataset`, or anything that can be iterated over again."""
        self.rows, self.read = rows, read
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()
        self._prompts: tuple[int, Iterator[Example]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state for a worker process: it makes no rollouts and needs no iterator over prompts."""
        return {**vars(self), "_prompts": None}

    def begin_epoch(self, epoch: int) -> None:
        """Set the number of this pass over the rows."""
        self._epoch.fill_(epoch)
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[Example]:
        """The rows in order, shared out among worker processes unless the dataset does so itself."""
        worker = torch.utils.data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        splits_itself = isinstance(self.rows, IterableDataset)
        for place, row in enumerate(self.rows if splits_itself else itertools.islice(self.rows, number, None, workers)):
            yield _numbered(row, self.read, place * workers + number, int(self._epoch), self.rows)

    def prompts(self, start: int, count: int, seed: int) -> list[Example]:  # noqa: ARG002
        """The examples from which rollouts `start` to `start + count` begin: the rows in order, over and over."""
        if self._prompts is None or self._prompts[0] != start:
            self._prompts = (start, itertools.islice(self._endless(), start, None))
        found = list(itertools.islice(self._prompts[1], count))
        self._prompts = (start + count, self._prompts[1])
        return found

    def _endless(self) -> Iterator[Example]:
        """The rows in order, over and over."""
        for times in itertools.count():
            is_empty = True
            for index, row in enumerate(self.rows):
                is_empty = False
                yield _numbered(row, self.read, index, 0, self.rows)
            if is_empty:
                raise ValueError(empty_pass(times))


def empty_pass(number: int) -> str:
    """What is wrong with a stream whose pass of that number, from 0, has no rows, or too few for a step."""
    return (
        f"A stream must give rows for at least one step each time it is read. Pass {number} gave too few. Let its `__iter__` start "
        f"anew each time, and give as many rows as the global batch size."
    )


def as_examples(rows: Any, read: Reader, name: str) -> Examples | ExampleStream:
    """Check the first rows of a dataset and wrap it; `name` is the argument that holds it."""
    expected = f"`{name}` must be a dataset or a list of dicts"
    if isinstance(rows, str | Mapping):
        kind = "text" if isinstance(rows, str) else "one dict; for a DatasetDict pass one of its splits"
        raise ValueError(f"{expected}. Got {kind}.")
    if not hasattr(rows, "__iter__") and not hasattr(rows, "__getitem__"):
        raise ValueError(f"{expected}. Got {type(rows).__name__}.")
    if isinstance(rows, Iterator):
        raise ValueError(f"{expected}. Got an iterator, which can be read only once; make a list of it.")
    has_access = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    first = (rows[i] for i in range(min(len(rows), CHECKED_ROWS))) if has_access else rows
    kinds = set()
    for index, row in enumerate(itertools.islice(first, CHECKED_ROWS if has_access else CHECKED_OF_A_STREAM)):
        kinds.add(_numbered(row, read, index, 0, rows).is_text)
        if len(kinds) > 1:
            raise ValueError(
                f"`{name}` must have prompts in all rows or in none. Row {index} differs from those before."
            )
    if not kinds:
        raise ValueError(f"`{name}` must hold at least one row. Got none.")
    return Examples(rows, read) if has_access else ExampleStream(rows, read)


def _from_text(
    row: Mapping[str, Any],
    tokenizer: Any,
    ends: AbstractSet[int],  # noqa: ARG001
    limit: int | None = None,
) -> Example:
    tokens = tokenize(row["text"], tokenizer, "text", limit)
    return Example(tuple(tokens[:1]), tuple(tokens[1:]), is_text=True)


def _from_asked(row: Mapping[str, Any], tokenizer: Any, ends: AbstractSet[int]) -> Example:
    """A conversation up to where the model's turn begins; a last turn of the assistant is its answer, and is left out."""
    messages = turns(row["messages"], "messages", least=1)
    if messages[-1]["role"] == "assistant":
        return _from_messages(row, tokenizer, ends)
    prompt = tokenizer(chat_prompt(messages, tokenizer), add_special_tokens=False)["input_ids"]
    return Example(tuple(prompt), (), is_text=False)


def _from_prompt(row: Mapping[str, Any], tokenizer: Any, ends: AbstractSet[int]) -> Example:  # noqa: ARG001
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        turned = chat_prompt(turns(prompt, "prompt", least=1), tokenizer)
        tokens = tokenizer(turned, add_special_tokens=False)["input_ids"]
        return Example(tuple(tokens), (), is_text=False)
    return Example(tuple(_prompt_tokens(prompt, tokenizer)), (), is_text=False)


def _prompt_tokens(prompt: str, tokenizer: Any) -> list[int]:
    """A prompt's tokens, without the `<eos>` that some tokenizers add."""
    tokens = tokenize(prompt, tokenizer, "prompt")
    return tokens[:-1] if tokens[-1] == tokenizer.eos_token_id else tokens


def _from_pair(row: Mapping[str, Any], tokenizer: Any, ends: AbstractSet[int]) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(prompt, str):
        asked, answer = turns(prompt, "prompt", least=1), turns(completion, "completion", least=1)
        return _from_messages({"messages": [*asked, *answer]}, tokenizer, ends, last=len(answer))
    before = _prompt_tokens(prompt, tokenizer)
    if not isinstance(completion, str):
        raise ValueError(f"must have a `completion` of the kind of its `prompt`. Got {type(completion).__name__}.")
    whole = tokenize(prompt + completion, tokenizer, "completion")
    return Example(tuple(before), tuple(_completion(before, whole, completion, tokenizer)), is_text=False)


def _from_messages(row: Mapping[str, Any], tokenizer: Any, ends: AbstractSet[int], last: int = 1) -> Example:
    messages = turns(row["messages"], "messages", least=last + 1)
    before = chat_prompt(messages[:-last], tokenizer)
    text = rendered(messages, tokenizer, prompt=False)
    if not text.startswith(before):
        raise ValueError(
            "`messages` need a chat template that renders the prompt as a prefix of the conversation. This one doesn't."
        )
    prompt, whole = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, text))
    answer = _completion(prompt, whole, text[len(before) :], tokenizer)
    # A template may write more after the end, such as a newline.
    end = next((place + 1 for place, token in enumerate(answer) if token in ends), len(answer))
    return Example(tuple(prompt), tuple(answer[:end]), is_text=False)


def chat_prompt(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> str:
    """The text of a conversation by the tokenizer's chat template, up to where the model's turn begins."""
    return rendered(messages, tokenizer, prompt=True)


def _from_tokens(row: Mapping[str, Any], tokenizer: Any, ends: AbstractSet[int]) -> Example:  # noqa: ARG001
    ids = token_ids(row["input_ids"], "input_ids")
    columns = {name: row[name] for name in ("attention_mask", "completion_mask", "labels") if row.get(name) is not None}
    given = {name: entries(value, name) for name, value in columns.items()}
    seen = given.get("attention_mask", [1] * len(ids))
    if len(seen) != len(ids):
        raise ValueError(f"must have an `attention_mask` as long as `input_ids`. Got {len(seen)} and {len(ids)}.")
    kept = [i for i in range(len(ids)) if seen[i]]
    tokens = [ids[i] for i in kept]
    if not tokens:
        raise ValueError("must have at least one token in `input_ids`. Got none.")
    mask: list[bool] | None = None
    if "completion_mask" in given:
        mask = [bool(m) for m in given["completion_mask"]]
    elif any(label == -100 for label in given.get("labels", ())):
        mask = [bool(label != -100) for label in given["labels"]]
    if mask is None:
        return Example(tuple(tokens[:1]), tuple(tokens[1:]), is_text=True)
    mask = [mask[i] for i in kept] if len(mask) == len(ids) else []
    start = mask.index(True) if True in mask else len(mask)
    if not 0 < start < len(mask) or not all(mask[start:]):
        raise ValueError(
            "must have a `completion_mask` as long as `input_ids`, 0 for the prompt and 1 from there on, or `labels` that "
            "are -100 for the prompt."
        )
    return Example(tuple(tokens[:start]), tuple(tokens[start:]), is_text=False)


#: The column that identifies a format → how to read its rows.
_FORMATS: Mapping[str, Callable[..., Example]] = {
    "input_ids": _from_tokens,
    "messages": _from_messages,
    "prompt": _from_pair,
    "text": _from_text,
}

#: The formats of rows that may lack a completion.
_PROMPT_FORMATS = {"prompt": _from_prompt, "messages": _from_asked}


def _completion(prompt: list[int], whole: list[int], completion: str, tokenizer: Any) -> list[int]:
    """The completion's tokens; tokenised separately, as in generation, if a token spans prompt and completion."""
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    return list(tokenizer(completion, add_special_tokens=False)["input_ids"])


def _noise_tokens(column: str, tokens: Any, tokenizer: Any) -> tuple[int, ...]:
    listed, ids = entries(tokens, column), []
    if not any(isinstance(token, str) for token in listed):
        return tuple(token_ids(listed, column))
    for token in listed:
        if isinstance(token, str):
            known = tokenizer.convert_tokens_to_ids(token) if tokenizer else None
            if known is None or (known == tokenizer.unk_token_id and token != tokenizer.unk_token):
                raise ValueError(f"must have `{column}` that are ids or tokens of the vocabulary. Got {token!r}.")
            ids.append(known)
        else:
            ids += token_ids([token], column)
    return tuple(ids)


def _noise_by_step(lists: Any, example: Example, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The lists of `noise_tokens`, one for each token of the completion; none if the column is one list for the row."""
    steps = entries(lists, "noise_tokens")
    is_list = [isinstance(entry, list | tuple) or getattr(entry, "ndim", 0) > 0 for entry in steps]
    if not any(is_list):
        return ()
    length = len(example.completion)
    if not all(is_list) or len(is_list) not in (length, length + (example.end is not None)):
        got = f"{len(is_list)} lists" if all(is_list) else "lists and tokens side by side"
        raise ValueError(
            f"must have `noise_tokens` that are one list for the row, or a list for each of the completion's {length} tokens. "
            f"Got {got}."
        )
    return tuple(_noise_tokens("noise_tokens", entry, tokenizer) for entry in steps)


def _numbered(row: Any, read: Reader, index: int, epoch: int, rows: Any) -> Example:
    """The example of a row; an error names its number and, for a file's rows, file and line."""
    try:
        return replace(read(row), index=index, epoch=epoch)
    except ValueError as error:
        place = f" ({rows.place(index)})" if isinstance(rows, FileRows) else ""
        raise ValueError(f"Row {index} of the dataset{place} {error}") from error
