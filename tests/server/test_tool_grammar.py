"""Answers that have to call a tool: what their grammar allows is what the parsers read."""

from __future__ import annotations

import json
import random
import time

import jsonschema
import numpy as np
import pytest

from dsv3_jax import chat_formats
from dsv3_jax.server.grammar import Grammars
from dsv3_jax.server.parsers.tool_formats import find_tool_parser
from dsv3_jax.server.parsers.tool_parser import CallArguments, CallBegin
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
@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "kimi-k2"])
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
            enders = [
                t for t in allowed if tokenizer.decode([t]).strip().endswith(("}", "e", "</"))
            ]
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


DSML_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "short": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 3}, {"type": "null"}]},
        "path": {"type": "string", "pattern": "^[a-z]+/[0-9]$"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/Choice"}},
        "choice": {"$ref": "#/$defs/Choice"},
        "any": {"description": "anything"},
    },
    "required": ["text"],
    "$defs": {"Choice": {"enum": ["a", "ab", 3]}},
}


def parameter(key: str, flag: str, value: str) -> str:
    return f'<｜DSML｜parameter name="{key}" string="{flag}">{value}</｜DSML｜parameter>\n'


@pytest.mark.parametrize(
    ("parameters", "refused"),
    [
        ([("text", "true", "<b>x</b>\n</p </")], None),
        ([("text", "true", "")], None),
        ([("text", "false", "3")], "fal"),
        ([("text", "true", "a"), ("short", "true", "abc")], None),
        ([("text", "true", "a"), ("short", "true", "a")], "｜"),
        ([("text", "true", "a"), ("short", "true", "abcd")], "d"),
        ([("text", "true", "a"), ("short", "false", "null")], None),
        ([("text", "true", "a"), ("path", "true", "ab/3")], None),
        ([("text", "true", "a"), ("path", "true", "ab")], "</"),
        ([("text", "true", "a"), ("list", "false", '["a", 3]')], None),
        ([("text", "true", "a"), ("list", "false", "[4]")], "4"),
        ([("text", "true", "a"), ("choice", "true", "ab")], None),
        ([("text", "true", "a"), ("choice", "false", "3")], None),
        ([("text", "true", "a"), ("choice", "true", "3")], "3"),
        ([("text", "true", "a"), ("any", "false", '{"a": [1]}')], None),
        ([("text", "true", "a"), ("any", "true", '{"a": [1]}')], None),
        ([("text", "true", "a"), ("other", "true", "b")], "other"),
        ([("any", "true", "a"), ("text", "true", "a")], "any"),
        ([], "\n"),
    ],
)
def test_values_in_dsml(dsml_grammars, parameters, refused):
    """Strings are raw text, other values JSON, and both obey the schema."""
    tokenizer, grammars = dsml_grammars
    body = "".join(parameter(*each) for each in parameters) or "\n"
    text = f'<｜DSML｜invoke name="f">\n{body}</｜DSML｜invoke>\n'
    text = f"\n\n<｜DSML｜function_calls>\n{text}</｜DSML｜function_calls>"
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)
    function = {"name": "f", "parameters": DSML_SCHEMA}
    grammar = grammars.start(tool_call_grammar(tokenizer, [{"function": function}], parallel=False))
    for token in [*ids, END]:
        if not grammar.mask()[token // 32] >> np.uint32(token % 32) & 1:
            assert refused is not None
            assert tokenizer.decode([token])[0] == refused[0]
            return
        if token != END:
            grammar.accept(token)
    assert refused is None


def test_text_cannot_spell_the_end_of_a_parameter(dsml_grammars):
    """Ordinary tokens may spell the mark, but not the closing tag, which parsers would read."""
    tokenizer, grammars = dsml_grammars
    function = {"name": "f", "parameters": DSML_SCHEMA}
    source = tool_call_grammar(tokenizer, [{"function": function}], parallel=False)
    begin = '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    begin += parameter("text", "true", "").partition("</")[0]
    for spelled, is_allowed in (
        ("a ｜DSML｜ b", True),
        ("a </｜DSML｜ b", False),
        ("a <｜DSML｜ b", False),
    ):
        grammar = grammars.start(source)
        for token in tokenizer.encode(begin, add_special_tokens=False, split_special_tokens=False):
            grammar.accept(token)
        allowed = []
        for token in tokenizer.encode(spelled, add_special_tokens=False, split_special_tokens=True):
            allowed.append(bool(grammar.mask()[token // 32] >> np.uint32(token % 32) & 1))
            if not allowed[-1]:
                break
            grammar.accept(token)
        assert all(allowed) == is_allowed


@pytest.fixture(scope="module")
def dsml_grammars(tokenizer):
    tokenizer = tokenizer.with_chat_template(chat_formats.read("deepseek-v3.2"))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [END])
    grammars.load()
    yield tokenizer, grammars
    grammars.close()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"anyOf": [{}]}, r"expected parameters of .* for DSML, got \['anyOf'\]"),
        ({"properties": {'a"': {}}}, "a parameter's name without quotation marks"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, r"got \['format'\]"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "a \\$ref to a part of the schema"),
        (
            {"properties": {"a": {"$ref": "#/properties/a"}}},
            "no circle of references",
        ),
        ({"properties": {"a": {"const": "x｜DSML｜"}}}, "a choice without ｜DSML｜"),
    ],
)
def test_refusals_of_dsml(dsml_grammars, parameters, message):
    with pytest.raises(ValueError, match=message):
        tool_call_grammar(
            dsml_grammars[0],
            [{"function": {"name": "f", "parameters": parameters}}],
            parallel=True,
        )


