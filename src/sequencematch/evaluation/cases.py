"""Test cases: a row tokenised into a prompt and its reference; and the answer that a trajectory gives."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from sequencematch.core.mdp import Trajectory
from sequencematch.data.examples import Reader
from sequencematch.data.pieces import Decode, text_behind
from sequencematch.policy import Policy
from sequencematch.tasks import Row, Task

#: No limit: lengths are checked where a prompt is rolled out and where a reference is scored.
_ANY_LENGTH = 2**31


@dataclass(frozen=True)
class Case:
    """A test row and its tokens. The `reference` of a plain text is cut to the task's `max_new_tokens` and has no `<eos>`."""

    row: Row
    prompt: tuple[int, ...]
    reference: tuple[int, ...]
    is_text: bool
    noise_tokens: tuple[int, ...] | None = None
    end: int | None = None


def read_cases(policy: Policy, task: Task, rows: Iterable[Row]) -> list[Case]:
    """Test cases from rows, which are read as in training. The prompt of a plain text is its first `task.prompt_length` tokens."""
    return [_read(policy, task, number, row) for number, row in enumerate(rows)]


def _read(policy: Policy, task: Task, number: int, row: Row) -> Case:
    read = Reader(policy.tokenizer, policy.space.ends, _ANY_LENGTH, needs_noise=row.get("noise_tokens") is not None)
    try:
        example = read(row)
    except ValueError as error:
        raise ValueError(f"Row {number} of the task {task.name} {error}") from error
    if not example.is_text:
        return Case(row, example.prompt, example.completion, False, example.noise_tokens, example.end)
    if task.prompt_length is None:
        raise ValueError(
            f"The task {task.name} must have a `prompt_length`: it says where a text is cut into prompt and reference. Got None."
        )
    assert task.max_new_tokens is not None
    text = example.prompt + example.completion
    start, end = task.prompt_length, task.prompt_length + task.max_new_tokens
    if len(text) <= start:
        raise ValueError(
            f"Row {number} of the task {task.name} must be longer than `prompt_length`={start} tokens. Got {len(text)}."
        )
    return Case(row, text[:start], text[start:end], is_text=True)


def tokenizer_decode(policy: Policy) -> Decode:
    """Tokens → text, special tokens included, so that an answer that contains one is not right."""
    return cast(Decode, cast(Any, policy.tokenizer).decode)


def answer(policy: Policy, case: Case, trajectory: Trajectory) -> str | None:
    """The final text after the question, or None if the final text does not start with the question."""
    decode, tokens, asked = tokenizer_decode(policy), trajectory.final_state.tokens[:-1], len(case.prompt)
    if tokens[:asked] == case.prompt:
        return text_behind(decode, case.prompt, tokens[asked:])
    question, whole = decode(case.prompt), decode(tokens)  # the question may have been written again, in other tokens
    return whole[len(question) :] if whole.startswith(question) else None
