"""Parses the code blocks, links and anchors of README.md and docs/."""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
DOCUMENTS = [*PAGES, *ROOT.glob("[A-Z]*.md"), *(ROOT / "benchmarks").glob("*.md")]
DOCUMENTS = sorted({*DOCUMENTS, *(ROOT / "dsv3_jax").glob("demo*/README.md")})

_FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)((?:    \S[^\n]*\n(?:    [^\n]*\n)*)+)")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code. One without a fence contains shell commands."""

    language: str
    text: str

    @property
    def needs(self) -> str | None:
        """Requirement that the block's first line states, or None if the tests can run the
        block."""
        first = self.text.partition("\n")[0]
        return first.removeprefix("# needs ") if first.startswith("# needs ") else None

    @property
    def file(self) -> str | None:
        """File name in the block's first line, if the block is the content of a file."""
        match = re.match(r"# ([\w.]+\.py)\n", self.text)
        return match and match[1]

    def commands(self) -> Iterator[list[str]]:
        """Yields the words of each line of shell."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def blocks(page: Path) -> list[Block]:
    """Returns the blocks of a page in their order."""
    text = page.read_text("utf-8")
    positioned = [(m.start(), Block(m[1].strip(), m[2])) for m in _FENCED.finditer(text)]
    bare = _FENCED.sub(lambda m: re.sub(r"[^\n]", "x", m[0]), text)
    for m in _INDENTED.finditer(bare):
        lines = m[1].splitlines()
        positioned.append((m.start(), Block("bash", "\n".join(line[4:] for line in lines) + "\n")))
    return [block for _, block in sorted(positioned, key=lambda pair: pair[0])]


def links(page: Path) -> list[str]:
    """Returns the targets of links and pictures."""
    text = _FENCED.sub("", page.read_text("utf-8"))
    return re.findall(r"\]\(([^()\s]*)\)", re.sub(r"`[^`\n]*`", "code", text))


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the page's headings, as GitHub and mkdocs.yml's slugs make them."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text("utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h).strip().lower() for h in headings)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", h)) for h in plain}
