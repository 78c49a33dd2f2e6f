"""A run of the playground as an animated SVG, which pages that run no script show too; page/recording.js makes the same file.

A run is what the playground saves: `{"request": …, "start": …, "actions": […], "end": …}`, the request of a completion with
`stream_actions` and the events that answered it. A path-star prompt is drawn as its graph.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sequencematch.serving.animated_svg import CSS, FRAME_S, Picture, escape, number, tenth
from sequencematch.tasks.path_star import Star

Run = Mapping[str, Any]

#: Seconds of a move in the graph.
MOVE_S = 0.3
WIDTH, MARGIN, FOOT = 800, 26, 30
#: Radius of a node, distance of an arm's first node from the centre, distance between its nodes, and their turn in radians.
RADIUS, FIRST, STEP, TURN, NODE_MARGIN = 19, 66, 58, 0.15, 34
GRAPH_WIDTH, GRAPH_HEIGHT = 370, 350
#: Size, line height and width of a letter: of words, and of the few words that stand beside a graph.
SMALL, LARGE = (18, 30, 10.8), (25, 40, 15.0)
P_HEIGHT, GAP, V_HEIGHT, WIDEST = 54, 14, 36, 58
LONGEST_PROMPT = 240
#: How a node and an edge look: not visited, on the path that stands, left again.
DISCS = {
    "new": "fill:var(--card);stroke:var(--edge)",
    "on": "fill:var(--green-wash);stroke:var(--green)",
    "left": "fill:var(--red-wash);stroke:var(--red)",
}
EDGES = {
    "new": "stroke:var(--edge);stroke-width:2;stroke-dasharray:none",
    "on": "stroke:var(--green);stroke-width:5;stroke-dasharray:none",
    "left": "stroke:var(--red);stroke-width:2.5;stroke-dasharray:3 5",
}


@dataclass
class Cell:
    """A token of the text: it stands from frame `born` until before frame `died`, on top of the cell `below`."""

    token: Mapping[str, Any]
    origin: str
    born: int
    below: "Cell | None"
    died: float = math.inf

    @property
    def text(self) -> str:
        """The token's text."""
        return str(self.token["text"])

    @property
    def name(self) -> str:
        """The token's text as a name."""
        return name_of(self.token)

    def stands(self, frame: int) -> bool:
        """Whether it is part of the text."""
        return self.born <= frame < self.died


class Place(NamedTuple):
    """A node of the graph, in the picture."""

    name: str
    x: float
    y: float


def record(run: Run) -> str:
    """The animation, which starts again when it has ended. Of a file with two runs, the first is drawn."""
    run = run["runs"][0] if "runs" in run else run
    if not run.get("start") or not run.get("actions"):
        raise ValueError("`run` must hold the events of a stream: a start, and at least one action. Got none.")
    actions, cells = run["actions"], cells_of(run)
    star = star_of(run["request"]["prompt"])
    picture = Picture(len(actions) + 1)
    left, height = MARGIN, 0.0
    if star is not None:
        height = _draw_graph(picture, star, cells)
        left += GRAPH_WIDTH + 20
    bottom = _write(picture, cells, left, None if star else run["request"]["prompt"])
    bottom = _plot(picture, actions, left, max(bottom + 22, height - 118 if star else 0))
    height = max(height, bottom) + FOOT
    for frame in range(picture.frames):
        mood, words = _note(actions, cells, star, frame)
        body = f'<text class="note {mood} {picture.during(frame)}" x="{left}" y="76">{escape(words)}</text>'
        picture.body.append(body)
    title = f'<text class="title" x="{left}" y="46">{escape(in_short(run["request"]))}</text>'
    name = f'<text class="soft" x="{WIDTH - MARGIN}" y="46" text-anchor="end">SequenceMatch</text>'
    size = f'width="{WIDTH}" height="{number(height)}"'
    card = f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{number(height - 1)}" rx="14"/>'
    style = f"<style>{CSS}{''.join(picture.rules.values())}</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {number(height)}" {size}>'
        f"{style}{card}{title}{name}{''.join(picture.body)}</svg>\n"
    )


def cells_of(run: Run) -> list[Cell]:
    """Every token that ever stood in the text, in the order of writing, which is also the order of the text."""
    cells, stack = list[Cell](), list[Cell]()

    def push(token: Mapping[str, Any], origin: str, born: int) -> None:
        cells.append(Cell(token, origin, born, stack[-1] if stack else None))
        stack.append(cells[-1])

    for origin in ("prompt", "prefix"):
        for token in run["start"].get(f"{origin}_tokens") or []:
            push(token, origin, 0)
    for frame, action in enumerate(run["actions"], start=1):
        if action["kind"] == "write":
            push(action["token"], "model", frame)
        elif action["kind"] == "delete" and stack:
            stack.pop().died = frame
    return cells


