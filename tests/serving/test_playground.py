"""The playground, driven in a real browser against a real server with the bundled models."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sequencematch.policy import Policy
from sequencematch.serving.recording import cells_of, record, star_of
from sequencematch.serving.settings import ServerSettings
from sequencematch.tasks.path_star import read_star
from tests.serving.browser import AXE, DESKTOP, ROOT, TIMEOUT_MS, Playground, chromium
from tests.serving.server import running

api = pytest.importorskip(
    "playwright.sync_api", reason="needs Playwright and Chromium: make test-browser installs them"
)
if chromium() is None:
    pytest.skip("needs Chromium: make test-browser installs it", allow_module_level=True)

STAR, SUMS = "sequencematch/path-star", "sequencematch/arithmetic"
#: A graph in which the model first walks into the arm of 2: the one of the README.
PROMPT = "12 6 | 0 11 | 9 14 | 0 13 | 13 21 | 2 23 | 11 10 | 10 12 | 27 26 | 21 27 | 0 2 | 23 9 / 0 26 ="
#: Time of one action at speed 1, as in page/player.js.
ACTION_MS = 420
expect = api.expect
Open = Callable[..., Playground]


@pytest.fixture(scope="module")
def policies() -> dict[str, Policy]:
    return {name: Policy.from_pretrained(name) for name in (STAR, SUMS)}


@pytest.fixture(scope="module")
def address(policies: dict[str, Policy]) -> Iterator[str]:
    with running(policies) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    expect.set_options(timeout=TIMEOUT_MS)
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium())
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Open]:
    """Open pages. At the end of a test none may have complained, but as `expected`, or have asked another machine."""
    opened: list[tuple[Playground, str]] = []

    def visit(expected: str = "$^", at: str = address, **options: Any) -> Playground:
        context = browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **options})
        opened.append((Playground(context.new_page(), at), expected))
        return opened[-1][0]

    yield visit
    for playground, expected in opened:
        assert [words for words in playground.complaints if not re.search(expected, words)] == []
        assert playground.elsewhere == []
        playground.page.context.close()


def ask(playground: Playground, prompt: str) -> Playground:
    playground.page.locator("#prompt").fill(prompt)
    playground.page.locator("#run").click()
    return playground.ended()


def choose_sums(playground: Playground) -> None:
    """Choose the other model, and wait for the run of its first example."""
    playground.page.get_by_label("Model").select_option(SUMS)
    expect(playground.page.locator(".lane h2")).to_contain_text("arithmetic")
    playground.ended()


def fulfil(answer: dict[str, Any], route: Any) -> None:
    route.fulfill(**answer)


def standing(run: dict[str, Any], step: int) -> list[str]:
    """The words behind the prompt after some actions, replayed on a list."""
    words = [token["text"].strip() for token in run["start"]["prefix_tokens"]]
    for action in run["actions"][:step]:
        if action["kind"] == "write":
            words.append(action["token"]["text"].strip())
        elif action["kind"] == "delete":
            words.pop()
    return words


# Generation


def test_a_run_is_the_librarys_own_and_tokens_appear_and_vanish(visit: Open, policies: dict[str, Policy]) -> None:
    playground = ask(visit().open(), PROMPT)
    result = policies[STAR].generate(PROMPT, search=True, max_new_tokens=4)
    assert playground.text() == result.texts[0].strip() == "13 21 27 26"
    run = playground.saved()["runs"][0]
    kinds = [action["kind"] for action in run["actions"]]
    assert len(kinds) == len(result.trajectories[0].chosen)
    first = kinds.index("delete") + 1
    gone = standing(run, first - 1)[-1]
    going = playground.at(first).page.locator(".cell.going")
    expect(going).to_have_text(re.compile(rf"^\s*{gone}$"))
    assert going.locator(".ink").evaluate("e => getComputedStyle(e).textDecorationLine") == "line-through"
    assert playground.text().split() == [*standing(run, first), gone]
    if kinds[first] != "delete":
        pytest.fail("the model is expected to go back several steps")
    assert gone not in playground.at(first + 1).text().split()


def test_deleted_tokens_stay_visible_if_one_wants(visit: Open) -> None:
    playground = ask(visit().open(), PROMPT)
    playground.page.locator("#keep").check()
    run = playground.saved()["runs"][0]
    written = [action["token"]["text"].strip() for action in run["actions"] if action["kind"] == "write"]
    assert playground.text().split() == written
    assert playground.page.locator(".cell.deleted").count() == len(written) - 4


def test_a_run_plays_by_itself_and_can_be_paused(visit: Open) -> None:
    playground = visit(reduced_motion="no-preference")
    page = playground.page
    page.clock.install(time=0)
    page.clock.pause_at(1000)  # from here on time passes as the test says
    playground.open()
    positions = [playground.position]
    for _ in range(2):
        page.clock.run_for(ACTION_MS)
        positions.append(playground.position)
    assert positions == [0, 1, 2]
    page.get_by_role("button", name="Pause").click()
    page.clock.run_for(10 * ACTION_MS)
    assert playground.position == 2
    page.locator("#speed").select_option("4")
    page.get_by_role("button", name="Play", exact=True).click()
    page.clock.run_for(ACTION_MS)
    assert playground.position == 6
    page.clock.run_for(100 * ACTION_MS)
    assert playground.position == playground.length
    page.get_by_role("button", name="Play", exact=True).click()  # from the start
    assert playground.position == 0


def test_what_is_sampled_depends_on_the_seed_alone(visit: Open) -> None:
    playground = visit().open()
    page = playground.page
    page.get_by_label("Search").uncheck()
    page.get_by_label("Temperature").fill("2")
    texts: dict[str, str] = {}
    for seed in "1234512345":
        page.locator("#seed").fill(seed)
        found = ask(playground, PROMPT).text()
        assert texts.setdefault(seed, found) == found
        assert playground.asked[-1]["seed"] == int(seed)
    assert len(set(texts.values())) > 1


# What it considered


def test_pointing_at_a_token_and_focusing_an_action_show_the_alternatives(visit: Open) -> None:
    playground = ask(visit().open(), PROMPT)
    page, run = playground.page, playground.saved()["runs"][0]
    shown = page.locator(".other")
    last = [n for n, action in enumerate(run["actions"]) if action["kind"] == "write"][-1]
    page.locator(".cell.model .ink", has_text=run["actions"][last]["token"]["text"].strip()).last.hover()
    expect(page.locator(".thoughts.glance h3")).to_contain_text(f"Step {last + 1}")
    likeliest = run["actions"][last]["alternatives"][0]
    expect(shown.first.locator(".name")).to_have_text(likeliest["text"].strip())
    assert abs(float(shown.first.locator(".prob").inner_text().split()[0]) / 100 - likeliest["prob"]) < 1e-3
    page.mouse.move(0, 0)
    page.locator(".action").last.focus()
    page.keyboard.press("Home")
    expect(page.locator(".thoughts h3")).to_contain_text("Step 1")
    names = [other["text"].strip() for other in run["actions"][0]["alternatives"]]
    assert shown.locator(".name").all_inner_texts()[:3] == names[:3]


# Injection


@pytest.mark.parametrize("way", ["node", "typed", "alternative"])
def test_an_injected_wrong_token_is_removed(visit: Open, way: str) -> None:
    playground = ask(visit().open(), PROMPT).at(0)
    page = playground.page
    page.locator("#scrubber").blur()
    if way == "node":
        page.locator(".node", has_text=re.compile("^9$")).click()
    elif way == "typed":
        page.get_by_label("Token to inject").fill("9")
        page.get_by_role("button", name="Inject").click()
    else:  # the arms of 11 and 13 are right so far: any of three may be the first
        page.get_by_role("button", name=re.compile("^Continue with 11")).click()
    playground.ended()
    (token,) = playground.saved()["runs"][0]["start"]["prefix_tokens"]
    assert token["text"].strip() == ("11" if way == "alternative" else "9")
    assert playground.asked[-1]["prefix"] == [token["id"]]
    expect(playground.badge()).to_have_text(f"Deleted the injected {token['text'].strip()}; then found the goal")
    assert playground.text() == "13 21 27 26"
    page.get_by_role("button", name="Previous run").click()
    assert playground.saved()["runs"][0]["start"]["prefix_tokens"] == []


def test_a_token_that_was_not_seen_before_is_spelled_by_the_models_tokenizer(visit: Open) -> None:
    playground = visit().open()
    page = playground.page
    choose_sums(playground)
    ask(playground, "In base 7, what is 25 + 14? Solution:").at(2)  # after the space and the first digit
    page.get_by_label("Token to inject").fill("6")
    page.get_by_role("button", name="Inject").click()
    playground.ended()
    tokens = playground.saved()["runs"][0]["start"]["prefix_tokens"]
    assert [token["text"] for token in tokens] == [" ", "6"]
    expect(playground.badge()).to_have_text("Deleted the injected 6")
    assert playground.text().endswith("Solution: 42")  # 19 + 11 = 30 = 4·7 + 2


def test_a_model_that_never_deletes_keeps_an_injected_token(visit: Open) -> None:
    """The control: the badge reads the run, not hopes."""
    playground = visit().open()
    page = playground.page
    page.get_by_label("Search").uncheck()
    page.get_by_label("Backspace bias").fill("-20")
    ask(playground, PROMPT).at(0)
    page.locator(".node", has_text=re.compile("^9$")).click()
    playground.ended()
    expect(playground.badge()).to_have_text("Kept the injected 9")


# Comparison


def test_two_settings_run_side_by_side_with_one_seed_and_one_clock(visit: Open) -> None:
    playground = ask(visit().open(), PROMPT)
    page = playground.page
    page.get_by_label("Compare two settings").check()
    playground.ended()
    searching, never = playground.saved()["runs"]
    assert searching["request"]["prompt"] == never["request"]["prompt"] == PROMPT
    assert any(action["kind"] == "delete" for action in searching["actions"])
    assert not any(action["kind"] == "delete" for action in never["actions"])
    expect(playground.badge(0)).to_have_text(re.compile("^Found 26"))
    expect(playground.badge(1)).to_have_text("Ended at 14, not at 26")
    playground.at(2)
    assert [playground.text(lane).split() for lane in (0, 1)] == [standing(searching, 2), standing(never, 2)]
    for form in page.locator("#settings-forms form").all():
        form.get_by_label("Temperature").fill("1")
    page.locator("#seed").fill("5")
    ask(playground, PROMPT)
    assert [request["seed"] for request in playground.asked[-2:]] == [5, 5]
    page.get_by_label("Compare two settings").uncheck()
    assert page.locator(".lane").count() == 1


def test_two_models_run_side_by_side(visit: Open) -> None:
    playground = visit().open()
    page = playground.page
    page.get_by_label("Compare two settings").check()
    playground.ended()
    page.locator("#settings-forms form").nth(1).get_by_label("Model").select_option(SUMS)
    ask(playground, "1 + 1 =")
    assert [run["start"]["model"] for run in playground.saved()["runs"]] == [STAR, SUMS]


# Scrubbing


def test_every_way_to_scrub_shows_the_state_of_its_step(visit: Open) -> None:
    playground = ask(visit().open(), PROMPT)
    page, run = playground.page, playground.saved()["runs"][0]
    page.locator("h1").click()  # so that keys go to the page
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "first": (lambda: page.keyboard.press("Home"), 0),
        "on": (lambda: page.keyboard.press("ArrowRight"), 1),
        "button on": (lambda: page.get_by_role("button", name="One step on").click(), 2),
        "button back": (lambda: page.get_by_role("button", name="One step back").click(), 1),
        "slider": (lambda: playground.at(5), 5),
        "slider's keys": (lambda: page.keyboard.press("ArrowLeft"), 4),
        "tape": (lambda: page.locator(".action").nth(6).click(), 7),
        "tape's keys": (lambda: page.keyboard.press("ArrowRight"), 8),
        "token": (lambda: page.locator(".cell.model:visible").first.click(), 7),
    }
    for way, (act, step) in ways.items():
        act()
        assert playground.position == step, way
        just = cells_of(run)
        gone = [cell.name for cell in just if cell.died == step]
        assert playground.text().split() == standing(run, step) + gone, way
        expect(page.locator("[aria-current=step]")).to_have_count(1 if step else 0)
    box = page.locator(".curves").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 2.5 / playground.length, box["y"] + 20)
    assert playground.position == 3


def test_the_curves_have_the_numbers_of_each_step(visit: Open) -> None:
    playground = ask(visit().open(), PROMPT)
    run = playground.saved()["runs"][0]
    for step, action in enumerate(run["actions"], start=1):
        playground.at(step)
        shown = float(playground.page.locator(".numbers [data-part=v]").inner_text())
        assert shown == pytest.approx(action["value"], abs=0.0051)  # two digits after the point
    curve = playground.page.locator(".curve.p").get_attribute("d")
    heights = [float(point.split()[1]) for point in curve[1:].split("L")]
    scale = (heights[0] - heights[3]) / (run["actions"][3]["bkspc_prob"] - run["actions"][0]["bkspc_prob"])
    for height, action in zip(heights, run["actions"], strict=True):
        assert heights[0] - height == pytest.approx(
            scale * (action["bkspc_prob"] - run["actions"][0]["bkspc_prob"]), abs=0.11
        )


# The graph


def test_the_walk_on_the_graph_is_the_run(visit: Open) -> None:
    playground = ask(visit().open(), PROMPT)
    page, run, star = playground.page, playground.saved()["runs"][0], read_star(PROMPT)
    nodes = {star.centre, *(node for arm in star.arms for node in arm)}
    assert set(page.locator(".node text").all_text_contents()) == nodes
    assert page.locator(".edge").count() == len(nodes) - 1
    assert page.locator(".node:has(.goal)").text_content() == star.goal
    seen: set[str] = set()
    for step in range(len(run["actions"]) + 1):
        playground.at(step)
        path = standing(run, step)
        seen |= set(path)
        on = set(page.locator(".node.on text").all_text_contents())
        assert on == {star.centre, *path}
        assert set(page.locator(".node.left text").all_text_contents()) == seen - set(path)
        assert page.locator(".node.here").text_content() == (path[-1] if path else star.centre)
        assert page.locator(".edge.on").count() == len(path)
    assert seen - set(path), "the model did not walk into a dead end"


def test_a_graph_typed_by_hand_is_drawn_and_other_text_is_not(visit: Open) -> None:
    playground = visit().open()
    page = playground.page
    page.locator("#prompt").fill("1 2 | 2 3 | 1 4 | 4 5 / 1 5 =")
    assert sorted(page.locator(".node text").all_text_contents()) == list("12345")
    assert page.get_by_label("Longest answer").input_value() == "2"
    page.locator("#run").click()
    playground.ended()
    assert playground.asked[-1]["prompt"] == "1 2 | 2 3 | 1 4 | 4 5 / 1 5 ="
    for other in ("1 2 | 2 1 / 1 2 =", "1 2 3 / 1 2 =", "1 2 | 3 2 / 1 2 =", "1 2"):
        ask(playground, other)
        expect(page.locator(".graph")).to_be_hidden()
        assert star_of(other) is None


def test_a_new_graph_has_the_shape_of_the_examples_and_is_solved(visit: Open) -> None:
    playground = visit().open()
    before = playground.page.locator("#prompt").input_value()
    playground.page.get_by_role("button", name="New graph").click()
    prompt = playground.ended().page.locator("#prompt").input_value()
    assert prompt != before
    star = read_star(prompt)
    assert star == star_of(prompt)
    assert [len(arm) for arm in star.arms] == [4, 4, 4]
    assert star.goal in {arm[-1] for arm in star.arms}
    expect(playground.badge()).to_have_text(re.compile(r"^(Found|Ended at) \d+"))


# Errors


def test_a_run_can_be_stopped(visit: Open) -> None:
    playground = visit().open()
    page = playground.page
    page.route("**/v1/completions", lambda _: None)  # never answered
    page.locator("#run").click()
    expect(page.locator("#run")).to_have_text("Stop")
    page.locator("#run").click()
    expect(page.locator("#run")).to_have_text("Run")
    expect(page.locator(".lane .notice")).to_be_hidden()


def test_a_server_that_is_gone_is_told_and_tried_again(visit: Open) -> None:
    playground = visit(expected="Failed to load resource").open()
    page = playground.page
    page.route("**/v1/completions", lambda route: route.abort())
    page.locator("#run").click()
    notice = page.locator(".lane .notice")
    expect(notice).to_contain_text("The server does not answer.")
    page.unroute("**/v1/completions")
    notice.get_by_role("button", name="Try again").click()
    playground.ended()
    expect(notice).to_be_hidden()


def test_a_full_queue_and_a_stream_that_breaks_are_told(visit: Open) -> None:
    playground = visit(expected="Failed to load resource").open()
    page, notice = playground.page, playground.page.locator(".lane .notice")
    body = json.dumps({"error": {"message": "queue full"}})
    answers: list[dict[str, Any]] = [
        {"status": 429, "headers": {"Retry-After": "3"}, "body": body},
        {"status": 200, "body": 'data: {"error": {"message": "The logits are NaN."}}\n\n'},
        {"status": 200, "body": 'data: {"object": "action.start", "prompt_tokens": [], "prefix_tokens": []}\n\n'},
    ]
    for answer, words in zip(answers, ["Try again in 3 s", "The logits are NaN.", "connection broke"], strict=True):
        page.route("**/v1/completions", partial(fulfil, answer))
        page.locator("#run").click()
        expect(notice).to_contain_text(words)
        page.unroute("**/v1/completions")


def test_a_prompt_that_does_not_fit_is_told_in_the_servers_words(visit: Open) -> None:
    playground = visit(expected="Failed to load resource: the server responded with a status of 400").open()
    page = playground.page
    page.locator("#prompt").fill("1 2 | " * 300)
    page.locator("#run").click()
    expect(page.locator(".lane .notice")).to_contain_text("context of 256 tokens")


def test_a_key_is_asked_for_where_the_server_wants_one(visit: Open, policies: dict[str, Policy]) -> None:
    with running({STAR: policies[STAR]}, ServerSettings(api_key="secret")) as address:
        playground = visit(expected="Failed to load resource: the server responded with a status of 401", at=address)
        playground.page.goto(playground.address)
        expect(playground.page.locator("#notice")).to_contain_text("wants an API key")
        playground.page.get_by_label("API key").fill("secret")
        playground.page.get_by_role("button", name="Use key").click()
        playground.ended()
        expect(playground.page.locator("#notice")).to_be_hidden()


def test_text_of_a_model_is_never_markup(visit: Open, tmp_path: Path) -> None:
    playground = visit().open()
    saved = playground.saved()
    evil = '<img src=x onerror="document.title=1">'
    saved["runs"][0]["request"]["prompt"] = evil
    for action in saved["runs"][0]["actions"]:
        if action["kind"] == "write":
            action["token"]["text"] = evil
    (tmp_path / "run.json").write_text(json.dumps(saved))
    playground.page.locator("#file").set_input_files(tmp_path / "run.json")
    expect(playground.page.locator(".cell.model").first).to_have_text(evil)
    assert playground.page.locator("main img").count() == 0
    assert "<img" not in record(saved)


# Sharing


def test_a_link_holds_the_whole_run(visit: Open) -> None:
    playground = ask(visit().open(), PROMPT)
    page = playground.page
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator("#link")).to_have_value(re.compile("#run="))
    link = page.locator("#link").input_value()
    assert page.url == link
    assert len(link) < 4000
    other = visit().open(link.removeprefix(playground.address))
    assert other.asked == []
    assert other.page.locator("#prompt").input_value() == PROMPT
    before, after = playground.saved()["runs"][0], other.saved()["runs"][0]
    assert before["request"] == after["request"]
    for one, two in zip(before["actions"], after["actions"], strict=True):
        assert (one["kind"], one["token"]) == (two["kind"], two["token"])
        assert two["value"] == pytest.approx(one["value"], abs=6e-5)  # four digits after the point


def test_a_link_of_a_comparison_opens_as_one(visit: Open) -> None:
    playground = ask(visit().open(), PROMPT)
    playground.page.get_by_label("Compare two settings").check()
    playground.ended().page.get_by_role("button", name="Copy link").click()
    expect(playground.page.locator("#link")).to_have_value(re.compile("#run="))
    other = visit().open(playground.page.locator("#link").input_value().removeprefix(playground.address))
    assert other.page.locator(".lane").count() == 2
    assert other.asked == []
    expect(other.badge(1)).to_have_text("Ended at 14, not at 26")


def test_a_damaged_link_is_told(visit: Open) -> None:
    playground = visit().open("#run=abc")
    expect(playground.page.locator("#status")).to_contain_text("damaged")


def test_a_file_holds_the_whole_run_and_another_file_is_refused(visit: Open, tmp_path: Path) -> None:
    playground = ask(visit().open(), PROMPT)
    saved = playground.saved()
    (tmp_path / "run.json").write_text(json.dumps(saved))
    other = visit().open()
    other.page.locator("#file").set_input_files(tmp_path / "run.json")
    expect(other.page.locator("#status")).to_have_text("Opened the saved run.")
    assert other.saved() == saved
    for wrong in (
        "no JSON",
        "{}",
        '{"request": {"prompt": "a"}, "actions": [{"kind": "jump"}], "start": {}, "end": {}}',
    ):
        (tmp_path / "run.json").write_text(wrong)
        other.page.locator("#file").set_input_files(tmp_path / "run.json")
        expect(other.page.locator("#status")).to_contain_text("This is not a saved run")


def long_run(count: int) -> dict[str, Any]:
    """Words, line ends, spaces, signs that markup uses, characters outside the basic plane; every fifth action deletes."""
    texts = [" word", ".\n", " ", "\n\n", " <b>&amp;</b>", " 😀é", "\t", "", " ]]>", "\x07"]
    alternatives = [{"id": 1, "text": " other", "prob": 0.1, "kind": "write"}]
    actions = []
    for step in range(count):
        kind = "end" if step == count - 1 else "delete" if step % 5 == 4 else "write"
        token = {"id": step, "text": texts[step % 7 if step % 2 else step % len(texts)]} if kind == "write" else None
        scores = {"prob": 0.5, "value": float(step * 7919 % 101) / 10, "bkspc_prob": step * 31 % 97 / 97}
        actions.append({"kind": kind, "token": token, **scores, "alternatives": alternatives})
    request = {"model": "any/model", "prompt": "Once <i>upon</i>", "temperature": 0.7, "backspace_bias": -1.5}
    tokens = [{"id": 1, "text": ""}, {"id": 2, "text": "Once"}, {"id": 3, "text": " <i>upon</i>"}]
    end = {"text": "", "finish_reason": "stop"}
    return {"request": request, "start": {"prompt_tokens": tokens, "prefix_tokens": []}, "actions": actions, "end": end}


def test_a_long_text_is_followed_and_recorded(visit: Open, tmp_path: Path) -> None:
    playground = visit().open()
    page = playground.page
    (tmp_path / "run.json").write_text(json.dumps(long_run(400)))
    page.locator("#file").set_input_files(tmp_path / "run.json")
    expect(page.locator("#status")).to_have_text("Opened the saved run.")
    expect(page.locator(".cell.model:visible").last).to_be_in_viewport()
    playground.at(399)
    expect(page.locator(".action[aria-current]")).to_be_in_viewport()
    with page.expect_download() as download:
        page.get_by_role("button", name="Record").click()
    assert Path(download.value.path()).read_text() == record(playground.saved())


@pytest.mark.parametrize("model", [STAR, SUMS])
def test_the_recording_of_the_page_is_that_of_the_library(visit: Open, model: str) -> None:
    playground = visit().open()
    page = playground.page
    if model == SUMS:
        choose_sums(playground)
        page.get_by_label("Temperature").fill("2")
        page.get_by_label("Backspace bias").fill("3")
        ask(playground, "In base 7, what is <b>25</b> + 14 & 3? Solution:")
    else:
        ask(playground, PROMPT).at(1)
        page.locator(".node", has_text=re.compile("^21$")).click()  # no edge leads there
        playground.ended()
    with page.expect_download() as download:
        page.get_by_role("button", name="Record").click()
    recorded = Path(download.value.path()).read_text()
    assert recorded == record(playground.saved())
    kinds = {action["kind"] for action in playground.saved()["runs"][0]["actions"]}
    assert {"write", "delete"} <= kinds, "nothing to see"


def test_the_readmes_animation_is_what_the_page_records_today(visit: Open) -> None:
    """`python -m tests.serving.browser_pictures` makes it. Words are compared: places depend on a machine's rounding."""
    playground = ask(visit().open(), PROMPT)
    shown = (ROOT / "docs" / "images" / "playground.svg").read_text()
    assert re.findall(">([^<]+)<", shown[shown.index("</style>") :]) == re.findall(
        ">([^<]+)<", (today := record(playground.saved()))[today.index("</style>") :]
    )


