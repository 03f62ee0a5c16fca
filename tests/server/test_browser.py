"""The page in a real browser: send, stream, stop, error, reload."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import RunningServer, demo_engine, running

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is in the extra clients: pip install '.[clients]'"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt install chromium"),
]
expect = sync_api.expect


@pytest.fixture(scope="module")
def drafting() -> Iterator[RunningServer]:
    """A server whose engine drafts."""
    with running(*demo_engine(draft="mtp")) as it:
        yield it


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        it = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield it
        it.close()


@pytest.fixture
def page(drafting, browser) -> Iterator[Any]:
    """A page that has loaded. It may ask no other host, and its script may not fail."""
    context = browser.new_context(viewport={"width": 390, "height": 780})
    it = context.new_page()
    problems: list[str] = []
    it.on("pageerror", lambda error: problems.append(str(error)))
    it.on("request", lambda r: r.url.startswith(drafting.url) or problems.append(r.url))
    it.goto(drafting.url)
    expect(it.locator("#model")).to_have_text("demo")
    yield it
    context.close()
    assert not problems
    drafting.wait_until_idle()


def send(page, text: str, **settings: str) -> None:
    if settings:
        page.get_by_text("Settings").click()
    for label, value in settings.items():
        page.get_by_label(label.replace("_", " ")).fill(value)
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_an_answer_and_a_reload(drafting, page):
    send(page, "def f(x):", Temperature="0", Most_new_tokens="40")
    answer = page.locator("li.assistant p").last
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=30_000)
    body = {"model": "demo", "messages": [{"role": "user", "content": "def f(x):"}]}
    expected = drafting.post(
        "/v1/chat/completions", body | {"temperature": 0, "max_tokens": 40, "top_p": 0.95}
    )["choices"][0]["message"]["content"]
    assert answer.text_content() == expected
    shaded = page.locator("li.assistant .draft")
    assert 0 < len("".join(shaded.all_text_contents())) < len(expected)
    expect(page.locator("#legend")).to_be_visible()
    expect(page.locator("#accepted")).to_have_text(re.compile(r"\d+ %"))
    expect(page.locator("#status")).to_have_text("Ended at the largest number of tokens")
    spans = shaded.count()
    page.reload()
    assert answer.text_content() == expected
    assert page.locator("li.assistant .draft").count() == spans
    send(page, "class C:", Most_new_tokens="3")  # the conversation goes on
    expect(page.locator("li.assistant")).to_have_count(2)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("li")).to_have_count(0)
    expect(page.locator("#legend")).to_be_hidden()


def test_stop(drafting, page):
    send(page, "def f(x):", Temperature="1.5", Most_new_tokens="200")
    expect(page.locator("li.assistant p").last).not_to_have_text("")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("Stopped")
    drafting.wait_until_idle()  # the server has ended the request
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()


def test_an_error(page):
    send(page, " ".join(map(str, range(300))))
    status = page.locator("#status.error")
    expect(status).to_have_text(re.compile("^messages: expected"))
    send(page, "x", Most_new_tokens="2")  # the refused message is replaced
    expect(page.locator("li.assistant")).to_have_count(1)
    assert page.locator("li.user").all_text_contents() == ["Youx"]


def test_markup_is_text(page):
    send(page, "<img src=x onerror=alert(1)><b>bold</b>", Most_new_tokens="2")
    expect(page.locator("li.user p").last).to_have_text("<img src=x onerror=alert(1)><b>bold</b>")
    assert page.locator("#log img, #log b").count() == 0


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_cut_off(page, width):
    page.set_viewport_size({"width": width, "height": 700})
    page.get_by_text("Settings").click()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for name in ("Send", "Stop", "New chat"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box["height"] >= 44  # large enough for a finger
        assert 0 <= box["x"] <= width - box["width"]


def test_contrast_and_names(page):
    """Text has the contrast that WCAG asks for, in both color schemes, and controls have names."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colors = page.evaluate(
            """() => Object.fromEntries(['text', 'soft', 'back', 'panel', 'user', 'draft', 'error',
            'accent', 'on-accent'].map((name) => [name, getComputedStyle(document.documentElement)
            .getPropertyValue('--' + name).trim()]))"""
        )
        pairs = [(a, b) for a in ("text", "soft") for b in ("back", "panel", "user")]
        for a, b in [*pairs, ("text", "draft"), ("error", "back"), ("on-accent", "accent")]:
            assert contrast(colors[a], colors[b]) >= 4.5, (scheme, a, b, json.dumps(colors))
    for role in ("button", "textbox", "spinbutton"):
        for control in page.get_by_role(role).all():
            assert control.evaluate("e => e.labels?.length || e.textContent.trim().length")


def contrast(one: str, other: str) -> float:
    """Returns the contrast of two colors such as #1c1d1f, as WCAG 2 defines it."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
