"""The page at ``/``: its structure, and that it loads nothing from other hosts."""

from __future__ import annotations

import html.parser
import re

import pytest

FILES = {"/": "text/html", "/page/style.css": "text/css", "/page/chat.js": "text/javascript"}


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
    assert {source for source in sources if source != "data:,"} == set(FILES) - {"/"}
    for name in ("nothing.js", "routes.py", "..%2Fapp.py"):
        assert server.request("GET", f"/page/{name}")[0] == 404


def test_every_input_has_a_label(elements):
    labels = {a.get("for") for tag, a in elements.all if tag == "label"}
    inputs = [a["id"] for tag, a in elements.all if tag in ("input", "textarea")]
    assert len(inputs) == 6
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
    assert len(names) == 6
    metrics = server.request("GET", "/metrics")[2].decode()
    for name in names:
        assert re.search(rf"^vllm:{name}\{{[^\n]*\}} \S+$", metrics, re.MULTILINE), name