def test_an_action_that_was_not_taken_can_be_taken_instead(visit: Open) -> None:
    """Going back is one of them: the run continues with one token less, and nothing was injected."""
    playground = ask(visit().open(), PROMPT).at(3)
    page, run = playground.page, playground.saved()["runs"][0]
    assert run["actions"][2]["kind"] == "write"
    page.locator(".other.delete").click()
    playground.ended()
    assert [token["text"].strip() for token in playground.saved()["runs"][0]["start"]["prefix_tokens"]] == standing(
        run, 1
    )
    expect(playground.badge()).to_have_text(re.compile("^Found 26"))


# How it looks


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: make test-browser installs it")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_no_serious_fault(visit: Open, scheme: str, width: int) -> None:
    size = {"width": width, "height": 844}
    playground = ask(visit(color_scheme=scheme, viewport=size).open(), PROMPT)
    page = playground.page

    def faults() -> list[str]:
        found = page.evaluate(f"async () => {{ {AXE.read_text()}; return await axe.run(); }}")
        serious = [fault for fault in found["violations"] if fault["impact"] in ("serious", "critical")]
        return [f"{fault['id']}: {node['html']}" for fault in serious for node in fault["nodes"]]

    assert faults() == []
    playground.at(5)
    page.locator("#keep").check()
    page.get_by_label("Compare two settings").check()
    playground.ended()
    page.locator("#settings").evaluate("e => { e.open = true; }")
    assert faults() == []


