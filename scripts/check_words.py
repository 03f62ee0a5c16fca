"""Checks the wording of docstrings, comments and documents.

    python -m scripts.check_words [FILE ...]

Without files it checks the packages and documents listed below. It prints one line for each
finding, ``file:line: found: what to write instead``, then the number of findings per package on
stderr, and exits with status 1 if there are any. A sentence that needs a listed word is excepted by
a marker on its line: ``# words: ok`` in Python (for a docstring, after its closing quotes),
``<!-- words: ok -->`` in Markdown.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("scripts", "benchmarks")  # the other packages follow as they are rewritten
# benchmarks/NOTES.md is missing on purpose: it consists of dated records.
DOCUMENTS = (
    "*.md",
    "docs/*.md",
    "benchmarks/README.md",
    "dsv3_jax/demo/README.md",
    "notebooks/*.ipynb",
)
MARKER = "words: ok"


@dataclasses.dataclass(frozen=True)
class Word:
    """A phrase that is not used here."""

    pattern: str
    """Regular expression. Case is ignored, and a space matches any white space."""
    instead: str
    """The words to write in its place."""


# Only phrases that are almost always wrong. "Row", "place", "hold" and "product" have right uses,
# as in matrix row, decimal place or dot product, so the list has them only with neighbours that
# make them wrong.
WORDS = (
    Word(r"\brows of (a|the|its|one|each) batch\b", "sequences of a batch"),
    Word(r"\brows of [\d,]+ (cached )?tokens\b", "sequences of N tokens"),
    Word(r"\bby place\b", "by position"),
    Word(r"\bplaces? of (a|the|each|its) (row|sequence|text)\b", "position in a sequence"),
    Word(r"\b(places of experts|experts' places|redundant places)\b", "expert slots"),
    Word(r"\b[\d,]+ places\b", "positions, or expert slots"),
    Word(r"\b(ragged|grouped|gate|up|down|batched) products?\b", "matmul"),
    Word(r"\bdrawn (tokens?|ones|steps?|drafts?|text)\b", "sampled"),
    Word(r"\b(tokens?|drafts?|ones?) (is|are|was|were) drawn\b", "sampled"),
    Word(r"\bdraws? (a|one|the next) token\b", "samples a token"),
    Word(r"\bdrafts? (that|which|of which [^.]{1,20}) (hold|held)\b", "accepted drafts"),
    Word(
        r"\b(says|tells) (how|what|which|who|where|whether|when)\b", "returns, reports, documents"
    ),
    Word(r"\bof the (floor|roof)\b", "of peak bandwidth: name the ceiling"),
    Word(r"\bthere is no peer\b", "no peer kernel ..."),
    Word(r"\bwants of\b", "needs from"),
    Word(r"\b(tokens|rows|queries) at hand\b", "current tokens"),
    Word(r"\blies? (apart|on (a|the|several|many) (mesh|devices?|process(es)?))\b", "is sharded"),
    Word(r"\bspeed-ups?\b", "speedup"),
    Word(r"\bhas not got\b", "does not have"),
    Word(r"\bin turns\b", "round-robin, or alternately"),
    Word(r"\bby turns\b", "alternately"),
    Word(r"\bdearer\b", "more expensive"),
    Word(r"\bbehind (a|the|its|each) (prompt|prefill|checkpoint)\b", "after"),
)
_WORDS = [(re.compile(w.pattern.replace(" ", r"\s+"), re.IGNORECASE), w.instead) for w in WORDS]

# A docstring that begins so never names its subject.
_OPENING = re.compile(r"(Of|How|What|Where|Who)\b")


@dataclasses.dataclass(frozen=True)
class Text:
    """A piece of prose of a file."""

    line: int
    """Number of its first line, from 1."""
    text: str
    is_docstring: bool = False


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    file: str
    line: int
    found: str
    """The words in the file."""
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.found!r}: write {self.instead}"


def python_texts(source: str) -> Iterator[Text]:
    """Yields the docstrings, those of attributes too, and the comments of a Python file."""
    excepted = {i for i, line in enumerate(source.splitlines(), 1) if f"# {MARKER}" in line}
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            # A string that is a statement of its own is a docstring wherever it stands.
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text, last = statement.value.value, statement.end_lineno
                if isinstance(text, str) and last not in excepted:
                    yield Text(statement.lineno, text, is_docstring=True)
    yield from _comments(source, excepted)


def _comments(source: str, excepted: set[int]) -> Iterator[Text]:
    """Yields one text for each run of comments on consecutive lines: a phrase may cross lines."""
    run: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT and line not in excepted:
            if run and line != run[-1][0] + 1:
                yield _joined(run)
                run = []
            run.append((line, token.string.lstrip("#")))
    if run:
        yield _joined(run)


def _joined(lines: list[tuple[int, str]]) -> Text:
    return Text(lines[0][0], "\n".join(line for _, line in lines))


def markdown_texts(source: str) -> Iterator[Text]:
    """Yields the paragraphs of a document without code blocks, code spans and generated tables."""
    paragraph: list[tuple[int, str]] = []
    skipped = False  # inside a code block or a generated table
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("```"):
            skipped = not skipped
        elif "begin -->" in line or "end -->" in line:
            skipped = "begin -->" in line
        ends = skipped or not line.strip() or line.startswith(("```", "    "))
        if not ends and MARKER not in line:
            paragraph.append((number, re.sub(r"`[^`]*`", "code", line)))
        elif paragraph:
            yield _joined(paragraph)
            paragraph = []
    if paragraph:
        yield _joined(paragraph)


def notebook_texts(source: str) -> Iterator[Text]:
    """Yields the prose of a notebook's cells. Line numbers are those of the .ipynb file."""
    position = 0
    for cell in json.loads(source)["cells"]:
        if not cell["source"]:
            continue
        # Cells stand in the file in their order, one line of the file for each line of a cell.
        position = source.index(json.dumps(cell["source"][0], ensure_ascii=False), position)
        lines_before = source.count("\n", 0, position)
        read = markdown_texts if cell["cell_type"] == "markdown" else python_texts
        for text in read("".join(cell["source"])):
            yield dataclasses.replace(text, line=lines_before + text.line)