def star_of(prompt: Any) -> Star | None:
    """The graph of a path-star prompt; None for any other prompt."""
    match = re.fullmatch(r"([^/]+)/\s*(\S+)\s+(\S+)\s*=\s*", prompt) if isinstance(prompt, str) else None
    if match is None:
        return None
    after, starts = dict[str, list[str]](), dict[str, str]()
    for edge in match[1].split("|"):
        names = edge.split()
        if len(names) != 2 or names[1] in starts:
            return None
        starts[names[1]] = names[0]
        after.setdefault(names[0], []).append(names[1])
    centre, goal = match[2], match[3]
    if centre not in after or centre in starts:
        return None
    arms = []
    for first in after[centre]:
        arm = [first]
        while arm[-1] in after:
            if len(after[arm[-1]]) != 1:
                return None
            arm.append(after[arm[-1]][0])
        arms.append(tuple(arm))
    return Star(centre, goal, tuple(arms)) if sum(map(len, arms)) == len(starts) else None


def lay_out(star: Star) -> tuple[list[Place], int, int]:
    """Places of the centre and of all nodes, arm by arm, and the width and height of the graph."""
    first = max(FIRST, len(star.arms) * 2.6 * RADIUS / (2 * math.pi))
    start = -math.pi / 2 - TURN * (max(map(len, star.arms)) - 1) / 2
    points = [(star.centre, 0.0, 0.0)]
    for row, arm in enumerate(star.arms):
        for place, node in enumerate(arm):
            angle, distance = start + 2 * math.pi * row / len(star.arms) + TURN * place, first + STEP * place
            points.append((node, distance * math.cos(angle), distance * math.sin(angle)))
    left = min(x for _, x, _ in points) - NODE_MARGIN
    top = min(y for _, _, y in points) - NODE_MARGIN
    places = [Place(node, tenth(x - left), tenth(y - top)) for node, x, y in points]
    width, height = (math.ceil(max(side) + NODE_MARGIN) for side in zip(*((at.x, at.y) for at in places), strict=True))
    return places, width, height


def in_short(request: Mapping[str, Any]) -> str:
    """A request's settings in a few words."""
    words = [(request.get("model") or "model").split("/")[-1]]
    temperature, bias = request.get("temperature"), request.get("backspace_bias") or 0
    words += ["search"] if request.get("search") else []
    if temperature != 0:
        words.append(f"temperature {1 if temperature is None else temperature:g}")
    elif not request.get("search"):
        words.append("greedy")
    if bias <= -20:
        words.append("never deletes")
    elif bias:
        words.append(f"⌫ bias {'+' if bias > 0 else '−'}{abs(bias):g}")
    return " · ".join(words)


def name_of(token: Mapping[str, Any]) -> str:
    """A token's text without spaces around it; white space alone is made visible, and a token without text has its id."""
    text = str(token["text"])
    return text.strip() or text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥") or f"#{token['id']}"


def _draw_graph(picture: Picture, star: Star, cells: Sequence[Cell]) -> float:
    """Draw the graph and the walk through it; returns where it ends below."""
    places, width, height = lay_out(star)
    at = {place.name: place for place in places}
    scale = min(GRAPH_WIDTH / width, GRAPH_HEIGHT / height)
    x, y = MARGIN + (GRAPH_WIDTH - width * scale) / 2, 26.0
    walked = [cell for cell in cells if cell.origin != "prompt"]
    frames = range(picture.frames)

    def origin(cell: Cell) -> str:
        return star.centre if cell.below is None or cell.below.origin == "prompt" else cell.below.name

    def states(of: Sequence[Cell]) -> list[str]:
        def state(frame: int) -> str:
            begun = [cell for cell in of if cell.born <= frame]
            return "on" if any(cell.stands(frame) for cell in begun) else "left" if begun else "new"

        return [state(frame) for frame in frames]

    picture.body.append(f'<g transform="translate({number(x)} {number(y)}) scale({scale:.3f})">')
    pairs = [(before, node) for arm in star.arms for before, node in zip((star.centre, *arm), arm, strict=False)]
    for place, (before, node) in enumerate(pairs):
        (_, x1, y1), (_, x2, y2) = at[before], at[node]
        name = picture.changing(
            f"e{place}", states([cell for cell in walked if (origin(cell), cell.name) == (before, node)]), EDGES
        )
        ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        picture.body.append(f'<line class="edge {name}" {ends}/>')
    for cell in walked:
        if (origin(cell), cell.name) not in pairs and {origin(cell), cell.name} <= at.keys():
            picture.body.append(_jump(picture, cell, at[origin(cell)], at[cell.name]))
    _walk(picture, [at[_top(walked, at, star, frame)] for frame in frames])
    for place, (node, node_x, node_y) in enumerate(places):
        seen = ["on"] * picture.frames if place == 0 else states([cell for cell in walked if cell.name == node])
        name = picture.changing(f"n{place}", seen, DISCS)
        where = f'cx="{number(node_x)}" cy="{number(node_y)}"'
        if node == star.goal:
            picture.body.append(f'<circle class="goal" r="{RADIUS + 5}" {where}/>')
        picture.body.append(f'<circle class="disc {name}" r="{RADIUS}" {where}/>')
        label = f'<text class="name" x="{number(node_x)}" y="{number(node_y)}">{escape(node)}</text>'
        picture.body.append(label)
    picture.body.append("</g>")
    return y + height * scale


