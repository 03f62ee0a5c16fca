"""scripts/check_words.py refuses the right sentences, names their lines, and accepts the rest."""

import json

import pytest

from scripts import check_words
from scripts.check_words import (
    Finding,
    markdown_texts,
    notebook_texts,
    package_of,
    python_names,
    python_texts,
)


def words_in(source, read=python_texts):
    findings = sorted(check_words.findings(read(source), "f"))
    return [(finding.line, finding.words) for finding in findings]


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ('"""Of 64 bytes, in a step."""\n', 1, "Of"),
        ('def f():\n    """How it is set."""\n', 2, "How"),
        ('class A:\n    """A step."""\n\n    n: int\n    """What it has."""\n', 5, "What"),
        ('async def f():\n    """\n    Where it stands."""\n', 2, "Where"),
        ('"""A step\nat 98% of\nthe floor."""\n', 2, "of the floor"),
        ("x = 1  # says how many\n", 1, "says how"),
        ("x = 1\n# the ragged\n# product comes last\n", 2, "ragged product"),
        ('"""Which pages a sequence has."""\n', 1, "Which"),
        ("# 1,152 bytes a token\n", 1, "bytes a token"),
        ("# the pages lie there\n", 1, "pages lie"),
        ("# a cost of\n# which\n", 1, "of which"),
        ('raise ValueError("mesh: expected rows of\\na batch")\n', 1, "rows of a batch"),
        ('raise ValueError(f"{x}: expected --json " f"beside it")\n', 1, "beside"),
        ('raise ValueError(\n    "a" if x else "wants of"\n) from None\n', 2, "wants of"),
        ('add("--n", help="of each prompt")\n', 1, "of"),
        ('Parser(description="speed-up")\n', 1, "speed-up"),
    ],
)
def test_python_that_is_refused(source, line, words):
    assert words_in(source) == [(line, words)]


@pytest.mark.parametrize(
    "source",
    [
        '"""Offsets of the pages."""\n',  # begins with Of, but not as a word
        '"""Howell\'s method."""\n',
        'message = "Of the floor, says how"\n',  # not prose that a user or a reader sees
        'raise ValueError("of 3, got 4")\n',  # a message need not begin with its subject
        'raise ValueError("mesh: says how")  # words: ok\n',
        'raise ValueError(f"{says_how(x)}")\n',
        "raise\n",
        'add("--n", help="number of drafts")\n',
        'add("--n", help=text)\n',
        '"""A layer stands in for the model; a tree behind the house."""\n',
        '"""Rows of the matrix. 3.14 to two places, a dot product, a device that holds it."""\n',
        '"""What it says."""  # words: ok\n',
        "# says how many  # words: ok\n",
        "# the ragged\nx = 1\n# product\n",  # two comments, not one sentence
    ],
)
def test_python_that_is_accepted(source):
    assert words_in(source) == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("found = 1\n", ["found"]),
        ("for _kept in x:\n    pass\n", ["_kept"]),
        ("def turn(x, *, how): ...\n", ["turn", "how"]),
        ("class A:\n    lies: int\n", ["lies"]),
        ("self.feed, b = x\n", ["feed"]),
        ("f = lambda held: (said := held)\n", ["held", "said"]),
    ],
)
def test_names_that_are_refused(source, names):
    assert sorted(name for _, name in python_names(source)) == sorted(names)


@pytest.mark.parametrize(
    "source",
    [
        "foundation = turnover = 1\n",
        "x = match.found + f(how=1)\n",  # uses of other people's names
        "found = 1  # words: ok\n",
    ],
)
def test_names_that_are_accepted(source):
    assert list(python_names(source)) == []


def test_documents():
    page = "# By place\n\nRows of 4,096\ntokens; a `speed-up`.\n\n"
    page += "```text\nspeed-up\n```\n\nA speed-up.\n"
    assert words_in(page, markdown_texts) == [
        (1, "By place"),
        (3, "Rows of 4,096 tokens"),
        (10, "speed-up"),
    ]


@pytest.mark.parametrize(
    "page",
    [
        "A speed-up. <!-- words: ok -->\n",
        "<!-- decode: begin -->\n| of the floor |\n<!-- decode: end -->\n",
        "Text:\n\n    speed-up\n",
        "How it works is below.\n",  # openings are refused in docstrings alone
    ],
)
def test_documents_that_are_accepted(page):
    assert words_in(page, markdown_texts) == []


def test_notebooks():
    cells = [
        {"cell_type": "markdown", "source": ["# A page\n", "\n", "A speed-up.\n"]},
        {"cell_type": "code", "source": ["x = 1\n", "# by place\n"]},
    ]
    notebook = json.dumps({"cells": cells}, indent=1)
    lines = notebook.splitlines()
    expected = [
        (1 + next(i for i, line in enumerate(lines) if words in line), words)
        for words in ("speed-up", "by place")
    ]
    assert words_in(notebook, notebook_texts) == expected


def test_a_finding_names_file_line_and_replacement():
    finding = Finding("a/b.py", 7, "of the floor", "of peak bandwidth")
    assert str(finding) == "a/b.py:7: 'of the floor': write of peak bandwidth"


def test_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "scripts").mkdir()
    bad, good = tmp_path / "scripts" / "bad.py", tmp_path / "README.md"
    bad.write_text('"""Who holds it."""\n\nfound = 1\n', "utf-8")
    good.write_text("Text.\n", "utf-8")
    (tmp_path / "elsewhere.py").write_text('"""Who holds it."""\n', "utf-8")
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    assert check_words.main([]) == 1
    out = capsys.readouterr()
    first, second = out.out.splitlines()
    assert first == "scripts/bad.py:1: 'Who': write a subject and a verb, or an imperative"
    assert second.startswith("scripts/bad.py:3: 'found': write the noun ")
    assert out.err == "scripts: 2\n"
    assert check_words.main([str(good), str(tmp_path / "elsewhere.py")]) == 0
    assert capsys.readouterr().out == ""


def test_packages_of_files():
    files = "dsv3_jax/cli/main.py", "dsv3_jax/model.py", "scripts/x.py", "README.md"
    assert [package_of(file) for file in files] == ["dsv3_jax", "dsv3_jax", "scripts", "README.md"]