def findings(texts: Iterable[Text], file: str) -> Iterator[Finding]:
    """Yields what the texts of a file should not say."""
    for text in texts:
        opening = _OPENING.match(text.text.lstrip()) if text.is_docstring else None
        if opening:
            yield Finding(file, text.line, opening[0], "a subject and a verb, or an imperative")
        for pattern, instead in _WORDS:
            for match in pattern.finditer(text.text):
                line = text.line + text.text[: match.start()].count("\n")
                yield Finding(file, line, " ".join(match[0].split()), instead)


_READERS = {".py": python_texts, ".md": markdown_texts, ".ipynb": notebook_texts}


def check(file: Path) -> list[Finding]:
    """Returns the findings of one file, in the order of its lines."""
    read = _READERS[file.suffix]
    return sorted(findings(read(file.read_text("utf-8")), str(file.relative_to(ROOT))))


def checked_files() -> list[Path]:
    """Returns the Python files of the packages, and the documents."""
    code = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    documents = (path for pattern in DOCUMENTS for path in ROOT.glob(pattern))
    return sorted({*code, *documents})


def main(names: list[str]) -> int:
    """Checks the files of these names that belong to :func:`checked_files`, or all of those."""
    files = checked_files()
    if names:
        chosen = {Path(name).resolve() for name in names}
        files = [file for file in files if file in chosen]
    found = [finding for file in files for finding in check(file)]
    for finding in found:
        print(finding)
    for package, count in Counter(f.file.partition("/")[0] for f in found).items():
        print(f"{package}: {count}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
