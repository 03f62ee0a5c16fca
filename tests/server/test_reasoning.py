"""Reasoning is separated in the same way, whatever the pieces of a text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import dsv3_jax
from dsv3_jax.server.parsers.reasoning import ReasoningParser
from dsv3_jax.tokenizer import Tokenizer
from tests.server.reasoning_tokenizer import reasoning_tokenizer

CASES = [
    ("reasoning", "a < b</think>\n\nyes", ("a < b", "\n\nyes")),
    ("reasoning", "never ends </thin", ("never ends </thin", "")),
    ("reasoning", "</think>yes</think>", ("", "yes</think>")),
    ("reasoning", "<</think>", ("<", "")),
    ("undecided", "<think>why</think>yes", ("why", "yes")),
    ("undecided", " \n<think>why</think>yes", ("why", "yes")),
    ("undecided", "yes <think>no</think>", ("", "yes <think>no</think>")),
    ("undecided", "<thin", ("", "<thin")),
    ("undecided", "<thing>", ("", "<thing>")),
    ("undecided", "", ("", "")),
    ("content", "<think>x</think>", ("", "<think>x</think>")),
]


@pytest.mark.parametrize(("state", "text", "expected"), CASES)
def test_parts(state, text, expected):
    rng = random.Random(text)
    for _ in range(50):
        parser = ReasoningParser(state)
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
        ends = [*cuts, len(text)]
        pieces = [text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
        parts = [parser.add(piece, is_last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
        assert "".join(p.reasoning for p in parts) == expected[0]
        assert "".join(p.content for p in parts) == expected[1]


def test_the_prompt_decides_where_the_text_begins(tmp_path):
    tokenizer = reasoning_tokenizer(tmp_path)

    def parts(prompt: str, text: str) -> tuple[str, str]:
        ids = tokenizer.encode(prompt, split_special_tokens=False)
        result = ReasoningParser.of_prompt(tokenizer, ids).add(text, is_last=True)
        return result.reasoning, result.content

    assert parts("<｜Assistant｜><think>\n", "why</think>yes") == ("why", "yes")
    assert parts("<｜Assistant｜><think>", "why</think>yes") == ("why", "yes")
    assert parts("<｜Assistant｜></think>", "<think>yes") == ("", "<think>yes")
    assert parts("<｜Assistant｜>", "<think>why</think>yes") == ("why", "yes")
    plain = Tokenizer(Path(dsv3_jax.__file__).parent / "demo")
    parser = ReasoningParser.of_prompt(plain, plain.encode("x"))
    assert parser.add("<think>").content == "<think>"
