"""A walk through a path-star graph as an animated SVG, for pages that show pictures but run no script."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from sequencematch.experiments.star_graph import DELETED, ON_PATH, UNSEEN, styles, walk
from sequencematch.tasks.path_star import Star

#: Seconds of one action, and of the last picture.
FRAME_S, REST_S = 0.55, 2.6
STEP_X, STEP_Y, RADIUS, LEFT, TOP = 96, 58, 19, 46, 44
#: Style of a node on a terminal → its class in the picture.
CLASSES = {ON_PATH: "path", DELETED: "gone", UNSEEN: "new"}
CSS = """
svg{font:15px ui-sans-serif,system-ui,sans-serif}
.line{stroke:#b6bfca;stroke-width:2;fill:none}
.node{stroke-width:2}
.name{text-anchor:middle;dominant-baseline:central;fill:#1d2733}
.goal{fill:none;stroke:#d9a400;stroke-width:3}
.note{fill:#5b6673}
.said{font:15px ui-monospace,monospace;fill:#1d2733}
.cut{fill:#c0392b;text-decoration:line-through}
@media(prefers-color-scheme:dark){.said{fill:#e8edf2}.note{fill:#9aa5b1}.line{stroke:#4b5663}}
"""
#: (fill, outline) of a node by class.
COLOURS = {
    "path": ("#bfe8cd", "#1e8449"),
    "gone": ("#f6d5d1", "#c0392b"),
    "new": ("#7f8c9a22", "#9aa5b1"),
}


@dataclass(frozen=True)
class Frame:
    """The class of every node, and what stands below the graph, after one action."""

    nodes: dict[tuple[int, int], str]
    written: tuple[tuple[str, bool], ...]
    note: str


def frames(star: Star, actions: Sequence[str], note: Callable[[Sequence[str]], str]) -> list[Frame]:
    """One frame before the first action and one after each; `actions` are nodes, `<bkspc>`, and `<eos>` at the end."""
    found = []
    for count in range(len(actions) + 1):
        done = [action for action in actions[:count] if action != "<eos>"]
        path, deleted = walk(done)
        kinds = {place: CLASSES[style] for place, style in styles(star, path, deleted).items()}
        found.append(Frame(kinds, _written(done), note(actions[:count])))
    return found


def animated_svg(star: Star, actions: Sequence[str], note: Callable[[Sequence[str]], str]) -> str:
    """The animation, which starts again when it has ended. `note` says in words what has just happened."""
    shown = frames(star, actions, note)
    total = FRAME_S * (len(shown) - 1) + REST_S
    share = [100 * FRAME_S * n / total for n in range(len(shown))]
    length = len(star.arms[0])
    width, height = LEFT + STEP_X * length + 110, TOP + STEP_Y * len(star.arms) + 62
    middle = TOP + STEP_Y * (len(star.arms) - 1) / 2
    css, body = [CSS], []
    for row, arm in enumerate(star.arms):
        y = TOP + STEP_Y * row
        first = LEFT + STEP_X
        body.append(f'<path class="line" d="M{LEFT} {middle:g}C{LEFT + 55} {middle:g} {first - 55} {y} {first} {y}"/>')
        body.append(f'<path class="line" d="M{first} {y}H{LEFT + STEP_X * length}"/>')
        for place, node in enumerate(arm):
            x, name = LEFT + STEP_X * (place + 1), f"n{row}_{place}"
            css.append(_keyframes(name, [frame.nodes[row, place] for frame in shown], share))
            css.append(f".{name}{{animation:{name} {total:g}s step-end infinite}}")
            body.append(f'<circle r="{RADIUS + 1}" cx="{x}" cy="{y}" fill="#fff" fill-opacity=".7"/>')
            body.append(f'<circle class="node {name}" r="{RADIUS}" cx="{x}" cy="{y}"/>')
            body.append(f'<text class="name" x="{x}" y="{y}">{escape(node)}</text>')
        if arm[-1] == star.goal:
            x = LEFT + STEP_X * length
            body.append(f'<circle class="goal" r="{RADIUS + 5}" cx="{x}" cy="{y}"/>')
            body.append(f'<text class="note" x="{x + RADIUS + 13}" y="{y + 5}">goal</text>')
    body.append(f'<circle r="{RADIUS}" cx="{LEFT}" cy="{middle:g}" fill="#bfe8cd" stroke="#1e8449" stroke-width="2"/>')
    body.append(f'<text class="name" x="{LEFT}" y="{middle:g}" style="fill:#1d2733">{escape(star.centre)}</text>')
    for number, frame in enumerate(shown):
        name = f"f{number}"
        until = share[number + 1] if number + 1 < len(share) else 100
        hidden, visible = "{visibility:hidden}", "{visibility:visible}"
        before = f"0%{hidden}" if number else ""
        after = f"{until:.2f}%{hidden}" if until < 100 else ""
        css.append(f"@keyframes {name}{{{before}{share[number]:.2f}%{visible}{after}}}")
        still = "visible" if number == len(shown) - 1 else "hidden"  # without animation, the last picture
        css.append(f".{name}{{visibility:{still};animation:{name} {total:g}s step-end infinite}}")
        words = "".join(
            f"<tspan{' class=' + chr(34) + 'cut' + chr(34) if cut else ''}>{escape(word)}</tspan> "
            for word, cut in frame.written
        )
        body.append(
            f'<g class="{name}"><text class="said" x="{LEFT - RADIUS}" y="{height - 38}">{words}</text>'
            f'<text class="note" x="{LEFT - RADIUS}" y="{height - 14}">{escape(frame.note)}</text></g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{''.join(css)}</style>{''.join(body)}</svg>\n"
    )


def _keyframes(name: str, kinds: Sequence[str], share: Sequence[float]) -> str:
    """The colours of a node: at each frame in which they change."""
    stops = []
    for number, kind in enumerate(kinds):
        if number == 0 or kind != kinds[number - 1]:
            fill, stroke = COLOURS[kind]
            stops.append(f"{share[number]:.2f}%{{fill:{fill};stroke:{stroke}}}")
    return f"@keyframes {name}{{{''.join(stops)}}}"


def _written(actions: Sequence[str]) -> tuple[tuple[str, bool], ...]:
    """All words ever written, in order, and whether each was deleted."""
    words, stack = list[tuple[str, bool]](), list[int]()
    for action in actions:
        if action == "<bkspc>":
            place = stack.pop()
            words[place] = (words[place][0], True)
        else:
            stack.append(len(words))
            words.append((action, False))
    return tuple(words)
