"""A path-star graph on a terminal, and a walk through it: where the model is, and which nodes it has left again."""

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from sequencematch.core.mdp import Trajectory
from sequencematch.policy import Policy
from sequencematch.policy.display import can_strike
from sequencematch.tasks.path_star import Star, read_star

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

#: How a node is drawn: on the path that stands now, deleted, or not visited.
ON_PATH, DELETED, UNSEEN = "bold green", "red strike", ""


def styles(star: Star, path: Sequence[str], deleted: Iterable[str]) -> dict[tuple[int, int], str]:
    """(arm, place in it) → the style of its node, after a walk that stands at `path`."""
    found = {}
    for row, arm in enumerate(star.arms):
        for place, node in enumerate(arm):
            is_on_path = place < len(path) and tuple(path[: place + 1]) == arm[: place + 1]
            found[row, place] = ON_PATH if is_on_path else DELETED if node in deleted else UNSEEN
    return found


def drawn(star: Star, path: Sequence[str], deleted: Iterable[str]) -> "Text":
    """The star with its centre on the left, an arm on each line, and the goal marked."""
    from rich.text import Text

    text, style, middle = Text(), styles(star, path, set(deleted)), len(star.arms) // 2
    width = max(len(node) for node in (star.centre, *(node for arm in star.arms for node in arm)))
    last = len(star.arms) - 1
    for row, arm in enumerate(star.arms):
        above, below = row > 0, row < last
        sides = {(False, False): "──", (False, True): "┬┌", (True, True): "┼├", (True, False): "┴└"}[above, below]
        is_middle = row == middle
        text.append(f"  {star.centre:>{width}} ─" if is_middle else " " * (width + 4), ON_PATH if is_middle else "")
        text.append(sides[0] if is_middle else sides[1], "dim")
        for place, node in enumerate(arm):
            text.append("── ", "dim")
            text.append(f"{node:>{width}}", style[row, place])
            text.append(" ")
        if arm[-1] == star.goal:
            text.append("◀ goal", "bold yellow")
        text.append("\n" if below else "")
    return text


def walk(actions: Sequence[str]) -> tuple[list[str], set[str]]:
    """The path after some actions, nodes or `<bkspc>`, and the nodes that were deleted and not written since."""
    path, deleted = list[str](), set[str]()
    for action in actions:
        if action == "<bkspc>":
            deleted.add(path.pop())
        else:
            path.append(action)
            deleted.discard(action)
    return path, deleted


def watch(console: "Console", policy: Policy, prompt: str, *, pause_s: float = 0.0, **options: Any) -> Trajectory:
    """Draw the graph of a prompt and, action by action, the policy's walk through it. Returns the walk."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    star, tokenizer, space = read_star(prompt), policy.tokenizer, policy.space
    assert tokenizer is not None
    initial, chosen, words = tokenizer(prompt)["input_ids"], list[int](), list[str]()

    def picture(note: str) -> Group:
        path, deleted = walk(words)
        return Group(drawn(star, path, deleted), Text(f"  {note}", "dim"))

    is_live = can_strike(console)
    with Live(picture(""), console=console, auto_refresh=False) if is_live else nullcontext() as live:
        for event in policy.stream(initial, **options):
            if live is not None:
                time.sleep(pause_s)
            chosen.append(event.chosen)
            if event.executed == space.bkspc:
                words.append("<bkspc>")
            elif event.executed not in space.ends:
                words.append(tokenizer.decode([event.executed]).strip())
            is_there = tuple(walk(words)[0]) in star.arms and words[-1] == star.goal
            note = "deletes" if event.executed == space.bkspc else "arrives" if is_there else "writes"
            if live is not None:
                live.update(picture(note), refresh=True)
    if not is_live:
        console.print(drawn(star, *walk(words)))
        console.print(f"  {' '.join(words)}", soft_wrap=True, markup=False)
    console.print()
    return Trajectory.rollout(space, initial, chosen, len(initial))
