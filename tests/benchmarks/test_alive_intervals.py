"""The picture of alive intervals shows what the encoding says."""

import re
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.alive_intervals import CELL, LEFT, ROW, TOP, UNIT, svg, trajectory
from sequencematch.core import encode

IMAGE = Path(__file__).parents[2] / "docs" / "images" / "alive.svg"
RECT = "{http://www.w3.org/2000/svg}rect"


def test_the_picture_in_the_docs_is_the_one_that_the_code_draws() -> None:
    assert IMAGE.read_text() == svg(encode([trajectory()]))


def test_bars_go_from_push_to_deletion_and_the_mask_has_a_square_for_each_pair() -> None:
    """I lick dags ⌫ ⌫ like dogs: nodes 2 and 3 die when four nodes have been pushed."""
    encoding = encode([trajectory()])
    bars = [r for r in ElementTree.fromstring(svg(encoding)).iter(RECT) if r.get("rx")]
    drawn = [((float(r.get("x", 0)) - LEFT) / UNIT, float(r.get("width", 0)) / UNIT, r.get("class")) for r in bars]
    lives = [(0, 7), (1, 7), (2, 4), (3, 4), (4, 7), (5, 7), (6, 7)]
    assert [(x, x + width) for x, width, _ in drawn] == lives
    assert [kind for _, _, kind in drawn] == ["dead" if node in (2, 3) else "life" for node in range(7)]
    squares = [r for r in ElementTree.fromstring(svg(encoding)).iter(RECT) if not r.get("rx")]
    left = min(float(r.get("x", 0)) for r in squares)
    sees = {
        (round((float(r.get("y", 0)) + 2 - TOP) / ROW), round((float(r.get("x", 0)) - left) / CELL))
        for r in squares
        if r.get("class") == "sees"
    }
    assert sees == {(i, j) for i in range(7) for j in range(i + 1) if i < lives[j][1]}
    assert re.findall(r"\[(\d), (\d)\) depth (\d)", svg(encoding))[4] == ("4", "7", "2")  # like stands where lick stood
