"""Draw docs/images/alive.svg: the actions of one trajectory, the life of every node, and which node attends to which.

python -m benchmarks.alive_intervals docs/images/alive.svg
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from sequencematch.core import ActionSpace, Encoding, Trajectory, encode

#: Token ids are places in this list.
WORDS = ("<eos>", "<bos>", "I", "lick", "dags", "like", "dogs")
SPACE = ActionSpace(vocab_size=len(WORDS), eos=0, bos=1)
ACTIONS = ("I", "lick", "dags", "<bkspc>", "<bkspc>", "like", "dogs", "<eos>")
ROW, LEFT, TOP, UNIT, CELL, GAP = 34, 76, 86, 44, 30, 110
CSS = """
svg{font:14px ui-sans-serif,system-ui,sans-serif}
text{fill:#1d2733}
.word{font:15px ui-monospace,monospace;text-anchor:end}
.top{text-anchor:middle;font:13px ui-monospace,monospace}
.note{fill:#5b6673}
.life{fill:#bfe8cd;stroke:#1e8449;stroke-width:1.5}
.dead{fill:#f6d5d1;stroke:#c0392b;stroke-width:1.5}
.axis{stroke:#b6bfca;stroke-width:1}
.sees{fill:#1e8449}
.blind{fill:#7f8c9a22}
.gone{fill:#c0392b44}
@media(prefers-color-scheme:dark){text{fill:#e8edf2}.note{fill:#9aa5b1}.inside{fill:#1d2733}}
"""


def trajectory() -> Trajectory:
    """The trajectory of the picture: two words are deleted and replaced."""
    ids = [SPACE.bkspc if action == "<bkspc>" else WORDS.index(action) for action in ACTIONS]
    return Trajectory.rollout(SPACE, [SPACE.bos or 1], ids)


def svg(encoding: Encoding) -> str:
    """Left, a bar from the push of each node to the push before which it was deleted; right, the attention mask."""
    tokens = [WORDS[token] for token in encoding.tokens[0].tolist()]
    ends, depths = encoding.deleted_at[0].tolist(), encoding.position_ids[0].tolist()
    attend, count = encoding.attend()[0].tolist(), len(tokens)
    right = LEFT + UNIT * count + GAP
    width, height = right + CELL * count + 70, TOP + ROW * count + 40
    body = [
        f'<text x="{LEFT - 60}" y="24" class="note">actions</text>',
        f'<text x="{LEFT}" y="24" style="font:15px ui-monospace,monospace">{escape(" ".join(ACTIONS))}</text>',
        f'<text x="{LEFT - 60}" y="58" class="note">node</text>',
        f'<text x="{LEFT}" y="58" class="note">alive, counted in pushes</text>',
        f'<text x="{right}" y="58" class="note">row attends to column</text>',
    ]
    for push in range(count + 1):
        x = LEFT + UNIT * push
        body.append(f'<path class="axis" d="M{x} {TOP - 14}V{TOP + ROW * count}"/>')
        body.append(f'<text class="top note" x="{x}" y="{TOP + ROW * count + 20}">{push}</text>')
    for node, (word, end) in enumerate(zip(tokens, ends, strict=True)):
        y, is_dead = TOP + ROW * node, end < count
        x, length = LEFT + UNIT * node, UNIT * (end - node)
        said = f"[{node}, {end}) depth {depths[node]}"
        body += [
            f'<text class="word" x="{LEFT - 12}" y="{y + 16}">{escape(word)}</text>',
            f'<rect class="{"dead" if is_dead else "life"}" x="{x}" y="{y}" width="{length}" height="{ROW - 10}" rx="5"/>',
            _beside(said, x, y, length, right),
        ]
        body += _mask_row(attend[node], ends, node, right, y)
        body.append(f'<text class="note" x="{right + CELL * count + 8}" y="{y + 16}">{escape(word)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{CSS}</style>{''.join(body)}</svg>\n"
    )


def _beside(said: str, x: int, y: int, length: int, right: int) -> str:
    """A node's numbers: in its bar if they fit, else behind it; the last ones before it."""
    wide = 8 * len(said)
    if wide <= length - 8:
        return f'<text class="inside" x="{x + 6}" y="{y + 16}">{said}</text>'
    if x + length + 6 + wide < right:
        return f'<text class="note" x="{x + length + 6}" y="{y + 16}">{said}</text>'
    return f'<text class="note" text-anchor="end" x="{x - 6}" y="{y + 16}">{said}</text>'


def _mask_row(attends: Sequence[bool], ends: Sequence[int], node: int, right: int, y: int) -> list[str]:
    found = []
    for other, sees in enumerate(attends):
        kind = "sees" if sees else "gone" if other < node and ends[other] <= node else "blind"
        place = f'x="{right + CELL * other}" y="{y - 2}" width="{CELL - 2}" height="{ROW - 6}"'
        found.append(f'<rect class="{kind}" {place}/>')
    return found


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.parse_args().path.write_text(svg(encode([trajectory()])))


if __name__ == "__main__":
    main()
