"""The picture of the playground in docs/serving.md: `python -m tests.serving.browser_pictures` opens the page and writes two.

`playground.gif` shows the page itself: a walk into a dead end and back, and a wrong node that is injected and deleted.
`playground.svg` is what its button Record writes.
"""

import io
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from sequencematch.policy import Policy
from tests.serving.browser import ROOT, Playground, chromium
from tests.serving.server import running

STAR = "sequencematch/path-star"
#: The graph of the README, in which the model first walks into the arm of 2; and a node that is wrong as the first.
PROMPT = "12 6 | 0 11 | 9 14 | 0 13 | 13 21 | 2 23 | 11 10 | 10 12 | 27 26 | 21 27 | 0 2 | 23 9 / 0 26 ="
WRONG = "12"
SIZE = {"width": 1120, "height": 850}
FRAME_MS, REST_MS, COLOURS = 650, 2600, 256


def pictures(page: Any, playground: Playground) -> list[tuple[Image.Image, int]]:
    """The page at every step of a run, with the milliseconds that each is shown."""
    found = []
    for step in range(playground.length + 1):
        playground.at(step)
        shown = Image.open(io.BytesIO(page.screenshot(animations="disabled", clip={"x": 0, "y": 0, **SIZE})))
        found.append((shown.convert("RGB"), REST_MS if step == playground.length else FRAME_MS))
    return found


def gif(frames: list[tuple[Image.Image, int]], path: Path) -> None:
    """Write an animation in its most frequent colours, so that areas keep theirs, and only edges of letters are rounded."""
    count = Counter[Any]()
    for image, _ in frames:
        for times, colour in image.getcolors(2**24) or []:
            count[colour] += times
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour, _ in count.most_common(COLOURS) for part in colour])
    drawn = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image, _ in frames]
    durations = [duration for _, duration in frames]
    drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=durations, loop=0, optimize=True)


def main(folder: Path) -> None:
    """Write both animations into a folder."""
    with running({STAR: Policy.from_pretrained(STAR)}) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium())
        page = browser.new_page(viewport=SIZE, reduced_motion="reduce")
        playground = Playground(page, address).open()
        page.locator("#speed").select_option("1")
        page.locator("#prompt").fill(PROMPT)
        page.locator("#run").click()
        frames = pictures(page, playground.ended())
        with page.expect_download() as download:
            page.get_by_role("button", name="Record").click()
        (folder / "playground.svg").write_bytes(Path(download.value.path()).read_bytes())
        playground.at(0)
        page.locator(".node", has_text=WRONG).click()
        page.mouse.move(0, 0)
        frames += pictures(page, playground.ended())
        gif(frames, folder / "playground.gif")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