def doubled(levels: int, kind: str) -> dict[str, object]:
    """Returns a schema whose last definition is reached by 2^levels paths."""
    definitions: dict[str, object] = {
        f"a{i}": {kind: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(levels)
    }
    definitions[f"a{levels}"] = {"enum": ["x", 1]}
    properties = {f"p{i}": {"$ref": f"#/$defs/a{i}"} for i in range(levels)}
    return {"properties": properties, "$defs": definitions}


@pytest.mark.parametrize("kind", ["anyOf", "oneOf"])
def test_a_dsml_grammar_has_each_part_of_a_schema_once(dsml_grammars, kind):
    tokenizer, grammars = dsml_grammars
    lengths = []
    for levels in (12, 24, 48):
        function = {"name": "f", "parameters": doubled(levels, kind)}
        source = tool_call_grammar(tokenizer, [{"function": function}], parallel=False)
        grammars.start(source)
        lengths.append(len(source.text) / levels)
    assert max(lengths) < 1.5 * min(lengths)
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)}
    many = {"properties": {f"p{i}": {"enum": [f"{i:090}"]} for i in range(1000)}}
    definitions = {f"d{i}": {"type": "object"} for i in range(1000)}
    items = {f"p{i}": {"items": {"$ref": f"#/$defs/d{i}"}} for i in range(1000)}
    for schema, message in (
        ({"properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": chain}, "100 levels of anyOf"),
        (many, "schemas whose grammar has at most 131072 characters"),
        ({"properties": items, "$defs": definitions}, "whose grammar has at most 131072"),
    ):
        began = time.monotonic()
        with pytest.raises(ValueError, match=message):
            tool_call_grammar(
                tokenizer, [{"function": {"name": "f", "parameters": schema}}], parallel=False
            )
        assert time.monotonic() - began < 5  # 0.02


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [1]},
        {"required": [{}]},
        {"required": 3},
        {"maxProperties": "x"},
        {"$defs": 3, "properties": {"x": {"$ref": "#/$defs/a"}}},
        *(
            {"properties": {"x": schema}}
            for schema in (
                *(3, {"type": 3}, {"type": []}, {"enum": 3}, {"anyOf": {}}, {"anyOf": []}),
                *({"$ref": 3}, {"type": "string", "minLength": "0}x"}, {"allOf": 3}),
                *({"type": "string", "maxLength": 2**31}, {"type": "string", "pattern": 3}),
            )
        ),
    ],
)
def test_malformed_schemas_of_dsml_are_refused(dsml_grammars, schema):
    with pytest.raises(ValueError, match=r"^tools: expected [^\n]*$"):
        tool_call_grammar(
            dsml_grammars[0], [{"function": {"name": "f", "parameters": schema}}], parallel=True
        )


def test_a_pattern_cannot_leave_its_expression(dsml_grammars):
    """Otherwise it could add rules whose schemas have no limits."""
    tokenizer, grammars = dsml_grammars
    for pattern, text in (
        ("^a/b$", "a/b"),
        (r"^a\/b$", "a/b"),
        (r"^\\/$", "\\/"),
        ("^a\nb$", "a\nb"),
    ):
        function = {
            "name": "f",
            "parameters": {"properties": {"x": {"type": "string", "pattern": pattern}}},
        }
        source = tool_call_grammar(tokenizer, [{"function": function}], parallel=False)
        grammar = grammars.start(source)
        text = f'<｜DSML｜invoke name="f">\n{parameter("x", "true", text)}</｜DSML｜invoke>\n'
        text = f"\n\n<｜DSML｜function_calls>\n{text}</｜DSML｜function_calls>"
        for token in tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False):
            assert grammar.mask()[token // 32] >> np.uint32(token % 32) & 1
            grammar.accept(token)


@pytest.mark.parametrize("name", ["deepseek-v3.1", "deepseek-v3.2", "kimi-k2"])
def test_a_required_call_does_not_begin_in_the_reasoning(tokenizer, name):
    """The grammar would not see it there."""
    tokenizer = tokenizer.with_chat_template(chat_formats.read(name))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [END])
    grammars.load()
    source = tool_call_grammar(tokenizer, TOOLS, parallel=True)
    prompt = tokenizer.encode("x<think>", split_special_tokens=False)
    free = grammars.start(source, prompt).mask()
    begin = find_tool_parser(tokenizer).ends_reasoning[-1]
    ids = tokenizer.encode(begin, add_special_tokens=False, split_special_tokens=False)
    allowed = [bool(free[i // 32] >> np.uint32(i % 32) & 1) for i in ids]
    assert not all(allowed)
    grammars.close()


def test_refusals(tokenizer):
    function = {"name": "f", "parameters": {"properties": {"x": {"multipleOf": 999983}}}}
    with pytest.raises(ValueError, match="tools: multipleOf: expected 10000 or less"):
        tool_call_grammar(tokenizer, [{"function": function}], parallel=True)
