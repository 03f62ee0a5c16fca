"""The page in a real browser: send, stream, stop, error, reload, Markdown, copies."""

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
    context.grant_permissions(["clipboard-read", "clipboard-write"])
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
    send(page, "def f(x):", Temperature="0", Maximum_tokens="40")
    answer = page.locator("li.assistant .text").last
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
    expect(page.locator("#status")).to_have_text("Stopped at the maximum number of tokens")
    spans = shaded.count()
    page.route("**/v1/models", lambda route: None)  # it gets no answer
    page.reload()
    assert answer.text_content() == expected
    page.unroute("**/v1/models")
    assert page.locator("li.assistant .draft").count() == spans
    send(page, "class C:", Maximum_tokens="3")  # the conversation goes on
    expect(page.locator("li.assistant")).to_have_count(2)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("li")).to_have_count(0)
    expect(page.locator("#legend")).to_be_hidden()


def test_stop(drafting, page):
    send(page, "def f(x):", Temperature="1.5", Maximum_tokens="200")
    expect(page.locator("li.assistant .text").last).not_to_have_text("")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("Stopped")
    drafting.wait_until_idle()  # the server has ended the request
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()


def test_an_error(page):
    send(page, " ".join(map(str, range(300))))
    status = page.locator("#status.error")
    expect(status).to_have_text(re.compile("^messages: expected"))
    assert page.get_by_label("Message", exact=True).input_value().startswith("0 1 2 ")  # to change
    send(page, "x", Maximum_tokens="2")  # the refused message is replaced
    expect(page.locator("li.assistant")).to_have_count(1)
    assert page.locator("li.user").all_text_contents() == ["Youx"]


def test_markup_is_text(page):
    send(page, "<img src=x onerror=alert(1)><b>bold</b>", Maximum_tokens="2")
    expect(page.locator("li.user .text").last).to_have_text(
        "<img src=x onerror=alert(1)><b>bold</b>"
    )
    assert page.locator("#log img, #log b").count() == 0


def answering(page, *answers: list[tuple[str, bool]]) -> None:
    """Lets the page's next answers have these spans, each a text with whether it was drafted."""
    left = list(answers)

    def answer(route) -> None:
        spans = [{"kind": "content", "text": t, "is_draft": d} for t, d in left.pop(0)]
        events = [{"spans": [span], "finish_reason": None} for span in spans]
        events.append({"spans": [], "finish_reason": "stop"})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/chat/spans", answer)


def view(page, name: str) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Answers as").select_option(name)
    page.get_by_text("Settings").click()


def is_monospace(locator) -> bool:
    return "mono" in locator.evaluate("e => getComputedStyle(e).fontFamily")


MARKDOWN = """# Sum

1. *one*, then **two** in `code`
2. [a link](https://example.org/two) two

| n | square |
|---|---|
| 2 | 4 |

```python
def f(x):
    return x  # <b>two</b>
```

a &amp; b"""


def test_markdown(page):
    answering(page, [(MARKDOWN[i : i + 7], False) for i in range(0, len(MARKDOWN), 7)])
    view(page, "markdown")
    send(page, "x")
    answer = page.locator("li.assistant .text")
    expect(page.locator("#log")).to_have_attribute("aria-busy", "false")
    expect(answer.locator("p").last).to_have_text("a & b")
    expect(answer.locator("h1")).to_have_text("Sum")
    expect(answer.locator("ol > li")).to_have_count(2)
    expect(answer.locator("em")).to_have_text("one")
    expect(answer.locator("strong")).to_have_text("two")
    expect(answer.locator("td")).to_have_text(["2", "4"])
    code = "def f(x):\n    return x  # <b>two</b>\n"
    assert answer.locator("pre").text_content() == code
    expect(answer.locator(".code-head span")).to_have_text("python")
    link = answer.locator("a")
    assert link.get_attribute("href") == "https://example.org/two"
    assert link.get_attribute("rel") == "noopener noreferrer"
    assert is_monospace(answer.locator("pre code"))
    assert is_monospace(answer.locator("li code"))
    assert not is_monospace(answer)
    for width in (320, 1280):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") == width
    read = "navigator.clipboard.readText()"
    page.get_by_role("button", name="Copy code").click()
    expect(page.locator("#status")).to_have_text("Copied")
    assert page.evaluate(read) == code
    page.get_by_role("button", name="Copy", exact=True).click()
    page.wait_for_function(f"async (text) => (await {read}) === text", arg=MARKDOWN)
    view(page, "source")
    assert answer.text_content() == MARKDOWN
    assert is_monospace(answer)
    page.route("**/v1/models", lambda route: None)  # it gets no answer
    page.reload()  # the view stays
    assert answer.text_content() == MARKDOWN


