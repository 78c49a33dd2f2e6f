"""Trajectories for people: what was written, what was deleted, what replaced it."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from sequencematch.core.mdp import ActionSpace, Trajectory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from sequencematch.policy.decoding.decoder import ActionEvent

#: Token ids → the text they add to a sentence.
Decode = Callable[[Sequence[int]], str]


def decoder(tokenizer: Any) -> Decode:
    """Decode tokens as they read behind others: on their own, many tokenizers drop the space they start with."""
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    start = len(tokenizer.decode(before))
    return lambda tokens: tokenizer.decode([*before, *tokens])[start:]


def plain(trajectory: Trajectory, decode: Decode) -> str:
    """`Trajectory.render`, but with neighbouring tokens decoded together: a character may take several."""
    names = {trajectory.space.bkspc: "<bkspc>", trajectory.space.eos: "<eos>"}
    runs = [(name, list(run)) for name, run in groupby(trajectory.executed, key=names.get)]
    return "".join(decode(run) if name is None else name * len(run) for name, run in runs)


def struck(prompt: str, trajectory: Trajectory, decode: Decode) -> "Text":
    """All that was ever written, in order: the prompt dim, what was deleted struck through, what replaced it green."""
    from rich.text import Text

    space, tokens = trajectory.space, list(trajectory.initial)
    styles, stack = ["dim"] * len(tokens), list(range(len(tokens)))
    deleted_from: set[int] = set()
    for action in trajectory.executed[:-1]:
        if action != space.bkspc:
            styles.append("green" if len(stack) in deleted_from else "")
            stack.append(len(tokens))
            tokens.append(action)
        elif len(stack) > trajectory.floor:
            styles[stack.pop()] = "red strike"
            deleted_from.add(len(stack))
    kept = styles[: len(trajectory.initial)].count("dim")
    text = Text().append(prompt.removesuffix(decode(trajectory.initial[kept:])), "dim")
    for style, run in groupby(range(kept, len(tokens)), key=styles.__getitem__):
        piece = decode([tokens[i] for i in run])
        text.append(piece.replace("\n", "↵") if style == "red strike" else piece, style)
    return text.append("…" if trajectory.truncated else "<eos>", "dim")


def can_strike(console: "Console") -> bool:
    """Whether deletions can be shown struck through; where not, `plain` spells them out."""
    return console.is_terminal and console.color_system is not None


def watch(
    console: "Console",
    prompt: str,
    initial: Sequence[int],
    events: Iterator["ActionEvent"],
    space: ActionSpace,
    decode: Decode,
    *,
    floor: int = 1,
    pause_s: float = 0.0,
) -> None:
    """One row on a terminal, from its initial tokens on: every action as it happens, after a pause."""
    from rich.live import Live

    def drawn(actions: Sequence[int]) -> "Text":
        return struck(prompt, Trajectory.rollout(space, tuple(initial), actions, floor), decode)

    # The last action of a row that was cut is not executed. Until it ends, a row looks as if one to come had been.
    actions = list[int]()
    with Live(drawn([space.bkspc]), console=console, auto_refresh=False) as live:
        for event in events:
            time.sleep(pause_s)
            actions.append(event.chosen)
            live.update(drawn(actions if event.executed == space.eos else [*actions, space.bkspc]), refresh=True)
