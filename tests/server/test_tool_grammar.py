"""Answers that have to call a tool: what their grammar allows is what the parsers read."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest

from dsv3_jax import chat_formats
from dsv3_jax.server.grammar import Grammars
from dsv3_jax.server.parsers.events import CallArguments, CallBegin
from dsv3_jax.server.parsers.tool_formats import find_tool_parser
from dsv3_jax.server.tool_grammar import tool_call_grammar
from tests.server.scripted import family_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Ōsaka"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "end", "parameters": {"maxProperties": 0}}},
]
END = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return family_tokenizer(tmp_path_factory.mktemp("tokenizer"), "deepseek-v3")


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.1", "kimi-k2"])
def test_random_texts_of_the_grammar_are_valid_calls(tokenizer, name, parallel):
    tokenizer = tokenizer.with_chat_template(chat_formats.read(name))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [END])
    grammars.load()
    source = tool_call_grammar(tokenizer, TOOLS, parallel=parallel)
    names, counts = set(), set()
    for seed in range(12):
        rng, grammar, tokens = random.Random(seed), grammars.start(source), []
        while True:
            bits = np.unpackbits(grammar.mask().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            if END in allowed:
                assert allowed == [END]
                break
            # Short arguments: as few digits and spaces as possible.
            enders = [t for t in allowed if tokenizer.decode([t]).strip().endswith(("}", "e"))]
            token = rng.choice(enders if enders and rng.random() < 0.7 else allowed)
            grammar.accept(token)
            tokens.append(token)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        events = find_tool_parser(tokenizer)().add(text, is_last=True)
        begun = [event for event in events if isinstance(event, CallBegin)]
        names |= {event.name for event in begun}
        counts.add(len(begun))
        for call in begun:
            arguments = "".join(
                e.text for e in events if isinstance(e, CallArguments) and e.index == call.index
            )
            schema = next(
                tool["function"]["parameters"]
                for tool in TOOLS
                if tool["function"]["name"] == call.name
            )
            jsonschema.validate(json.loads(arguments), schema)
        assert {type(event) for event in events} <= {CallBegin, CallArguments}
    assert names == {"get_weather", "end"}
    assert (counts == {1}) == (not parallel)


def test_refusals(tokenizer):
    other = tokenizer.with_chat_template(chat_formats.read("deepseek-v3.2"))
    with pytest.raises(
        ValueError, match="tool_choice: expected auto or none, as there is no gramm"
    ):
        tool_call_grammar(other, TOOLS, parallel=True)
    function = {"name": "f", "parameters": {"properties": {"x": {"multipleOf": 999983}}}}
    with pytest.raises(ValueError, match="tools: multipleOf: expected 10000 or less"):
        tool_call_grammar(tokenizer, [{"function": function}], parallel=True)
