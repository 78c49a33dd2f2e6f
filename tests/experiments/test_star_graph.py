"""A path-star graph and a walk through it, on a terminal and as an animation."""

import io
import re
from xml.etree import ElementTree

from rich.console import Console

from sequencematch.experiments.animation import animated_svg, frames
from sequencematch.experiments.star_graph import DELETED, ON_PATH, UNSEEN, drawn, styles, walk
from sequencematch.tasks.path_star import PathStar, read_star

PROMPT = "7 4 | 2 7 | 2 5 | 5 9 / 2 9 ="
STAR = read_star(PROMPT)
BACK = "<bkspc>"


def test_a_prompt_is_read_into_its_arms() -> None:
    assert STAR == ("2", "9", (("7", "4"), ("5", "9")))


def test_every_prompt_of_the_task_is_read_with_the_answer_as_one_arm() -> None:
    for row in PathStar(arms=4, length=3, test_size=20).test():
        star = read_star(row["prompt"])
        answer = tuple(row["completion"].split())
        assert [arm for arm in star.arms if arm[-1] == star.goal] == [answer]
        assert [len(arm) for arm in star.arms] == [3] * 4


def test_a_walk_ends_where_its_deletions_leave_it() -> None:
    assert walk(["7", "4", BACK]) == (["7"], {"4"})
    assert walk(["7", "4", BACK, BACK, "5"]) == (["5"], {"7", "4"})
    assert walk(["7", BACK, "7"]) == (["7"], set())  # written again


def test_a_node_is_on_the_path_only_where_all_nodes_before_it_are() -> None:
    assert styles(STAR, ["5", "4"], {"7"}) == {(0, 0): DELETED, (0, 1): UNSEEN, (1, 0): ON_PATH, (1, 1): UNSEEN}


def test_the_star_is_drawn_with_its_goal() -> None:
    console = Console(file=(said := io.StringIO()), width=80)
    console.print(drawn(STAR, ["5"], {"7", "4"}))
    assert [line.rstrip() for line in said.getvalue().splitlines()[:2]] == [
        "     ┌── 7 ── 4",
        "  2 ─┴── 5 ── 9 ◀ goal",
    ]


def test_an_animation_has_a_frame_per_action_and_shows_deleted_words_struck() -> None:
    actions = ["7", "4", BACK, BACK, "5", "9", "<eos>"]
    shown = frames(STAR, actions, lambda done: f"{len(done)} done")
    assert [frame.note for frame in shown] == [f"{n} done" for n in range(8)]
    assert shown[4].written == (("7", True), ("4", True))
    assert shown[-1].written == (("7", True), ("4", True), ("5", False), ("9", False))
    assert shown[3].nodes == {(0, 0): "path", (0, 1): "gone", (1, 0): "new", (1, 1): "new"}
    svg = animated_svg(STAR, actions, lambda done: f"{len(done)} done")
    root = ElementTree.fromstring(svg)
    texts = ["".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("7 4 5 9") == 2  # after the last node, and after <eos>
    assert "script" not in svg
    # One picture at a time: each frame becomes visible once, when the one before it is hidden.
    starts = [
        float(x) for x in re.findall(r"@keyframes f\d+\{(?:0%\{visibility:hidden\})?([\d.]+)%\{visibility:visible", svg)
    ]
    ends = [float(x) for x in re.findall(r"visible\}([\d.]+)%\{visibility:hidden", svg)]
    assert len(starts) == 8
    assert starts[1:] == ends
