"""What a server is told when it starts, and the models that it serves."""

import time
from dataclasses import dataclass, field
from functools import cached_property

from sequencematch.policy.scoring import Scorer
from sequencematch.serving.engine import Engine
from sequencematch.serving.text import Speller


@dataclass(frozen=True)
class ServerSettings:
    """Limits and defaults of all requests.

    `hold_back` is the window of ordinary requests that don't name one; `search` their search. `allowed_hosts` are the names under
    which the server may be asked, any if empty: a web page elsewhere can let its own name point to this machine.
    """

    api_key: str | None = None
    search: bool = False
    hold_back: int = 16
    max_choices: int = 16
    timeout_s: float = 300.0
    max_body_bytes: int = 2**20
    body_timeout_s: float = 30.0
    allowed_hosts: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, least in (("hold_back", 0), ("max_choices", 1), ("max_body_bytes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}. Got {getattr(self, name)}.")
        for name in ("timeout_s", "body_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0. Got {getattr(self, name)}.")
        if self.api_key == "":
            raise ValueError("`api_key` must not be empty. Leave it out to serve without a key.")


@dataclass(frozen=True)
class Served:
    """A model under its name, and the engine that decodes it."""

    name: str
    engine: Engine
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def policy(self) -> Scorer:
        """The model as a policy."""
        return self.engine.policy

    @cached_property
    def speller(self) -> Speller:
        """Its tokens as text."""
        return Speller(self.policy.tokenizer, self.policy.space)

    @cached_property
    def most_characters(self) -> int:
        """More characters than a prompt that fits the context can have."""
        tokenizer = self.policy.tokenizer
        longest = max(map(len, tokenizer.get_vocab())) if tokenizer is not None else 1
        return self.engine.context * longest
