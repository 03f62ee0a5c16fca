"""Takes the pictures of the chat page that the documentation shows.

    dsv3 serve --model demo --draft mtp --port 8000
    python -m scripts.screenshot_page --url http://127.0.0.1:8000 docs/server

It needs the extra clients and Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PICTURES = {
    "page_light": {"viewport": {"width": 900, "height": 620}, "color_scheme": "light"},
    "page_dark": {"viewport": {"width": 900, "height": 620}, "color_scheme": "dark"},
    "page_phone": {"viewport": {"width": 390, "height": 720}, "color_scheme": "light"},
}
MESSAGES = ("def read_config(path):", "class Stack:")


def chat(page: Any, url: str) -> None:
    """Holds a short conversation, as soon as the server is ready."""
    while not page.request.get(f"{url}/ready").ok:
        time.sleep(1)
    page.goto(url)
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Maximum tokens").fill("60")
    page.get_by_text("Settings").click()
    for message in MESSAGES:
        page.get_by_label("Message", exact=True).fill(message)
        page.get_by_role("button", name="Send").click()
        page.locator("#send:not([disabled])").wait_for()
    page.wait_for_timeout(1500)  # the figures are read once a second


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Take pictures of the chat page.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args(words)
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, settings in PICTURES.items():
            page = browser.new_page(**settings)
            chat(page, arguments.url)
            page.screenshot(path=arguments.directory / f"{name}.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
