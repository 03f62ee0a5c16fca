"""The page at ``/``: its structure, and that it loads nothing from other hosts."""

from __future__ import annotations

import html.parser
import json
import re

import pytest

from dsv3_jax.generation.completion import Piece
from dsv3_jax.server.page.drafts import split

FILES = {
    "/": "text/html",
    "/page/style.css": "text/css",
    "/page/chat.js": "text/javascript",
    "/page/markdown.js": "text/javascript",
}
LIBRARY = "/page/markdown-it.min.js"


class Elements(html.parser.HTMLParser):
    """Collects the attributes of all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.labelled_inside: set[str | None] = set()
        self._labels = 0

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.all.append((tag, attributes))
        self._labels += tag == "label"
        if self._labels:
            self.labelled_inside.add(attributes.get("id"))

    def handle_endtag(self, tag):
        self._labels -= tag == "label"


def text(server, path: str) -> str:
    status, headers, content = server.request("GET", path)
    assert status == 200
    assert headers["content-type"].startswith(FILES[path])
    assert "default-src 'none'" in headers["content-security-policy"]
    return content.decode()


def spans(server, body: dict) -> list[dict]:
    """Returns the spans of an answer."""
    status, _, content = server.request("POST", "/chat/spans", {**body, "stream": True})
    assert status == 200
    *events, done, _ = content.decode().split("\n\n")
    assert done == "data: [DONE]"
    read = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [event["finish_reason"] for event in read[:-1]] == [None] * (len(read) - 1)
    assert read[-1]["finish_reason"] == "length"
    return [span for event in read for span in event["spans"]]


def test_spans_are_the_answer(server):
    """Without a drafter, none was drafted."""
    messages = [{"role": "user", "content": "def f(é):"}]
    body = {"model": "demo", "messages": messages, "max_tokens": 20, "temperature": 0}
    body["ignore_eos"] = True
    answer = server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    read = spans(server, body)
    assert "".join(span["text"] for span in read) == answer
    assert {(span["kind"], span["is_draft"]) for span in read} == {("content", False)}
    assert server.refused("/chat/spans", {**body, "model": "other"})[0] == 404


def test_texts_of_drafts(server):
    """Each token's text is a part of its own, unless several tokens form a character."""
    tokens = server.tokenizer.encode("return x", add_special_tokens=False)
    flags = [i % 2 == 0 for i in range(len(tokens))]
    piece = Piece("return x", tokens, None, [0.0] * len(tokens))
    parts = split(piece, flags, server.tokenizer)
    assert "".join(text for text, _ in parts) == "return x"
    assert [flag for _, flag in parts] == flags
    bear = server.tokenizer.encode("🐻", add_special_tokens=False)
    assert len(bear) > 1
    for all_drafted in (True, False):
        flags = [True] * (len(bear) - 1) + [all_drafted]
        piece = Piece("🐻", bear, None, [0.0] * len(bear))
        assert split(piece, flags, server.tokenizer) == [("🐻", all_drafted)]


@pytest.fixture
def elements(server) -> Elements:
    parser = Elements()
    parser.feed(text(server, "/"))
    return parser


@pytest.mark.parametrize("path", FILES)
def test_nothing_comes_from_other_hosts(server, path):
    content = text(server, path)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|innerHTML|eval\(", content)


def test_files_are_served(server, elements):
    sources = [
        a.get("src") or a.get("href") for tag, a in elements.all if tag in ("link", "script")
    ]
    imported = re.findall(r'from "(.*)"', text(server, "/page/chat.js"))
    imported += re.findall(r'from "(.*)"', text(server, "/page/markdown.js"))
    used = {source for source in [*sources, *imported] if source != "data:,"}
    assert used == {*FILES, LIBRARY} - {"/"}
    for name in ("nothing.js", "routes.py", "..%2Fapp.py"):
        assert server.request("GET", f"/page/{name}")[0] == 404


def test_the_library_comes_with_its_licences(server):
    """markdown-it, as published, and the licences of all packages inside it."""
    status, headers, library = server.request("GET", LIBRARY)
    assert status == 200
    assert headers["content-type"].startswith("text/javascript")
    assert not re.search(rb"\bimport\b[^(]|sourceMappingURL", library)
    licences = server.request("GET", "/page/markdown-it.LICENSE.txt")[2].decode()
    names = ("markdown-it", "entities", "linkify-it", "mdurl", "punycode.js", "uc.micro")
    assert re.findall(r"^-+\n(\S+) [\d.]+$", licences, re.MULTILINE) == list(names)
    assert licences.count("Permission is hereby granted") == 6  # mdurl has two; entities is BSD
    assert licences.count("Redistribution and use") == 1


def test_every_input_has_a_label(elements):
    labels = {a.get("for") for tag, a in elements.all if tag == "label"}
    inputs = [a["id"] for tag, a in elements.all if tag in ("input", "textarea", "select")]
    assert len(inputs) == 7
    assert set(inputs) <= labels | elements.labelled_inside


def test_ids_that_the_script_uses_exist(server, elements):
    ids = [a["id"] for _, a in elements.all if "id" in a]
    assert len(set(ids)) == len(ids)
    used = set(re.findall(r'element\("(\w+)"\)', text(server, "/page/chat.js")))
    assert used <= set(ids)
    assert ("ol", "log") in {(tag, a.get("role")) for tag, a in elements.all}
    assert dict(elements.all)["html"] == {"lang": "en"}


def test_figures_that_the_script_reads_exist(server):
    names = re.findall(r'figure\("(\w+)"\)', text(server, "/page/chat.js"))
    assert len(names) == 8
    metrics = server.request("GET", "/metrics")[2].decode()
    for name in names:
        assert re.search(rf"^vllm:{name}\{{[^\n]*\}} \S+$", metrics, re.MULTILINE), name
