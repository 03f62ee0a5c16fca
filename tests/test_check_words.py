"""scripts/check_words.py refuses the right sentences, names their lines, and accepts the rest."""

import json

import pytest

from scripts import check_words
from scripts.check_words import Finding, markdown_texts, notebook_texts, python_texts


def found(source, read=python_texts):
    findings = sorted(check_words.findings(read(source), "f"))
    return [(finding.line, finding.found) for finding in findings]


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
    ],
)
def test_python_that_is_refused(source, line, words):
    assert found(source) == [(line, words)]


@pytest.mark.parametrize(
    "source",
    [
        '"""Offsets of the pages."""\n',  # begins with Of, but not as a word
        '"""Howell\'s method."""\n',
        'message = "Of the floor, says how"\n',  # neither a docstring nor a comment
        '"""Rows of the matrix. 3.14 to two places, a dot product, a device that holds it."""\n',
        '"""What it says."""  # words: ok\n',
        "# says how many  # words: ok\n",
        "# the ragged\nx = 1\n# product\n",  # two comments, not one sentence
    ],
)
def test_python_that_is_accepted(source):
    assert found(source) == []


def test_documents():
    page = "# By place\n\nRows of 4,096\ntokens; a `speed-up`.\n\n"
    page += "```text\nspeed-up\n```\n\nA speed-up.\n"
    assert found(page, markdown_texts) == [
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
    assert found(page, markdown_texts) == []


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
    assert found(notebook, notebook_texts) == expected


def test_a_finding_names_file_line_and_replacement():
    finding = Finding("a/b.py", 7, "of the floor", "of peak bandwidth")
    assert str(finding) == "a/b.py:7: 'of the floor': write of peak bandwidth"


def test_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "scripts").mkdir()
    bad, good = tmp_path / "scripts" / "bad.py", tmp_path / "README.md"
    bad.write_text('"""Who holds it."""\n', "utf-8")
    good.write_text("Text.\n", "utf-8")
    (tmp_path / "elsewhere.py").write_text('"""Who holds it."""\n', "utf-8")
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    assert check_words.main([]) == 1
    out = capsys.readouterr()
    assert out.out == ("scripts/bad.py:1: 'Who': write a subject and a verb, or an imperative\n")
    assert out.err == "scripts: 1\n"
    assert check_words.main([str(good), str(tmp_path / "elsewhere.py")]) == 0
    assert capsys.readouterr().out == ""
