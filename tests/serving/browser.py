"""Chromium, and a page of the playground in it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Where `make test-browser` puts axe.
AXE = ROOT / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
#: Long, so that no result depends on how busy a machine is.
TIMEOUT_MS = 120_000
DESKTOP = {"width": 1280, "height": 860}


def chromium() -> str | None:
    """The browser of this machine, or None."""
    known = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    playwrights_own = sorted((Path.home() / ".cache" / "ms-playwright").glob("chromium-*/chrome-linux*/chrome"))
    return next((str(path) for path in [*known, *playwrights_own] if path is not None), None)


class Playground:
    """A page that is watched: what its console says, and where its requests go."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, f"{address}/"
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self.asked: list[dict[str, Any]] = []
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._on_request)
        page.route(lambda url: not url.startswith((self.address, "blob:")), lambda route: route.abort())

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.address, "blob:")):
            self.elsewhere.append(request.url)
        elif request.url.endswith("/v1/completions"):
            self.asked.append(json.loads(request.post_data))

    def open(self, fragment: str = "") -> "Playground":
        """Load the page, and wait until its first run has ended."""
        self.page.goto(self.address + fragment)
        return self.ended()

    def ended(self) -> "Playground":
        """Wait until all actions of the runs have arrived."""
        from playwright.sync_api import expect

        expect(self.page.locator("#position")).to_have_text(re.compile(r"/ [1-9]"), timeout=TIMEOUT_MS)
        expect(self.page.locator("#run")).to_have_text("Run", timeout=TIMEOUT_MS)
        return self

    def at(self, step: int) -> "Playground":
        """Go to a step."""
        self.page.locator("#scrubber").fill(str(step))
        return self

    @property
    def length(self) -> int:
        """Actions of the longest run."""
        return int(self.page.locator("#scrubber").get_attribute("max"))

    @property
    def position(self) -> int:
        """The step that is shown."""
        return int(self.page.locator("#scrubber").input_value())

    def saved(self) -> dict[str, Any]:
        """The file that “Save as JSON” writes."""
        with self.page.expect_download() as download:
            self.page.locator("#save").click()
        return json.loads(Path(download.value.path()).read_text())

    def text(self, lane: int = 0) -> str:
        """What stands in a lane, and what was just deleted, as a person sees it."""
        return " ".join(self.page.locator(".text").nth(lane).inner_text().split())

    def badge(self, lane: int = 0) -> Any:
        """The words that say how a lane came out."""
        return self.page.locator(".badge").nth(lane)