def _top(walked: Sequence[Cell], at: Mapping[str, Place], star: Star, frame: int) -> str:
    path = [cell.name for cell in walked if cell.stands(frame) and cell.name in at]
    return path[-1] if path else star.centre


def _jump(picture: Picture, cell: Cell, start: Place, end: Place) -> str:
    """A bent line between nodes that no edge joins, as long as the token stands."""
    x = (start.x + end.x) / 2 + 0.18 * (end.y - start.y)
    y = (start.y + end.y) / 2 - 0.18 * (end.x - start.x)
    curve = f"M{number(start.x)} {number(start.y)}Q{number(x)} {number(y)} {number(end.x)} {number(end.y)}"
    drawn = f'<path class="jump {picture.since(cell.born)}" d="{curve}"/>'
    return drawn if cell.died == math.inf else f'<g class="{picture.until(int(cell.died))}">{drawn}</g>'


def _walk(picture: Picture, tops: Sequence[Place]) -> None:
    """A halo around the node where the walk is; it moves at the start of a frame."""

    def to(place: Place) -> str:
        return f"{{transform:translate({number(place.x)}px,{number(place.y)}px)}}"

    stops = [f"0%{to(tops[0])}"]
    for frame in range(1, len(tops)):
        if tops[frame] != tops[frame - 1]:
            stops.append(f"{picture.share(frame)}{to(tops[frame - 1])}")
            stops.append(f"{picture.share(frame + MOVE_S / FRAME_S)}{to(tops[frame])}")
    stops.append(f"100%{to(tops[-1])}")
    name = picture.animate("w", to(tops[-1])[1:-1] + ";", "".join(stops), "ease-in-out")
    picture.body.append(f'<circle class="walker {name}" r="{RADIUS + 7}"/>')


def _write(picture: Picture, cells: Sequence[Cell], left: float, asked: Any) -> float:
    """Write all tokens, in lines; a deleted one is struck through. Returns where the lines end.

    `asked` is the prompt as it was given; tokens such as <bos> are not in it. None leaves the prompt out: a graph stands for it.
    """
    size, line, letter = LARGE if asked is None else SMALL
    x, y = float(left), 78.0 + line
    kept = [cell.text for cell in cells if cell.origin == "prompt" and cell.died == math.inf]
    prompt = "".join(text for text in kept if not isinstance(asked, str) or text.strip() in asked)
    if len(prompt) > LONGEST_PROMPT:
        prompt = "…" + prompt[len(prompt) - LONGEST_PROMPT :]
    shown = [cell for cell in cells if cell.origin != "prompt" or cell.died < math.inf]
    words = [] if asked is None else [(word, "prompt", None) for word in re.findall(r"\s*\S+|\s+", prompt)]
    picture.body.append(f'<g font-size="{size}">')
    for text, kind, cell in [*words, *((cell.text, cell.origin, cell) for cell in shown)]:
        word = text.strip()
        space = text[: len(text) - len(text.lstrip())]
        if "\n" in space:
            x, y = float(left), y + line
        elif x > left:
            x += letter * len(space)
        if not word:
            continue
        width = letter * len(word)
        if x + width > WIDTH - MARGIN and x > left:
            x, y = float(left), y + line
        picture.body.append(_word(picture, word, kind, cell, x, y, width))
        x += width
        if "\n" in text[len(text.rstrip()) :]:
            x, y = float(left), y + line
    picture.body.append("</g>")
    return y


