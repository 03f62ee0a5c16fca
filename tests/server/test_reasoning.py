"""Reasoning is separated in the same way, whatever the pieces of a text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import dsv3_jax
from dsv3_jax.server.parsers.answer_parser import ReasoningParser
from dsv3_jax.tokenizer import Tokenizer
from tests.server.reasoning_tokenizer import reasoning_tokenizer
from tests.server.test_messages import TOOL
from tests.server.test_tools import TOOLS, speaking

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


@pytest.mark.parametrize("piece_tokens", [1, 10**6])
@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("deepseek-r1", ""),
        ("deepseek-v3.1", ""),
        ("deepseek-v3.2", ""),
        ("kimi-k2-thinking", "<think>"),
        ("kimi-k2-thinking", "\n<think>"),
    ],
)
def test_stop_strings_count_after_the_reasoning(
    scripted_server, engine, name, before, has_tools, piece_tokens
):
    """As vLLM does, and the services of the vendors. Both APIs, streamed and whole."""
    server, eos = scripted_server[0], engine.tokenizer.eos_token
    engine.text = f"{before}Question: why?\nSo.</think>It is 4.\nQuestion: what?{eos}"
    engine.piece_tokens = piece_tokens
    stops = ["\nQ", "Question:", "\n"]
    fields = {"messages": [{"role": "user", "content": "x"}], "model": "demo", "max_tokens": 99}
    if name in ("deepseek-v3.1", "deepseek-v3.2"):
        fields["chat_template_kwargs"] = {"thinking": True}
    with speaking(scripted_server, name):
        tools = {"tools": TOOLS} if has_tools else {}
        chat = server.post("/v1/chat/completions", {**fields, **tools, "stop": stops})
        tools = {"tools": [TOOL]} if has_tools else {}
        message = server.post("/v1/messages", {**fields, **tools, "stop_sequences": stops})
    (choice,) = chat["choices"]
    assert choice["message"]["reasoning_content"] == "Question: why?\nSo."
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It is 4.", "stop")
    thinking, text = message["content"]
    assert (thinking["thinking"], text["text"]) == ("Question: why?\nSo.", "It is 4.")
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "\n")


def test_an_answer_without_reasoning_ends_at_once(scripted_server, engine):
    """White space at its beginning counts, although reasoning could have followed it."""
    engine.text = "\n\nQuestion"
    fields = {"messages": [{"role": "user", "content": "x"}], "model": "demo", "stop": ["\n\nQ"]}
    with speaking(scripted_server, "kimi-k2-thinking"):
        (choice,) = scripted_server[0].post("/v1/chat/completions", fields)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


def test_reasoning_tokens_are_those_that_were_generated(scripted_server, engine):
    """They never exceed the output's, also if the text ends inside a character."""
    tokenizer = engine.tokenizer
    rng = random.Random(0)
    for _ in range(40):
        parts = ["世", "🙂", "a", "é", " ", "\n", "word "]
        thought = "".join(rng.choice(parts) for _ in range(rng.randrange(9)))
        ids = tokenizer.encode(thought, add_special_tokens=False)
        if is_whole := rng.random() < 0.5:
            engine.ids = [*ids, *tokenizer.encode("</think>ok", split_special_tokens=False)[1:]]
        else:
            ids = engine.ids = ids[: rng.randrange(1, len(ids) + 1)] if ids else [7]
        fields = {"model": "demo", "input": "x", "chat_template_kwargs": {"thinking": True}}
        answer = scripted_server[0].post("/v1/responses", fields)
        usage = answer["usage"]
        assert usage["output_tokens"] == len(engine.ids)
        assert usage["output_tokens_details"]["reasoning_tokens"] == len(ids), is_whole
    engine.ids = None
