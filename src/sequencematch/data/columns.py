"""The columns of a row, checked: text, messages, token ids. Errors go on from "Row 3 of the dataset …"."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

#: Tokens that are read beyond those that are kept: where a text is cut can change the tokens just before the cut.
MARGIN = 64
#: Characters per token that are tried first.
_CHARACTERS = 8


def tokenize(text: Any, tokenizer: Any, column: str, limit: int | None = None) -> list[int]:
    """The tokens of a text, or at least its first `limit`: a tokenizer takes several hundred bytes per character."""
    if not isinstance(text, str):
        raise ValueError(f"must have text in `{column}`. Got {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must have text in `{column}` that can be written in UTF-8. Got {error}.") from error
    size = len(text) if limit is None else _CHARACTERS * (limit + MARGIN)
    while True:
        tokens = list(tokenizer(text[:size])["input_ids"])
        if size >= len(text):
            break
        if limit is not None and len(tokens) >= limit + MARGIN:
            return tokens[:limit]
        size *= 2
    if not tokens and tokenizer.bos_token_id is not None:
        tokens = [tokenizer.bos_token_id]
    if not tokens:
        raise ValueError(f"must have at least one token in `{column}`, or a tokenizer with <bos>. Got {text!r}.")
    return tokens


def entries(value: Any, column: str) -> Any:
    """A column that holds a list, a tuple or an array."""
    if isinstance(value, Mapping) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise ValueError(f"must have a list in `{column}`. Got {_shown(value)}.")
    return value


def token_ids(value: Any, column: str) -> list[int]:
    """A column of token ids, in a list or an array."""
    listed, found = entries(value, column), []
    if set(map(type, listed)) == {int} and min(listed) >= 0:  # nearly every row: three times as fast as the loop
        return list(listed)
    for entry in listed:
        if not hasattr(entry, "__index__") or getattr(entry, "ndim", 0) > 0 or operator.index(entry) < 0:
            raise ValueError(f"must have token ids in `{column}`: whole numbers from 0 on. Got {_shown(entry)}.")
        found.append(operator.index(entry))
    return found


def turns(value: Any, column: str, *, least: int) -> list[Mapping[str, Any]]:
    """A column of messages, at least so many. Content may be missing only from a turn that calls a tool."""
    rule = f"must have messages in `{column}`: a list of dicts with `role` and `content`, at least {least}."
    if isinstance(value, str | Mapping) or not hasattr(value, "__iter__"):
        raise ValueError(f"{rule} Got {_shown(value)}.")
    found = list(value)
    for turn in found:
        is_turn = isinstance(turn, Mapping) and {"role", "content"} <= set(turn) and isinstance(turn["role"], str)
        if not is_turn or (turn["content"] is None and not turn.get("tool_calls")):
            raise ValueError(f"{rule} Got {_shown(turn)}.")
    if len(found) < least:
        raise ValueError(f"{rule} Got {len(found)}.")
    return found


def rendered(messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, prompt: bool) -> str:
    """A conversation as the tokenizer's chat template writes it; a `prompt` ends where the model's turn begins."""
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("`messages` need a tokenizer with a chat template. Got none; set `tokenizer.chat_template`.")
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))
    except TemplateError as error:
        raise ValueError(f"must have messages that the chat template accepts. It says: {error}.") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
