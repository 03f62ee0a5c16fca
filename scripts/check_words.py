"""Checks the wording of docstrings, comments, error messages, help texts, names and documents.

    python -m scripts.check_words [FILE ...]

Without files it checks the packages and documents listed below. It prints one line for each
finding, ``file:line: words: what to write instead``, then the number of findings per package on
stderr, and exits with status 1 if there are any. A sentence or a name that needs a listed word is
excepted by a marker on its line: ``# words: ok`` in Python (for a docstring, after its closing
quotes), ``<!-- words: ok -->`` in Markdown.
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
PACKAGES = ("dsv3_jax", "pallas_kernels", "sharding", "scripts", "benchmarks", "tests")
DOCUMENTS = (
    "*.md",
    "docs/**/*.md",
    "benchmarks/README.md",
    "dsv3_jax/demo/README.md",
    "dsv3_jax/demo_sparse/README.md",
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
    Word(r"\b(one|tokens|queries|steps|drafts|counts|begins) behind\b", "after"),
    Word(r"\bbeside\b", "next to, with, in addition to"),
    Word(
        r"\b(tokens?|drafts?|bytes|seconds|us|ms|GB|MB|FLOPs?) a"
        r" (row|step|token|layer|device|second|SM)\b",
        "per",
    ),
    Word(r"\ba (row|step|token|layer|device|page|sequence|head|expert) each\b", "one per ..."),
    Word(r"\b(of|for|in|with) so many\b", "this number of, or N"),
    Word(r"\bas many as there (are|can|could|is)\b", "the number of, or at most"),
    Word(r"\bat the (least|most)\b", "at least, at most"),
    Word(r"\bof which\b", "two sentences"),
    Word(
        r"\b(it|they|that|which|what|arrays?|parameters?|pages?|weights?|scales?|shards?) lies?\b",
        "is stored, is sharded",
    ),
    Word(
        r"\b(weights?|heads?|arrays?|parameters?|matrix|matrices|dimensions?|axis|axes|batch"
        r"|cache|what) (that )?(is|are|be|was|were) (not )?cut\b",
        "sharded, divided",
    ),
    Word(r"\bstands? (there|behind|last|first|where|at|in(?! for\b))\b", "is, comes"),
    Word(r"\bchosen alike\b", "equally likely"),
    Word(r"\baffair\b", "responsibility; say who must do it"),
    Word(r"\bhow far\b", "the progress, the distance"),
    Word(
        r"\b(is|are) (not )?for (its|the|a|each|every) \w+ to (say|know|decide|wait|do)\b",
        "the caller tracks, decides",
    ),
    Word(r"\bwhat (it|they|the \w+|an? \w+) (holds?|says?|wants?)\b", "a noun for what it is"),
    Word(r"\bwhat of\b", "which part of"),
    Word(r"\bbut for\b", "except for"),
    Word(r"\ball but (the|one|a|its|those)\b", "all except"),
    Word(r"\b(is|are) not here\b", "is missing, is on another machine"),
    Word(r"\b(give|gives|giving|given) back\b", "return, free"),
    Word(r"\bwhoever\b", "name the caller, the reader, the user"),
    Word(r"\bgo on with\b", "continue with, resume with"),
)
_WORDS = [(re.compile(w.pattern.replace(" ", r"\s+"), re.IGNORECASE), w.instead) for w in WORDS]

# A docstring or help text that begins so never names its subject.
_OPENING = re.compile(r"(Of|How|What|Where|Who|Which|Why|When|Those|So)\b", re.IGNORECASE)

# Names that explain nothing outside of the sentence that they were made for, and their kind.
NAMES = {
    **dict.fromkeys(("lie", "lies"), "sharding, location"),
    **dict.fromkeys(("found", "held", "kept"), "the noun for what it is: result, stats, matches"),
    **dict.fromkeys(("said", "says", "told", "tells"), "message, text, reason"),
    **dict.fromkeys(("feed", "fed"), "input, mtp_input"),
    **dict.fromkeys(("turn", "turned"), "rotation, round"),
    **dict.fromkeys(("how", "wants"), "settings, method, options"),
    **dict.fromkeys(("ran", "drawn"), "result, sampled"),
}
"""Words that are not used as names of functions, parameters, variables and attributes."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A piece of prose of a file."""

    line: int
    """Number of its first line, from 1."""
    text: str
    has_subject: bool = False
    """Whether it must name its subject: a docstring or a help text."""


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    file: str
    line: int
    words: str
    """The words in the file."""
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.words!r}: write {self.instead}"


