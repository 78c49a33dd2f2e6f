"""Sequence modelling as a Markov decision process (§3.1): actions, one-step dynamics, trajectories."""

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ActionSpace:
    """The action set A = X ∪ {<bkspc>} over a vocabulary X of token ids 0 … vocab_size − 1   (§3.1).

    `<bkspc>` is the id after the last token, so it can be chosen like a token but is never an input of a model. `ends` are
    the tokens that end a sequence: `<eos>`, and for some chat models others. `bos` and `pad` matter only to noise, which never
    inserts them; a tokenizer may use one id for `bos` and `eos`.
    """

    vocab_size: int
    eos: int
    bos: int | None = None
    pad: int | None = None
    ends: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "eos", "bos", "pad"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, operator.index(getattr(self, name)))
        object.__setattr__(self, "ends", frozenset(map(operator.index, self.ends)) | {self.eos})
        if self.vocab_size < 1:
            raise ValueError(
                f"`vocab_size` must be at least 1: a vocabulary holds <eos>. Got vocab_size={self.vocab_size}."
            )
        named = [(name, getattr(self, name)) for name in ("eos", "bos", "pad")]
        for name, token in named + [("ends", token) for token in sorted(self.ends)]:
            if token is not None and not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"`{name}` must be a token id in [0, vocab_size). Got {name}={token} with vocab_size={self.vocab_size}; "
                    f"if the tokenizer knows more tokens than the model, pass the model's vocabulary size."
                )

    @property
    def bkspc(self) -> int:
        """The id of the `<bkspc>` action."""
        return self.vocab_size

    @property
    def size(self) -> int:
        """|A|, the number of actions."""
        return self.vocab_size + 1

    @property
    def special(self) -> frozenset[int]:
        """The tokens that are never noise: <eos> and other ends, <bos> and padding."""
        return self.ends | frozenset(token for token in (self.bos, self.pad) if token is not None)


@dataclass(frozen=True)
class State:
    """A partial sequence s ∈ S, and whether it is absorbing because an end token was executed   (§3.1).

    The flag is needed because a token of the initial state never absorbs, even where it has the id of `<eos>`.
    """

    tokens: tuple[int, ...]
    absorbing: bool = False


def step(space: ActionSpace, state: State, action: int, floor: int = 1) -> State:
    """The deterministic dynamics s' = P(s, a)   (§3.1).

    A token is appended; an end token such as `<eos>` is appended and absorbs; `<bkspc>` removes the last token, except that a
    state of `floor` tokens or fewer is left unchanged (the paper's footnote, where the floor is `<bos>`); an absorbing state
    keeps itself.
    """
    _check_actions("action", (operator.index(action),), space)
    _check_floor(floor)
    if state.absorbing:
        return state
    if action != space.bkspc:
        return State((*state.tokens, action), absorbing=action in space.ends)
    return state if len(state.tokens) <= floor else State(state.tokens[:-1])


