"""A run as an animated SVG: what is seen in which frame. That the page makes the same file is in test_playground.py."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from sequencematch.serving.animated_svg import Picture
from sequencematch.serving.recording import in_short, lay_out, record, star_of
from sequencematch.tasks.path_star import Star, as_row, graphs, read_star

GRAPH = "1 2 | 2 3 | 1 4 | 4 5 / 1 5 ="


def run(
    prompt: str, *actions: str, prompt_tokens: tuple[str, ...] = (), prefix: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A run with these actions: texts, `⌫`, and `end`."""

    def tokens(texts: tuple[str, ...]) -> list[dict[str, Any]]:
        return [{"id": n, "text": text} for n, text in enumerate(texts)]

    kinds = {"⌫": "delete", "end": "end"}
    listed = [
        {
            "kind": kinds.get(text, "write"),
            "token": None if text in kinds else {"id": 7, "text": text},
            "prob": 0.5,
            "value": float(step),
            "bkspc_prob": 0.25,
        }
        for step, text in enumerate(actions)
    ]
    start = {"prompt_tokens": tokens(prompt_tokens), "prefix_tokens": tokens(prefix)}
    request = {"model": "a/model", "prompt": prompt, "temperature": 0, "search": True}
    return {"request": request, "start": start, "actions": listed, "end": {"text": ""}}


def words(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if "word" in element.get("class", "")]


def test_frames_start_where_their_share_of_the_time_is() -> None:
    picture = Picture(3)  # two actions of 0.6 s, then 2.8 s: 4 s
    assert picture.seconds == pytest.approx(4)
    assert [picture.share(frame) for frame in (0, 1, 2)] == ["0.00%", "15.00%", "30.00%"]
    assert picture.during(1) == "f1"
    assert picture.rules["f1"].endswith("{0%{opacity:0}15.00%{opacity:1}30.00%{opacity:0}}")
    assert "opacity:0;" not in picture.rules[picture.since(2)]  # seen where animations are not


def test_a_walk_into_a_dead_end_is_seen_on_the_graph() -> None:
    svg = record(run(GRAPH, "2", "3", "⌫", "⌫", "4", "5", "end"))
    rules = dict(re.findall(r"@keyframes (n\d+)\{((?:[^{}]+\{[^{}]*\})+)\}", svg))
    green, red = "fill:var(--green-wash)", "fill:var(--red-wash)"
    # Nodes are numbered arm by arm after the centre. 2 is written first and deleted last; 5 is written and kept.
    assert re.findall(r"fill:var\(--[\w-]+\)", rules["n1"]) == ["fill:var(--card)", green, red]
    assert re.findall(r"fill:var\(--[\w-]+\)", rules["n4"]) == ["fill:var(--card)", green]
    notes = re.findall(r'class="note \w+ f\d+"[^>]*>([^<]*)<', svg)
    assert notes[0] == "looks for a path to 5"
    assert notes[1:] == ["writes 2", "writes 3", "deletes 3", "deletes 2", "writes 4", "writes 5", "found 5"]
    assert words(svg) == ["2", "3", "4", "5"]
    assert svg.count('class="strike') == 2


def test_without_a_deletion_nothing_is_struck() -> None:
    svg = record(run(GRAPH, "4", "5", "end"))
    assert 'class="strike' not in svg
    assert 'class="zone' not in svg


def test_a_walk_that_ends_elsewhere_says_so() -> None:
    assert ">ended, but not at 5<" in record(run(GRAPH, "2", "3", "end"))


def test_a_token_that_no_edge_leads_to_is_a_jump_and_one_off_the_graph_moves_nothing() -> None:
    assert record(run(GRAPH, "5", "⌫", "end")).count('class="jump') == 1
    assert 'class="jump' not in record(run(GRAPH, "17", "⌫", "end"))


def test_text_without_a_graph_has_its_prompt_and_a_deleted_end_of_it_is_struck() -> None:
    svg = record(run("One two", "⌫", " three", "end", prompt_tokens=("<bos>", "One", " two")))
    assert words(svg) == ["One", "two", "three"]
    assert svg.count('class="strike') == 1
    assert "<bos>" not in svg.replace("&lt;", "<")


def test_lines_are_broken_where_the_picture_ends_and_where_the_text_says() -> None:
    svg = record(run("Go", *["\nfar"], *([" wide"] * 40), "end", prompt_tokens=("Go",)))
    heights = [float(y) for y in re.findall(r'class="word[^"]*" x="[\d.]+" y="([\d.]+)"', svg)]
    assert heights[0] < heights[1] < heights[-1]
    places = [
        float(x) + float(width)
        for x, width in re.findall(r'class="word[^"]*" x="([\d.]+)" [^>]*textLength="([\d.]+)"', svg)
    ]
    assert max(places) <= 800 - 26


@pytest.mark.parametrize("text", ["<script>", "a&b", "]]>", "\x00\x07", "\ud800", '"quoted"', "😀"])
def test_any_text_gives_xml(text: str) -> None:
    ElementTree.fromstring(record(run("Go", text, "⌫", "end", prompt_tokens=("Go",))).encode())


def test_only_stars_are_drawn_as_graphs() -> None:
    drawn = graphs(arms=5, length=3, names=40, seed=1)
    for _ in range(50):
        prompt = str(as_row(next(drawn))["prompt"])
        assert star_of(prompt) == read_star(prompt)
    cycles = ("1 2 | 2 3 | 3 2 / 1 3 =", "1 2 | 2 1 / 1 2 =", "1 2 | 3 4 | 4 3 / 1 2 =")
    others = ("1 2 | 1 3 | 2 4 | 2 5 / 1 5 =", "1 2 3 / 1 3 =", "1 2 / 3 2 =", "1 2", "", [1, 2])
    assert [star_of(prompt) for prompt in (*cycles, *others)] == [None] * 9


def test_nodes_do_not_overlap() -> None:
    for arms in range(1, 12):
        star = Star("c", "a0_3", tuple(tuple(f"a{row}_{place}" for place in range(4)) for row in range(arms)))
        places, width, height = lay_out(star)
        for n, one in enumerate(places):
            assert 19 < one.x < width - 19
            assert 19 < one.y < height - 19
            assert all((one.x - two.x) ** 2 + (one.y - two.y) ** 2 > 40**2 for two in places[:n])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"model": "a/b", "temperature": 0, "search": True}, "b · search"),
        ({"model": "b", "temperature": 0}, "b · greedy"),
        ({"model": "b", "temperature": 0.7, "backspace_bias": 2}, "b · temperature 0.7 · ⌫ bias +2"),
        ({"model": "b", "backspace_bias": -20}, "b · temperature 1 · never deletes"),
    ],
)
def test_settings_in_short(request_: dict[str, Any], words: str) -> None:
    assert in_short(request_) == words


def test_a_run_without_actions_is_refused() -> None:
    with pytest.raises(ValueError, match="`run` must hold the events of a stream"):
        record({"request": {"prompt": "Go"}, "start": None, "actions": [], "end": None})