def python_texts(source: str) -> Iterator[Text]:
    """Yields the prose of a Python file.

    It consists of docstrings, those of attributes too, comments, the messages of raised exceptions,
    and the texts of argparse's help.
    """
    excepted = _excepted_lines(source)
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            # A string that is a statement of its own is a docstring wherever it is.
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text, last = statement.value.value, statement.end_lineno
                if isinstance(text, str) and last not in excepted:
                    yield Text(statement.lineno, text, has_subject=True)
        for expression, has_subject in _messages(node):
            for text in _strings(expression):
                if text.line not in excepted:
                    yield dataclasses.replace(text, has_subject=has_subject)
    yield from _comments(source, excepted)


def _excepted_lines(source: str) -> set[int]:
    return {i for i, line in enumerate(source.splitlines(), 1) if f"# {MARKER}" in line}


_HELP = {"help", "description", "epilog"}


def _messages(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Yields the arguments of a node that users read, and whether they must name their subject."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        for argument in node.exc.args:
            yield argument, False
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg in _HELP:
                yield keyword.value, True


def _strings(expression: ast.expr) -> Iterator[Text]:
    """Yields the string literals of an expression, with ``{}`` for the values in an f-string."""
    if isinstance(expression, ast.Constant):
        if isinstance(expression.value, str):
            yield Text(expression.lineno, expression.value)
    elif isinstance(expression, ast.JoinedStr):
        parts = (
            str(part.value) if isinstance(part, ast.Constant) else "{}"
            for part in expression.values
        )
        yield Text(expression.lineno, "".join(parts))
    else:
        for child in ast.iter_child_nodes(expression):
            if isinstance(child, ast.expr):
                yield from _strings(child)


def python_names(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and name of everything that a Python file defines under a word of NAMES."""
    excepted = _excepted_lines(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        else:
            continue
        if name.strip("_").lower() in NAMES and node.lineno not in excepted:
            yield node.lineno, name


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
        # The file has the cells in their order, and one line for each line of a cell.
        position = source.index(json.dumps(cell["source"][0], ensure_ascii=False), position)
        lines_before = source.count("\n", 0, position)
        read = markdown_texts if cell["cell_type"] == "markdown" else python_texts
        for text in read("".join(cell["source"])):
            yield dataclasses.replace(text, line=lines_before + text.line)


def findings(texts: Iterable[Text], file: str) -> Iterator[Finding]:
    """Yields the findings in the texts of a file."""
    for text in texts:
        opening = _OPENING.match(text.text.lstrip()) if text.has_subject else None
        if opening:
            yield Finding(file, text.line, opening[0], "a subject and a verb, or an imperative")
        for pattern, instead in _WORDS:
            for match in pattern.finditer(text.text):
                line = text.line + text.text[: match.start()].count("\n")
                yield Finding(file, line, " ".join(match[0].split()), instead)


_READERS = {".py": python_texts, ".md": markdown_texts, ".ipynb": notebook_texts}


def check(file: Path) -> list[Finding]:
    """Returns the findings of one file, in the order of its lines."""
    source, name = file.read_text("utf-8"), str(file.relative_to(ROOT))
    names = python_names(source) if file.suffix == ".py" else ()
    return sorted(
        [
            *findings(_READERS[file.suffix](source), name),
            *(Finding(name, line, word, NAMES[word.strip("_").lower()]) for line, word in names),
        ]
    )


def checked_files() -> list[Path]:
    """Returns the Python files of the packages, and the documents."""
    code = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    documents = (path for pattern in DOCUMENTS for path in ROOT.glob(pattern))
    return sorted({*code, *documents})


def package_of(file: str) -> str:
    """Returns the first directory of a file's path, or the file itself."""
    return file.partition("/")[0]


def main(names: list[str]) -> int:
    """Checks the files of these names that belong to :func:`checked_files`, or all of those."""
    files = checked_files()
    if names:
        chosen = {Path(name).resolve() for name in names}
        files = [file for file in files if file in chosen]
    results = [finding for file in files for finding in check(file)]
    for finding in results:
        print(finding)
    for package, count in Counter(package_of(finding.file) for finding in results).items():
        print(f"{package}: {count}", file=sys.stderr)
    return 1 if results else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