def _word(picture: Picture, word: str, kind: str, cell: Cell | None, x: float, y: float, width: float) -> str:
    height = width / len(word) / 0.6
    where = f'x="{number(x)}" y="{number(y)}" textLength="{number(width)}" lengthAdjust="spacingAndGlyphs"'
    origin = {"prompt": " prompt", "prefix": " given"}.get(kind, "")
    if cell is None or cell.died == math.inf:
        drawn = f'<text class="word{origin}" {where}>{escape(word)}</text>'
    else:
        died = int(cell.died)
        colour = {"prompt": "var(--soft)", "prefix": "var(--blue)"}.get(kind, "var(--ink)")
        stops = f"0%{{fill:{colour}}}{picture.share(died)}{{fill:var(--red)}}"
        name = picture.animate(f"d{died}", "fill:var(--red);", stops)
        size = f'width="{number(width + 4)}" height="{number(1.5 * height)}" rx="5"'
        wash = f'<rect class="wash {picture.during(died)}" x="{number(x - 2)}" y="{number(y - 1.1 * height)}" {size}/>'
        line = f'<path class="strike {picture.since(died)}" d="M{number(x - 2)} {number(y - 0.33 * height)}h{number(width + 4)}"/>'
        drawn = f'{wash}<text class="word {name}" {where}>{escape(word)}</text>{line}'
    return drawn if cell is None or cell.born == 0 else f'<g class="{picture.since(cell.born)}">{drawn}</g>'


def _plot(picture: Picture, actions: Sequence[Mapping[str, Any]], left: float, top: float) -> float:
    """Draw p(<bkspc>) and V(s), a column for each action; returns where they end below."""
    width = min(float(WIDEST), (WIDTH - MARGIN - left) / len(actions))
    values = [float(action["value"]) for action in actions]
    low, high = min(values), max(values)
    base, end = top + 18 + P_HEIGHT, left + width * len(actions)
    picture.body.append(
        f'<text class="soft" font-size="12" x="{number(left)}" y="{number(top + 8)}">'
        f'<tspan class="bad">p(⌫)</tspan><tspan class="given" dx="12">V(s)</tspan></text>'
        f'<path class="axis" d="M{number(left)} {number(base)}H{number(end)}"/>'
    )
    before: tuple[float, float, float] | None = None
    for frame, action in enumerate(actions, start=1):
        x = left + (frame - 0.5) * width
        p = base - P_HEIGHT * action["bkspc_prob"]
        v = base + GAP + V_HEIGHT * (1 - ((action["value"] - low) / (high - low) if high > low else 0.5))
        body = list(_lines(before, (x, p, v)))
        if action["kind"] == "delete":
            zone = f'x="{number(x - width / 2)}" y="{number(base - P_HEIGHT)}" width="{number(width)}"'
            body.insert(0, f'<rect class="zone" {zone} height="{P_HEIGHT + GAP + V_HEIGHT}"/>')
        label = _label(action)
        if 7 * len(label) <= width:
            kind = "cut" if action["kind"] == "delete" else ""
            y = number(base + GAP + V_HEIGHT + 19)
            body.append(f'<text class="label {kind}" x="{number(x)}" y="{y}">{escape(label)}</text>')
        picture.body.append(f'<g class="{picture.since(frame)}">{"".join(body)}</g>')
        before = (x, p, v)
    return base + GAP + V_HEIGHT + 22


def _lines(before: tuple[float, float, float] | None, here: tuple[float, float, float]) -> Iterator[str]:
    """From the action before to this one: both curves, and a dot on each."""
    for place, name in ((1, "p"), (2, "v")):
        x, y = number(here[0]), number(here[place])
        if before is not None:
            yield f'<path class="{name}" d="M{number(before[0])} {number(before[place])}L{x} {y}"/>'
        yield f'<circle class="dot {name}" r="2.5" cx="{x}" cy="{y}"/>'


def _label(action: Mapping[str, Any]) -> str:
    """An action in a few letters."""
    if action["kind"] == "write":
        return name_of(action["token"])
    return {"delete": "⌫", "end": "end"}.get(action["kind"], "cut")


def _note(
    actions: Sequence[Mapping[str, Any]], cells: Sequence[Cell], star: Star | None, frame: int
) -> tuple[str, str]:
    """Mood and words for what has just happened."""
    if frame == 0:
        return ("soft", "looks for a path to " + star.goal) if star else ("soft", "reads the prompt")
    kind = actions[frame - 1]["kind"]
    if kind == "write":
        return "good", "writes " + next(cell.name for cell in cells if cell.born == frame)
    if kind == "delete":
        return "bad", "deletes " + next((cell.name for cell in cells if cell.died == frame), "nothing")
    path = [cell.name for cell in cells if cell.origin != "prompt" and cell.stands(frame)]
    if star is not None:
        is_there = tuple(path) in star.arms and path[-1] == star.goal
        return ("good", f"found {star.goal}") if is_there else ("bad", f"ended, but not at {star.goal}")
    return ("good", "ends") if kind == "end" else ("soft", "is cut: no room left")
