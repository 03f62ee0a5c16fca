"""README.md and docs/: every command runs or names what it needs, links resolve, and tables match
the results."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dsv3_jax import compile_cache
from dsv3_jax.cli.main import parser
from scripts import benchmark_tables, draw_speedups
from tests.support.command import run
from tests.support.documents import DOCUMENTS, PAGES, ROOT, anchors, blocks, links
from tests.support.xla_flags import fast_compilation

NO_COMMANDS = {"text", "json", "yaml"}
ENDLESS = {"serve", "chat"}  # commands that run until they are stopped
QUICK = {"claims", "kernels", "index", "api", "benchmarks", "troubleshooting", "accuracy"}


def name(page: Path) -> str:
    return page.stem


# ---- commands ------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory with the folders of a clone that the pages' commands read."""
    for folder in ("docs", "scripts"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    # Keeps the suite's compilation cache.
    monkeypatch.setattr(compile_cache, "enable", lambda directory=None: tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=() if p.stem in QUICK else pytest.mark.slow, id=p.stem) for p in PAGES],
)
def test_examples_of_a_page_run(page, directory, capsys):
    """A text block after a block of commands must equal their output."""
    names: dict[str, object] = {}
    printed = None
    for block in blocks(page):
        if block.language == "text" and printed is not None:
            assert block.text.strip() == printed.strip()
        printed = None
        if block.needs or block.language in NO_COMMANDS:
            continue
        capsys.readouterr()
        if block.file:
            (directory / block.file).write_text(block.text, "utf-8")
        elif block.language == "python":
            exec(compile(block.text, str(page), "exec"), names)
        else:
            for words in block.commands():
                if "..." not in words:
                    run_words(words)
            printed = capsys.readouterr().out


def run_words(words: list[str]) -> None:
    """Runs one command of a page. Commands of other kinds need a '# needs' line."""
    settings = {}
    while re.fullmatch(r"\w+=.*", words[0]):
        key, _, value = words.pop(0).partition("=")
        settings[key] = value
    if words[0] == "dsv3":
        assert run(*words[1:]) == 0, words
    elif words[0] == "python":
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            **settings,
            "XLA_FLAGS": f"{fast_compilation()} {settings.get('XLA_FLAGS', '')}",
        }
        words = [sys.executable if word == "python" else word for word in words]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    elif words[0] == "make":
        # Not run here, because it creates an environment: CI runs it from a clean clone.
        assert " ".join(words) in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    else:
        raise AssertionError(f"expected a command that can be run or a '# needs' line, got {words}")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_that_are_not_run_have_valid_syntax(page):
    """Checks flags of dsv3 and Python syntax. ``...`` repeats the arguments of the previous
    command."""
    before: list[str] = []
    for block in blocks(page):
        assert block.language in NO_COMMANDS | {"bash", "python"}, block
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "bash":
            for words in block.commands():
                if "dsv3" in words:
                    before = flags(words, before)
                # A test that runs these would never end.
                assert block.needs or not ENDLESS & set(words), f"expected '# needs' before {words}"


def flags(words: list[str], before: list[str]) -> list[str]:
    """Returns the arguments of a dsv3 command after its parser has accepted them."""
    words = words[words.index("dsv3") + 1 :]
    if "..." in words:
        assert before, words
        assert before[0] == words[0], words
        words = before + [word for word in words[1:] if word != "..."]
    parser().parse_args(words)
    return words


# Text that a reader cannot run as it stands: an address that does not exist, or a package that is
# not published. A file or a name in angle brackets is for the reader to fill in.
PLACEHOLDER = re.compile(
    r"<(?:this|your|the)[ _-][^>\n]*>|git clone <|git\+<|\bOWNER\b"
    r"|pip install (?:-\S+ )*['\"]?dsv3[-_]jax\b"
)


