"""Trajectories for people to read, with deleted and replaced text marked."""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.data.pieces import Decode, Fate, pieces

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from sequencematch.policy.decoding.decoder import ActionEvent

#: How a terminal shows a piece.
STYLES: Mapping[Fate, str] = {
    "prompt": "dim",
    "kept": "",
    "deleted": "red strike",
    "replacement": "green",
    "end": "dim",
}


def decoder(tokenizer: Any) -> Decode:
    """A function that decodes tokens as if text came before them: many tokenizers drop a leading space."""
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    start = len(tokenizer.decode(before))
    return lambda tokens: tokenizer.decode([*before, *tokens])[start:]


def plain(trajectory: Trajectory, decode: Decode) -> str:
    """`Trajectory.render`, but with neighbouring tokens decoded together: a character may take several tokens."""
    names = dict.fromkeys(trajectory.space.ends, "<eos>") | {trajectory.space.bkspc: "<bkspc>"}
    runs = [(name, list(run)) for name, run in groupby(trajectory.executed, key=names.get)]
    return "".join(decode(run) if name is None else name * len(run) for name, run in runs)


def struck(prompt: str, trajectory: Trajectory, decode: Decode) -> "Text":
    """All text ever written, in order: the prompt dim, deleted text struck through, its replacement green."""
    from rich.text import Text

    written = pieces(trajectory, decode, prompt)
    return Text.assemble(
        *((text.replace("\n", "↵") if fate == "deleted" else text, STYLES[fate]) for text, fate in written)
    )


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

    # A rollout without <eos> was cut, and its last action is not executed: a placeholder stands for it until the row ends.
    actions = list[int]()
    with Live(drawn([space.bkspc]), console=console, auto_refresh=False) as live:
        for event in events:
            time.sleep(pause_s)
            actions.append(event.chosen)
            live.update(drawn(actions if event.executed in space.ends else [*actions, space.bkspc]), refresh=True)