@dataclass(frozen=True)
class Trajectory:
    """Decisions t = 0 … T − 1 from an initial state s₀ to an absorbing state s_T   (§3.1, §4.2).

    `chosen[t]` is the action a_t that the loss scores, `executed[t]` the one that the dynamics executed. They differ only where
    noise pushed another token, and at the last decision of a sequence that was cut: its action is kept and `<eos>` executed.
    `policy_chosen[t]` says whether the policy itself chose a_t (False for data, and for a prompt counted as decisions).
    `floor` is the stack depth below which nothing can be deleted.
    """

    space: ActionSpace
    initial: tuple[int, ...]
    chosen: tuple[int, ...]
    executed: tuple[int, ...]
    policy_chosen: tuple[bool, ...]
    floor: int = 1

    def __post_init__(self) -> None:
        for name in ("initial", "chosen", "executed"):
            object.__setattr__(self, name, tuple(map(operator.index, getattr(self, name))))
        object.__setattr__(self, "policy_chosen", tuple(map(bool, self.policy_chosen)))
        object.__setattr__(self, "floor", operator.index(self.floor))
        space, bkspc, steps = self.space, self.space.bkspc, len(self.chosen)
        _check_tokens("initial", self.initial, space)
        _check_actions("chosen", self.chosen, space)
        _check_actions("executed", self.executed, space)
        if not steps == len(self.executed) == len(self.policy_chosen):
            raise ValueError(
                f"`chosen`, `executed` and `policy_chosen` must have one entry per decision. "
                f"Got lengths {steps}, {len(self.executed)} and {len(self.policy_chosen)}."
            )
        if not space.ends.isdisjoint(self.executed[:-1]) or self.executed[-1] not in space.ends:
            raise ValueError(
                f"`executed` must end in {_names(space)} and hold it nowhere else: that is what ends a trajectory. "
                f"Got {_shorten(self.executed)}. A sequence that was cut keeps its last action in `chosen` and executes <eos>."
            )
        if bkspc in {e for a, e in zip(self.chosen, self.executed, strict=True) if a != e}:
            raise ValueError(
                "`executed` may differ from `chosen` only by a token that noise pushed, or by <eos> at the end. "
                f"Got <bkspc> executed where another action was chosen, in {_shorten(self.executed)}."
            )
        _check_floor(self.floor)

    @classmethod
    def demonstration(
        cls, space: ActionSpace, prompt: Iterable[int], completion: Iterable[int], end: int | None = None
    ) -> "Trajectory":
        """A data sequence: the prompt is s₀, each token of the completion an action, and `end` the last one; `<eos>` by default."""
        prompt, completion = tuple(map(operator.index, prompt)), tuple(map(operator.index, completion))
        _check_tokens("prompt", prompt, space)
        if completion:
            _check_tokens("completion", completion, space)
        if not space.ends.isdisjoint(completion):
            raise ValueError(f"`completion` must not hold {_names(space)}: it is added. Got {_shorten(completion)}.")
        if end is not None and end not in space.ends:
            raise ValueError(f"`end` must be {_names(space)}: it ends the trajectory. Got end={end}.")
        actions = (*completion, space.eos if end is None else operator.index(end))
        return cls._unchecked(space, prompt, actions, actions, (False,) * len(actions), 1)

    @classmethod
    def rollout(cls, space: ActionSpace, prompt: Iterable[int], actions: Iterable[int], floor: int = 1) -> "Trajectory":
        """Actions that the policy chose. If the last is no end token, the sequence was cut: `<eos>` is executed in its place."""
        prompt, actions = tuple(map(operator.index, prompt)), tuple(map(operator.index, actions))
        _check_tokens("prompt", prompt, space)
        _check_actions("actions", actions, space)
        if not space.ends.isdisjoint(actions[:-1]):
            raise ValueError(
                f"`actions` must hold {_names(space)} at the end only: nothing happens after it. Got {_shorten(actions)}."
            )
        last = actions[-1] if actions[-1] in space.ends else space.eos
        return cls(space, prompt, actions, (*actions[:-1], last), (True,) * len(actions), floor)

    @classmethod
    def _unchecked(
        cls,
        space: ActionSpace,
        initial: tuple[int, ...],
        chosen: tuple[int, ...],
        executed: tuple[int, ...],
        policy_chosen: tuple[bool, ...],
        floor: int,
    ) -> "Trajectory":
        """A trajectory that is valid by construction. Checks would take most of the time that noise takes."""
        made = object.__new__(cls)
        made.__dict__.update(
            space=space, initial=initial, chosen=chosen, executed=executed, policy_chosen=policy_chosen, floor=floor
        )
        return made

    def __len__(self) -> int:
        """T, the number of decisions."""
        return len(self.chosen)

    @property
    def truncated(self) -> bool:
        """Whether the sequence was cut: its last decision executed `<eos>` instead of the chosen action   (§4.2)."""
        return self.chosen[-1] not in self.space.ends

    @property
    def num_nodes(self) -> int:
        """How many tokens were pushed, those of s₀ and the final `<eos>` included: the transformer positions needed."""
        return len(self.initial) + len(self.executed) - self.executed.count(self.space.bkspc)

    def states(self) -> Iterator[State]:
        """s₀, …, s_T: the trajectory replayed through the dynamics."""
        state = State(self.initial)
        yield state
        for action in self.executed:
            state = step(self.space, state, action, self.floor)
            yield state

    def replay(self) -> tuple[list[int], list[int], list[int]]:
        """All nodes, those of s₀ first: their tokens, their depths in the stack, and the indices of those never deleted.

        Linear in the number of actions, whereas `states` copies the whole stack at every action.
        """
        tokens, depths, alive = list(self.initial), [*range(len(self.initial))], [*range(len(self.initial))]
        for action in self.executed:
            if action != self.space.bkspc:
                depths.append(len(alive))
                alive.append(len(tokens))
                tokens.append(action)
            elif len(alive) > self.floor:
                alive.pop()
        return tokens, depths, alive

    @property
    def final_state(self) -> State:
        """s_T, the last of `states`; its last token is the executed end token."""
        prompt, completion = self.final_parts
        return State((*prompt, *completion, self.executed[-1]), absorbing=True)

    @property
    def final_size(self) -> int:
        """How many tokens s_T has, its end token included. Needs no replay of the tokens."""
        size = len(self.initial)
        for action in self.executed:
            size += 1 if action != self.space.bkspc else -(size > self.floor)
        return size

    @property
    def final_parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of s_T without its end token, in two parts: what is left of s₀, and the completion after it."""
        tokens, _, alive = self.replay()
        final, start = tuple(tokens[node] for node in alive[:-1]), bisect_left(alive, len(self.initial))
        return final[:start], final[start:]

    def score_prompt(self) -> "Trajectory":
        """The same sequence with only its first token as s₀; the rest of the prompt becomes decisions that no policy chose."""
        prompt = self.initial[1:]
        if not self.space.ends.isdisjoint(prompt):
            raise ValueError(
                f"`score_prompt` needs a prompt without {_names(self.space)} after its first token: as a decision it "
                f"would end the trajectory. Got {_shorten(self.initial)}. Leave such a prompt in the initial state."
            )
        return replace(
            self,
            initial=self.initial[:1],
            chosen=prompt + self.chosen,
            executed=prompt + self.executed,
            policy_chosen=(False,) * len(prompt) + self.policy_chosen,
        )

    def truncate(self, max_nodes: int) -> "Trajectory":
        """Cut to at most `max_nodes` nodes: the last decision kept holds its action but executes `<eos>`   (§4.2)."""
        if max_nodes <= len(self.initial):
            raise ValueError(
                f"`max_nodes` must leave room for the prompt and <eos>: at least {len(self.initial) + 1} here. "
                f"Got max_nodes={max_nodes}. Cut the prompt first."
            )
        if self.num_nodes <= max_nodes:
            return self
        pushes = [t for t, action in enumerate(self.executed) if action != self.space.bkspc]
        last = pushes[max_nodes - len(self.initial) - 1]
        return replace(
            self,
            chosen=self.chosen[: last + 1],
            executed=(*self.executed[:last], self.space.eos),
            policy_chosen=self.policy_chosen[: last + 1],
        )

    def render(self, decode: Callable[[int], str] | None = None) -> str:
        """The executed actions for people, like `12<bkspc>3<eos>`; `decode` turns a token id into text."""
        names = dict.fromkeys(self.space.ends, "<eos>") | {self.space.bkspc: "<bkspc>"}
        if decode is None:
            return " ".join(names.get(action, str(action)) for action in self.executed)
        return "".join(names[action] if action in names else decode(action) for action in self.executed)


def _names(space: ActionSpace) -> str:
    others = "".join(f" or {token}" for token in sorted(space.ends - {space.eos}))
    return f"<eos> (id {space.eos}{others})"


def _shorten(ids: tuple[int, ...]) -> str:
    return str(ids) if len(ids) <= 12 else f"({', '.join(map(str, ids[:6]))}, … {len(ids)} in all)"


def _check_tokens(name: str, ids: tuple[int, ...], space: ActionSpace) -> None:
    if not ids:
        raise ValueError(
            f"`{name}` must hold at least one token, such as <bos>: the policy needs a state to act in. Got none."
        )
    if space.bkspc in ids:
        raise ValueError(
            f"`{name}` must hold tokens only: <bkspc> (id {space.bkspc}) is an action, never an input token. Got {_shorten(ids)}."
        )
    _check_actions(name, ids, space)


def _check_actions(name: str, ids: tuple[int, ...], space: ActionSpace) -> None:
    if not ids:
        raise ValueError(f"`{name}` must hold at least one action: a trajectory ends by executing <eos>. Got none.")
    if min(ids) < 0 or max(ids) > space.bkspc:
        wrong = next(a for a in ids if not 0 <= a <= space.bkspc)
        raise ValueError(
            f"`{name}` must lie in the action space [0, {space.bkspc}], whose last id is <bkspc>. Got {wrong}; "
            f"the space has vocab_size={space.vocab_size}."
        )


def _check_floor(floor: int) -> None:
    if floor < 1:
        raise ValueError(f"`floor` must be at least 1: a state is never empty. Got floor={floor}.")
