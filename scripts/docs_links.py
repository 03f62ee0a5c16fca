"""mkdocs hooks that fix links and reStructuredText roles.

Links from docs/ to files of the repository, which are not part of the site, point to ``repo_url``
of mkdocs.yml; without that setting they become the plain path. reStructuredText roles in
docstrings, such as ``:func:``, are removed.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_RELATIVE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: object) -> str:
    """Rewrites links to repository files. mkdocs calls it for every page."""
    root = Path(config["config_file_path"]).parent

    def replaced(link: re.Match[str]) -> str:
        text, anchor = link[1], link[3] or ""
        folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        if not (root / path).exists():
            raise ValueError(f"{page.file.src_uri}: expected a file of the repository, got {path}")
        if config["repo_url"]:
            return f"[{text}]({config['repo_url'].rstrip('/')}/blob/main/{path}{anchor})"
        return f"{text} (`{path}`)"

    return _RELATIVE.sub(replaced, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Removes reStructuredText roles. mkdocs calls it for the HTML of every page."""
    html = re.sub(r":(?:func|class|meth|data|mod):(?=<code>)", "", html)
    html = re.sub(r"<code>~[\w.]*?(\w+)</code>", r"<code>\1</code>", html)
    return html.replace("::</p>", ":</p>")
