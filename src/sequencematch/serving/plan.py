"""A request's body → rows to decode: prompts as tokens, settings as a `Sampling`, all checked."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sequencematch.policy.generation import prompt_tokens
from sequencematch.policy.sampling import Sampling
from sequencematch.serving.bodies import Body, ChatBody, CompletionBody
from sequencematch.serving.settings import Served, ServerSettings
from sequencematch.serving.text import Token

#: OpenAI's default of `max_tokens` for completions.
COMPLETION_TOKENS = 16
#: OpenAI's limit of stop strings, and ours of their length.
MAX_STOPS, MAX_STOP_LENGTH = 4, 256


@dataclass(frozen=True)
class Plan:
    """The rows of a request: `choices` for each of `prompts`, all with one `sampling`."""

    served: Served
    prompts: list[list[Token]]
    prefix: list[Token]
    sampling: Sampling
    choices: int
    stop: tuple[str, ...]
    timeout_s: float
    is_chat: bool
    is_stream: bool
    is_actions: bool
    wants_log_probs: bool
    alternatives: int
    include_usage: bool


def plan(body: Body, served: Served, settings: ServerSettings) -> Plan:
    """Check a body and tokenize its prompts. A `ValueError` names the field that is wrong."""
    given, choices = _prompts(body, served), body.n or 1
    if choices * len(given) > settings.max_choices:
        raise ValueError(
            f"`n` must be at most {settings.max_choices} for all prompts together. Got {choices} for {len(given)}."
        )
    prompts = [_tokens(served, prompt) for prompt in given]
    tokens = [served.speller.tokens([], prompt) for prompt in prompts]
    prefix = served.speller.tokens(tokens[0], body.prefix) if body.prefix else []
    is_actions = bool(body.stream_actions)
    wants_log_probs, alternatives = _log_probs(body)
    if is_actions and (len(prompts) > 1 or wants_log_probs):
        raise ValueError("`stream_actions` must be asked for one prompt and without `logprobs`. Got more.")
    if body.alternatives and not is_actions:
        raise ValueError("`alternatives` would be ignored without `stream_actions`. Leave it out.")
    if body.stream_options is not None and not (body.stream or is_actions):
        raise ValueError("`stream_options` would be ignored without `stream`. Leave it out.")
    return Plan(
        served=served,
        prompts=tokens,
        prefix=prefix,
        sampling=_sampling(body, served, settings, max(map(len, prompts))),
        choices=choices,
        stop=_stops(body),
        timeout_s=settings.timeout_s,
        is_chat=isinstance(body, ChatBody),
        is_stream=bool(body.stream) or is_actions,
        is_actions=is_actions,
        wants_log_probs=wants_log_probs,
        alternatives=alternatives,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
    )


def _prompts(body: Body, served: Served) -> list[Any]:
    if isinstance(body, ChatBody):
        tokenizer = served.policy.tokenizer
        if getattr(tokenizer, "chat_template", None) is not None:
            return [[{"role": message.role, "content": message.text} for message in body.messages]]
        if len(body.messages) > 1 or body.messages[0].role != "user":
            raise ValueError(
                f"`messages` must be one message of a user: {served.name} has no chat template. "
                f"Got {', '.join(message.role for message in body.messages)[:100]}."
            )
        return [body.messages[0].text]
    assert isinstance(body, CompletionBody)
    prompt = body.prompt
    is_one = isinstance(prompt, str) or all(isinstance(token, int) for token in prompt)
    return [prompt] if is_one else list(prompt)


def _tokens(served: Served, prompt: Any) -> list[int]:
    from jinja2 import TemplateError

    texts = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if isinstance(m, dict)]
    characters = sum(map(len, texts))
    if characters > served.most_characters:  # tokenizing them would take seconds
        raise ValueError(
            f"`prompt` must fit the context of {served.engine.context} tokens. Got {characters} characters, more than so many "
            f"tokens can have. Shorten it."
        )
    if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
        raise ValueError("`prompt` must be text that can be encoded as UTF-8. Got half of a surrogate pair.")
    try:
        return prompt_tokens(served.policy, prompt, Sampling(max_new_tokens=1))
    except TemplateError as error:
        raise ValueError(f"`messages` must suit the model's chat template. It says: {error}.") from error


def _log_probs(body: Body) -> tuple[bool, int]:
    """Whether log-probabilities are wanted, and how many alternatives with them or with actions."""
    if isinstance(body, CompletionBody) and body.logprobs is not None:
        return True, body.logprobs
    if isinstance(body, ChatBody):
        if body.top_logprobs and not body.logprobs:
            raise ValueError("`top_logprobs` would be ignored without `logprobs`. Leave it out.")
        if body.logprobs:
            return True, body.top_logprobs or 0
    return False, body.alternatives or 0


def _stops(body: Body) -> tuple[str, ...]:
    stops: Sequence[str] = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_LENGTH for text in stops):
        raise ValueError(
            f"`stop` must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters. Got {len(stops)} strings."
        )
    return tuple(stops)


def _sampling(body: Body, served: Served, settings: ServerSettings, prompt: int) -> Sampling:
    search = settings.search if body.search is None else body.search
    if search and body.protect_prompt is False:
        raise ValueError("`protect_prompt` must not be false with `search`, which never deletes the prompt.")
    hold_back = body.hold_back
    if "hold_back" not in body.model_fields_set and not search and not body.stream_actions:
        hold_back = settings.hold_back
    options: dict[str, Any] = {
        "max_new_tokens": _max_tokens(body, served, prompt),
        "min_new_tokens": body.min_tokens or 0,
        "max_actions": body.max_actions,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": None if body.top_p == 1 else body.top_p,
        "min_p": None if body.min_p == 0 and not search else body.min_p,
        "seed": secrets.randbits(31) if body.seed is None else body.seed,
        "protect_prompt": body.protect_prompt is not False,
        "hold_back": hold_back,
        "ban_deleted": bool(body.ban_deleted),
        "backspace_bias": body.backspace_bias or 0.0,
        "search": search,
    }
    if body.temperature == 0 or (body.temperature is None and search):
        # Clients send these with temperature 0 as well; `Sampling` refuses what it would ignore.
        ignored = ("seed", "top_k", "top_p", *(() if search else ("min_p",)))
        options |= dict.fromkeys(ignored)
    return Sampling(**options)


def _max_tokens(body: Body, served: Served, prompt: int) -> int:
    given = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        if given is not None:
            raise ValueError("`max_tokens` and `max_completion_tokens` exclude each other. Got both; leave one out.")
        given = body.max_completion_tokens
    if given is not None:
        return given
    room = served.engine.context - prompt
    if room < 1:
        raise ValueError(
            f"`prompt` must leave room for an answer in the context of {served.engine.context} tokens. Got {prompt} tokens."
        )
    return room if isinstance(body, ChatBody) else min(room, max(COMPLETION_TOKENS, len(body.prefix or ())))
