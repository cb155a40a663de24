"""Takes a picture of every admin screen, light and dark, wide and narrow, of a server of its own.

    python examples/screenshots.py [--out build/screenshots]

Starts `loraplex serve` on the demo base in a folder of its own, signs in, makes a little traffic,
and writes `SCREEN-SCHEME-WIDTH.png`. Needs what `make test` installs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from get_browser import HOW, find  # noqa: E402

PASSWORD = "a password for pictures"
SCREENS = (
    "overview",
    "adapters",
    "upload",
    "playground",
    "keys",
    "tenants",
    "usage",
    "users",
    "audit",
    "system",
)
WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
QUESTIONS = ("What is the capital of France?", "Name three fruits.", "How do tides work?")


@contextmanager
def serving(folder: Path) -> Iterator[dict[str, str]]:
    """A server with the demo base; gives the lines of its banner by label."""
    python = sys.executable
    fetch = [python, str(ROOT / "examples" / "fetch_demo_base.py"), str(ROOT / "build" / "gguf")]
    model = subprocess.run(fetch, capture_output=True, text=True, check=True).stdout.split()[-1]
    command = [str(Path(python).with_name("loraplex")), "serve", "--model", model, "--port", "0"]
    command += ["--data-dir", str(folder / "data")]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            yield _banner(server)
        finally:
            server.terminate()


def _banner(server: subprocess.Popen[str]) -> dict[str, str]:
    said: dict[str, str] = {}
    assert server.stdout is not None
    for line in server.stdout:
        label, _, value = line.rstrip("\n").partition(": ")
        said[label] = value
        if line.startswith("curl "):
            return said
    sys.exit("the server did not start")


def make_traffic(said: dict[str, str]) -> None:
    """A few answers, so that screens have something to show."""
    headers = {"authorization": f"Bearer {said['API key']}"}
    with httpx.Client(base_url=said["API"], headers=headers, timeout=120) as client:
        for model in ("pirate", "json", "emoji", "pirate"):
            for question in QUESTIONS:
                messages = [{"role": "user", "content": question}]
                body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 24}
                client.post("/chat/completions", json=body).raise_for_status()
        body = {"version": 1, "revision": 0}
        client.put("/adapters/pirate/aliases/prod", json=body).raise_for_status()


def sign_in(page: Page, said: dict[str, str]) -> None:
    """As the first operator."""
    page.goto("/admin/sign-in")
    page.get_by_label("Name").fill("operator")
    page.get_by_label("Password or one-time code").fill(said["First sign-in"].split()[-1])
    page.get_by_role("button", name="Sign in").click()
    page.get_by_label("New password").fill(PASSWORD)
    page.get_by_label("The same once more").fill(PASSWORD)
    page.get_by_role("button", name="Set the password").click()


def addresses(page: Page) -> dict[str, str]:
    """Where each screen is, one adapter and one upload's report among them."""
    found = {name: f"/admin/{name}" for name in SCREENS} | {"overview": "/admin"}
    for name, listed in (("adapter", "/admin/adapters"), ("report", "/admin/upload")):
        page.goto(listed)
        link = page.get_by_role("link", name="pirate").first.get_attribute("href")
        found[name] = str(link)
    return found


def take(browser: Browser, said: dict[str, str], out: Path) -> None:
    """Write all pictures."""
    url = re.sub(r"/v1$", "", said["API"])
    context = browser.new_context(base_url=url)
    page = context.new_page()
    sign_in(page, said)
    places, state = addresses(page), context.storage_state()
    for scheme in SCHEMES:
        for width in WIDTHS:
            shown = browser.new_context(
                base_url=url,
                storage_state=state,
                color_scheme=scheme,
                viewport={"width": width, "height": 800},
            )
            page = shown.new_page()
            for name, place in places.items():
                page.goto(place)
                if name == "playground":
                    page.get_by_role("button", name="Run").click()
                    page.locator(".answer", has_text="first after").nth(1).wait_for()
                page.screenshot(path=out / f"{name}-{scheme}-{width}.png", full_page=True)
            shown.close()


def main() -> None:
    """Serve, look, and end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "screenshots")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    path = find() or sys.exit(HOW)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as said:
        make_traffic(said)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            take(browser, said, out)
            browser.close()
    print(f"{len([*out.glob('*.png')])} pictures in {out}")


if __name__ == "__main__":
    main()