def test_drafts_in_markdown(page):
    """The shaded characters are those that were drafted, wherever Markdown puts them."""
    parts = [part for part in re.split(r"(\w+)", MARKDOWN) if part]
    answering(page, [(part, part == "two") for part in parts])
    view(page, "markdown")
    send(page, "x")
    shaded = page.locator("li.assistant .draft")
    expect(shaded).to_have_text(["two"] * 3)  # bold, after the link, in the code; not its address
    parents = [each.evaluate("e => e.parentElement.tagName") for each in shaded.all()]
    assert parents == ["STRONG", "LI", "CODE"]


HOSTILE = (
    "<script>document.title = 'x'</script>",
    "<img src=https://example.org/x onerror=alert(1)>",
    "![an image](https://example.org/x.png)",
    "[x](javascript:alert(1)) [y](data:text/html,<script>alert(1)</script>) <javascript:alert(1)>",
    "<style>*{display:none}</style> <iframe src=https://example.org></iframe>",
    "[x]: javascript:alert(1)\n\n[x]",
    "> " * 500 + "deep",
    "*" * 20_000,
    "[" * 20_000,
    "`" * 20_000 + "a",
    "&#x3c;script&#x3e;alert(1)&#x3c;/script&#x3e;",
)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_hostile_markdown(page, text):
    """Nothing runs, no other element appears, and nothing is fetched: see the fixture."""
    answering(page, [(text, False)])
    view(page, "markdown")
    send(page, "x")
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=30_000)
    assert page.title() == "dsv3_jax"
    allowed = (
        "a, p, em, strong, s, code, pre, blockquote, span, div, button, h1, h2, ul, ol, li, hr"
    )
    assert page.locator(f"li.assistant .text *:not({allowed})").count() == 0
    for link in page.locator("li.assistant a").all():
        assert link.get_attribute("href").startswith("https://")


def test_regenerate(page):
    answering(page, [("one", False)], [("two", False)], [("three", False)])
    send(page, "x")
    expect(page.locator("li.assistant .text")).to_have_text("one")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("li.assistant .text")).to_have_text("two")
    expect(page.locator("li")).to_have_count(2)
    send(page, "y")
    expect(page.locator("li.assistant .text")).to_have_text(["two", "three"])
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)  # of the last answer
    page.reload()
    expect(page.locator("li.assistant .text")).to_have_text(["two", "three"])


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
            'accent', 'on-accent', 'code'].map((name) => [name, getComputedStyle(
            document.documentElement).getPropertyValue('--' + name).trim()]))"""
        )
        pairs = [(a, b) for a in ("text", "soft") for b in ("back", "panel", "user", "code")]
        pairs += [
            ("text", "draft"),
            ("accent", "panel"),
            ("error", "back"),
            ("on-accent", "accent"),
        ]
        for a, b in pairs:
            assert contrast(colors[a], colors[b]) >= 4.5, (scheme, a, b, json.dumps(colors))
    for role in ("button", "textbox", "spinbutton", "combobox"):
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