def test_nothing_to_copy_has_a_placeholder():
    """In pages, notebooks, and messages of the code."""
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*"), *ROOT.glob("notebooks/*.ipynb")]
    for folder in ("dsv3_jax", "sharding", "pallas_kernels", "scripts", "benchmarks"):
        texts += [path for kind in ("py", "md") for path in (ROOT / folder).rglob(f"*.{kind}")]
    placeholders = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts
        if path.suffix in (".md", ".py", ".ipynb", ".yaml", ".service", "") and path.is_file()
        for match in PLACEHOLDER.finditer(path.read_text("utf-8"))
    ]
    assert not placeholders
    assert len(texts) > 500


@pytest.mark.parametrize(
    "text",
    [
        "git clone <this repository> && cd dsv3_jax",
        "https://colab.research.google.com/github/OWNER/dsv3_jax/blob/main/x.ipynb",
        "pip install 'dsv3-jax[serve]'",
        "pip install -q dsv3-jax",
        "dsv3-jax[plot] @ git+<this repository>",
    ],
)
def test_placeholders_are_recognized(text):
    assert PLACEHOLDER.search(text)


def test_most_blocks_run():
    """At least half of the commands must run without a '# needs' line."""
    all_blocks = [block for page in PAGES for block in blocks(page)]
    commands = [block for block in all_blocks if block.language not in NO_COMMANDS]
    assert len(commands) > 20
    assert sum(block.needs is not None for block in commands) < len(commands) / 2


# ---- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    """Links within the repository need an existing file and anchor, others a well-formed
    address."""
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            parts = urlsplit(link)
            assert parts.scheme == "https", link
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), link
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in PAGES[1:]:
        name = page.relative_to(ROOT / "docs").as_posix()
        assert f"- {name}\n" in navigation, name


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("page", benchmark_tables.PAGES, ids=name)
def test_tables_match_the_results(page):
    """``python -m scripts.benchmark_tables`` writes them."""
    text = page.read_text("utf-8")
    assert "begin -->" in text
    assert benchmark_tables.with_tables(text) == text


def test_a_table_without_an_end():
    with pytest.raises(ValueError, match="expected <!-- cpu: end --> after"):
        benchmark_tables.with_tables("<!-- cpu: begin -->\n")


def test_the_picture_matches_the_results():
    """``python -m scripts.draw_speedups docs/speedups.svg`` draws it."""
    assert (ROOT / "docs" / "speedups.svg").read_text("utf-8") == draw_speedups.draw()


# ---- docstrings ----------------------------------------------------------------------------------


def arguments_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    a = function.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    return {each.arg for each in every}


def listed_arguments(docstring: str) -> list[str]:
    """Returns what stands before the colons of a docstring's "Args:" section."""
    section = re.search(r"^Args:\n((?: .*\n?|\n(?= ))+)", docstring, re.MULTILINE)
    return re.findall(r"^  (\S[^:\n]*):", section[1], re.MULTILINE) if section else []


@pytest.mark.parametrize("package", ["dsv3_jax", "pallas_kernels", "sharding"])
def test_docstrings_list_one_argument_a_line(package):
    """mkdocs does not find the type of "a, b: ...", and ``make docs`` ends with an error."""
    count = 0
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                listed = listed_arguments(ast.get_docstring(node) or "")
                unknown = [name for name in listed if name.strip("*") not in arguments_of(node)]
                assert not unknown, f"{file.relative_to(ROOT)}: {node.name}: {unknown}"
                count += len(listed)
    assert count > 20


def test_arguments_of_a_docstring():
    text = (
        "Adds.\n\nArgs:\n  a: a number,\n    see: above.\n  b, c: others.\n\nReturns:\n  sum: it.\n"
    )
    assert listed_arguments(text) == ["a", "b, c"]


# ---- results and scripts -------------------------------------------------------------------------


def test_every_result_is_quoted_or_read():
    """By a page, or by a test or command that reads the file. benchmarks/README.md, which lists
    all of them, does not count."""
    pages = [page for page in DOCUMENTS if page != ROOT / "benchmarks" / "README.md"]
    code = [
        path
        for folder in ("benchmarks", "scripts", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    quoted = "\n".join(page.read_text("utf-8") for page in pages)
    read = "\n".join(path.read_text("utf-8") for path in code)
    results = ROOT / "benchmarks" / "results"
    unused = [
        name
        for path in sorted(results.rglob("*.*"))
        for name in [path.relative_to(results).as_posix()]
        if not re.search(rf"(?<!\w){re.escape(name)}", quoted)
        and not re.search(rf"[\"/]{re.escape(name.removesuffix('.json'))}(\.json)?\"", read)
    ]
    assert not unused
    assert sum(1 for _ in results.rglob("*.json")) > 40


# A path, or a module after -m; a script of an earlier commit is named with it.
SCRIPT = re.compile(
    r"\b((?:scripts|benchmarks)/[\w/]+\.py|(?<=-m )(?:scripts|benchmarks)\.[\w.]*\w)"
    r"(`?\s+of\s+commit\s)?"
)


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_of_a_page_exist(page):
    if page.name == "CHANGELOG.md":
        return
    text = re.sub(r"-m\s+", "-m ", page.read_text("utf-8"))
    for name, is_earlier in SCRIPT.findall(text):
        path = name if name.endswith(".py") else name.replace(".", "/") + ".py"
        assert is_earlier or (ROOT / path).exists(), name