def test_the_page_fits_a_phone(visit: Open) -> None:
    size = {"width": 390, "height": 844}
    playground = visit(viewport=size, has_touch=True, is_mobile=True, device_scale_factor=3).open()
    ask(playground, PROMPT)
    page = playground.page
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    expect(page.locator(".transport")).to_be_in_viewport()
    playground.at(0)
    page.locator(".node", has_text=re.compile("^9$")).tap()
    playground.ended()
    expect(playground.badge()).to_have_text("Deleted the injected 9; then found the goal")
    page.get_by_label("Compare two settings").check()
    playground.ended()
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_dark_follows_the_system_until_one_chooses(visit: Open) -> None:
    def brightness(page: Any) -> float:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 765

    playground = visit(color_scheme="dark").open()
    assert brightness(playground.page) < 0.2
    playground.page.get_by_role("button", name="Dark colours").click()
    assert brightness(playground.page) > 0.8
    playground.open()
    assert brightness(playground.page) > 0.8
    assert brightness(visit(color_scheme="light").open().page) > 0.8


def test_everything_can_be_done_with_keys(visit: Open) -> None:
    playground = visit().open()
    page = playground.page
    page.locator("#prompt").focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type(PROMPT)
    page.keyboard.press("ControlOrMeta+Enter")
    playground.ended()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("(e => e.id || e.name || e.dataset.part || e.className)(document.activeElement)"))
    wanted = {"prompt", "run", "record", "token", "scrubber", "play", "compare", "share", "save", "open", "temperature"}
    assert wanted <= reached, wanted - reached
    assert any(name.startswith("action") for name in reached)
    assert any(name.startswith("other") for name in reached)
