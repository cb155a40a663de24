"""Sees that a Chromium is there for the tests of the pages: one found, or one installed.

    python tests/support/get_browser.py

Debian's package is taken where `apt-get` may be used, else Playwright's own download.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = (
    "The tests of the admin pages need Chromium. On Debian or Ubuntu: apt-get install chromium. "
    "Elsewhere: python -m playwright install chromium."
)


def find() -> str | None:
    """The path of a browser: one of the system's, or one that Playwright has."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


def install() -> None:
    """Install one, or leave it to the caller to find that there is none."""
    if shutil.which("apt-get") and os.geteuid() == 0:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        packages = ["chromium", "fonts-dejavu-core"]
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
        for command in (["apt-get", "update", "-qq"], install):
            subprocess.run(command, env=environment, check=False)
        return
    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False)


if __name__ == "__main__":
    if find() is None:
        install()
    found = find()
    print(found or HOW)
    sys.exit(found is None)
