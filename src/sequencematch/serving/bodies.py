"""The bodies of requests: OpenAI's fields, and ours for deletions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sequencematch.policy.decoding.slots import ALTERNATIVES

_Tokens = Annotated[int, Field(ge=1, le=2**31)]
_Id = Annotated[int, Field(ge=0, le=2**31)]
_Nothing = Literal[None]


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, and not done


class Body(BaseModel):
    """What completions and chats have in common. A field that would be ignored is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = Field(default=None, description="A model of /v1/models. Default: the first.")
    max_tokens: _Tokens | None = Field(default=None, description="Longest answer in tokens, net of deletions.")
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = Field(
        default=None, description="Shortest answer in tokens, net of deletions."
    )
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        default=None, description="0 is greedy. Default: 1, and 0 with search."
    )
    top_p: float | None = Field(default=None, description="Choose among the likeliest actions of this probability.")
    n: Annotated[int, Field(ge=1, le=2**31)] | None = Field(default=None, description="Answers per prompt.")
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = Field(
        default=None, description="The same seed gives the same answer."
    )
    stop: str | list[str] | None = Field(default=None, description="Up to 4 strings that end an answer.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Ours.
    top_k: Annotated[int, Field(ge=1, le=2**31)] | None = None
    min_p: float | None = None
    backspace_bias: Annotated[float, Field(ge=-1e6, le=1e6)] | None = Field(
        default=None, description="Added to the logit of <bkspc>: more deletes more, -1000000 never deletes."
    )
    ban_deleted: bool | None = Field(default=None, description="Don't write a token again where it was deleted.")
    search: bool | None = Field(default=None, description="Depth-first search.")
    max_actions: _Tokens | None = Field(default=None, description="Most actions, deletions counted.")
    hold_back: Annotated[int, Field(ge=0, le=2**31)] | None = Field(
        default=None, description="A token with this many above it is final. null: none is before the end."
    )
    protect_prompt: bool | None = Field(default=None, description="Don't delete into the prompt. Default: true.")
    stream_actions: bool | None = Field(default=None, description="Stream every action, deletions included.")
    alternatives: Annotated[int, Field(ge=0, le=ALTERNATIVES)] | None = Field(
        default=None, description="Likeliest actions to list with each action of `stream_actions`."
    )
    prefix: list[_Id] | None = Field(
        default=None, description="Token ids already written behind the prompt; the model may delete them."
    )
    # Accepted as clients send them: either nothing depends on them, or only the value that changes nothing is taken.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None


class CompletionBody(Body):
    """The body of /v1/completions."""

    prompt: str | list[_Id] | list[str] | list[list[_Id]] = Field(
        description="Text or token ids, one prompt or several."
    )
    logprobs: Annotated[int, Field(ge=0, le=ALTERNATIVES)] | None = None
    echo: Literal[False] | None = None
    suffix: _Nothing = None
    best_of: Literal[1] | None = None


class Part(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Body):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=ALTERNATIVES)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: _Nothing = None
