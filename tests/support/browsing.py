"""A browser that watches its pages: whatever a page complains of fails the test that opened it.

Knows Chromium and what it tells; refuses to know our pages.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from get_browser import HOW, find
from playwright.sync_api import (
    Browser,
    BrowserContext,
    Locator,
    Page,
    Response,
    sync_playwright,
)

SERIOUS = ("serious", "critical")
DROP = """
(zone, [names, folder]) => {
  const dropped = new DataTransfer();
  const files = names.map((name) => new File(["{}"], name));
  if (folder === null) files.forEach((file) => dropped.items.add(file));
  const entry = (file) => ({ isFile: true, file: (told) => told(file) });
  const portions = [Array(folder).fill({ isFile: false }), files.map(entry), []];
  const reader = { readEntries: (told) => told(portions.shift()) };
  const directory = { isFile: false, createReader: () => reader };
  const items = [{ webkitGetAsEntry: () => directory }];
  const event = new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: dropped });
  if (folder !== null) Object.defineProperty(event, "dataTransfer", { value: { items, files } });
  zone.dispatchEvent(event);
  return event.defaultPrevented;
}
"""


# Scripts that are deferred have run by then; nobody clicks, fills or drops on what is not visible.
HIDDEN_UNTIL_SCRIPTS_RAN = """
const sheet = new CSSStyleSheet();
sheet.replaceSync("html { visibility: hidden }");
document.adoptedStyleSheets = [sheet];
document.addEventListener("DOMContentLoaded", () => { document.adoptedStyleSheets = []; });
"""


@dataclass
class Watch:
    """What pages complained of; `allow` takes what a test provokes."""

    complaints: list[str] = field(default_factory=list)

    def page(self, context: BrowserContext, scripts: bool = True) -> Page:
        """A new page that is watched; `scripts` says whether the context runs any."""
        page = context.new_page()
        if scripts:
            page.add_init_script(HIDDEN_UNTIL_SCRIPTS_RAN)
        page.on("console", lambda message: self._heard(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("requestfailed", lambda request: self._lost(request.url, request.failure or ""))
        page.on("response", self._seen)
        return page

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    def _lost(self, url: str, failure: str) -> None:
        if "ERR_ABORTED" not in failure:  # the page itself gave it up, as when it is left
            self.complaints.append(f"failed: {url}: {failure}")

    def _seen(self, response: Response) -> None:
        if response.status >= 400:
            self.complaints.append(f"{response.status}: {response.request.method} {response.url}")

    def allow(self, pattern: str) -> None:
        """Forgive complaints that match, of which there must be one."""
        kept = [each for each in self.complaints if not re.search(pattern, each)]
        assert len(kept) < len(self.complaints), f"{pattern} is not in {self.complaints}"
        self.complaints = kept

    def check(self) -> None:
        """Fail for anything that is not forgiven."""
        assert self.complaints == []


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, for as long as the block runs."""
    path = find()
    assert path is not None, HOW
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def serious_faults(page: Page) -> list[str]:
    """What axe finds on the page that keeps people from using it."""
    found: dict[str, Any] = Axe().run(page).response
    return [
        f"{fault['id']}: {json.dumps([node['html'] for node in fault['nodes']])[:400]}"
        for fault in found["violations"]
        if fault["impact"] in SERIOUS
    ]


def shown_text(place: Locator) -> str:
    """Its text, once it is visible."""
    place.wait_for()
    return place.inner_text()


def drop(zone: Locator, names: list[str], folder: int | None = None) -> None:
    """Drop files, or a folder that tells them after so many others, in portions as browsers do."""
    zone.wait_for()
    assert zone.evaluate(DROP, [names, folder])
