"""Structured output: answers match, other requests do not notice, bad grammars are refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time

import jsonschema
import numpy as np
import openai
import pydantic
import pytest

from dsv3_jax.server.grammar import AnswerGrammar, GrammarError, Grammars, GrammarSource
from dsv3_jax.server.parsers.answer_parser import BEGIN, END
from tests.server.reasoning_tokenizer import reasoning_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "ü", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def schema_format(schema, **fields):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


def body(**fields):
    messages = [{"role": "user", "content": "x = "}]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 120, **fields}


def test_json_schema(client):
    choice = client.chat.completions.create(**body(response_format=schema_format(PERSON))).choices[
        0
    ]
    jsonschema.validate(json.loads(choice.message.content), PERSON)
    assert choice.finish_reason == "stop"


def test_the_clients_own_types(client):
    """openai sends the schema of a pydantic class, with strict, and parses the answer."""

    class Point(pydantic.BaseModel):
        x: int = pydantic.Field(ge=0, le=9)
        label: str = pydantic.Field(max_length=5)

    answer = client.chat.completions.parse(**body(response_format=Point))
    assert isinstance(answer.choices[0].message.parsed, Point)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["left ", "rïght"]}, "left |rïght"),
        ({"grammar": 'start: "x" ("=" /[0-9]/)?'}, "x(=[0-9])?"),
        ({"json": '{"const": [1, {"a": null}]}'}, r'\[\s*1,\s*{\s*"a":\s*null\s*}\s*\]'),
        ({"json": {"type": "boolean"}}, "true|false"),
    ],
)
def test_structured_outputs(server, form, pattern):
    fields = {"model": "demo", "prompt": "x", "temperature": 0, "max_tokens": 60}
    answer = server.post("/v1/completions", {**fields, "structured_outputs": form})
    assert re.fullmatch(pattern, answer["choices"][0]["text"])
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.slow
def test_sampled_answers_match_and_others_do_not_change(server):
    formats = [schema_format(PERSON), schema_format(PERSON["properties"]["tags"], strict=True)]

    async def run():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def plain():
                answer = await client.chat.completions.create(**body(max_tokens=40))
                return answer.choices[0].message.content

            async def structured(seed):
                fields = body(temperature=1, seed=seed, response_format=formats[seed % 2])
                answer = await client.chat.completions.create(**fields)
                return [choice.message.content for choice in answer.choices]

            alone = await plain()
            answers = []
            for seed in range(0, 32, 4):
                group = [structured(seed + i) for i in range(4)]
                text, *rest = await asyncio.gather(plain(), *group)
                assert text == alone
                answers += rest
            return answers

    for seed, answers in enumerate(asyncio.run(run())):
        for answer in answers:
            jsonschema.validate(json.loads(answer), formats[seed % 2]["json_schema"]["schema"])


def test_a_stream_joins_to_the_same_text(client):
    fields = body(response_format={"type": "json_object"}, max_tokens=30)
    whole = client.chat.completions.create(**fields).choices[0].message.content
    chunks = client.chat.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert whole.startswith("{")


def nested(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BAD_SCHEMAS = [
    ({"type": "foo"}, "Invalid type: foo"),
    ({"$ref": "#"}, "no text matches|NoExtension"),
    ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "NoExtension"),
    ({"$ref": "http://127.0.0.1:1/x"}, "not present"),
    ({"type": "string", "pattern": "(a+)+$("}, "unclosed group"),
    ({"not": {"type": "string"}}, "Unimplemented keys"),
    ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    ({"type": "integer", "maximum": 10**400}, "out of range"),
    ({"multipleOf": 999983}, "multipleOf: expected 10000 or less"),
    ({"multipleOf": 10**400}, "out of range"),
    ({"multipleOf": 7**300}, "multipleOf: expected 10000 or less"),
    ({"allOf": [{"multipleOf": k} for k in (0.97, 89, 7)]}, "multipleOf: expected 10000 or less"),
    (nested(120), "at most 100 levels"),
    ({"allOf": [{"properties": {f"a{i}": {"type": "string"}}} for i in range(500)]}, "too large"),
    ({"enum": ["x" * 100_000, "y" * 100_000]}, "at most 131072 characters"),
]


@pytest.mark.parametrize(("schema", "message"), BAD_SCHEMAS, ids=[m for _, m in BAD_SCHEMAS])
def test_bad_schemas_are_refused(server, schema, message):
    server.wait_until_idle()
    before, began = server.engine.stats().steps, time.monotonic()
    fields = body(response_format=schema_format(schema))
    status, error = server.refused("/v1/chat/completions", fields)
    assert (status, error["param"]) == (400, "response_format")
    assert re.search(message, error["message"])
    assert time.monotonic() - began < 5
    assert server.engine.stats().steps == before
    assert server.service.admission.open == 0


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "response_format: "),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"structured_outputs": {}}, "structured_outputs", "expected one of json, .* got none"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex, c"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs", "unclosed character class"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "expected a JSON schema"),
        ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs", "unknown name"),
        ({"structured_outputs": {"grammar": "start: x\nx: x"}}, "structured_outputs", "NoExten"),
        (
            {"structured_outputs": {"grammar": 'start: %json {"multipleOf": 999983}'}},
            "structured_outputs",
            "expected none with %json",
        ),
        (
            {
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
            "response_format",
            "expected none with structured_outputs",
        ),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "ignore_eos",
            "expected none with response_format",
        ),
    ],
)
def test_errors_name_the_field(server, fields, param, message):
    status, error = server.refused("/v1/chat/completions", body(**fields))
    assert (status, error["param"]) == (400, param)
    assert re.search(message, error["message"])


def test_a_grammar_that_grows_too_complex_ends_its_request(server, monkeypatch):
    def accept(grammar: AnswerGrammar, token: int) -> None:
        raise GrammarError("response_format: the grammar became too complex")

    monkeypatch.setattr(AnswerGrammar, "accept", accept)
    fields = body(response_format=schema_format(PERSON))
    status, error = server.refused("/v1/chat/completions", fields)
    assert (status, error["param"]) == (400, "response_format")
    server.wait_until_idle()
    server.engine.check_integrity()


# Without an engine: what a grammar allows, token by token.

W = 2080


@pytest.fixture(scope="module")
def grammars(tmp_path_factory) -> Grammars:
    it = Grammars(reasoning_tokenizer(tmp_path_factory.mktemp("tokenizer")), W, [1])
    it.load()
    return it


def allowed(grammar: AnswerGrammar) -> set[int]:
    bits = np.unpackbits(grammar.mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def walk(grammars: Grammars, grammar: AnswerGrammar, text: str) -> None:
    plain = {"add_special_tokens": False, "split_special_tokens": False}
    for token in grammars._tokenizer.encode(text, **plain):
        assert token in allowed(grammar)
        grammar.accept(token)


SOURCE = GrammarSource("regex", "(ab|cd)!", "structured_outputs")


def chain(levels: int, step: str) -> dict[str, object]:
    definitions: dict[str, object] = {
        f"a{i}": {step: {"$ref": f"#/$defs/a{i + 1}"}} for i in range(levels)
    }
    return {"$defs": {**definitions, f"a{levels}": {}}, **definitions["a0"]}


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource.of_schema(chain(2900, "items"), "x"),
        GrammarSource.of_schema(chain(2000, "additionalProperties"), "x"),
        GrammarSource(
            "lark", "start: a0\n" + "\n".join(f"a{i}:a{i + 1}" for i in range(2500)), "x"
        ),
    ],
    ids=["items", "additionalProperties", "rules"],
)
def test_deep_grammars_do_not_end_the_process(grammars, source):
    """llguidance recurses; a thread's usual stack of 8 MiB is not enough."""
    if source.kind == "lark":
        source = dataclasses.replace(source, text=source.text + '\na2500:"x"')
    assert allowed(grammars.start(source))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {f"p{i}": {} for i in range(1001)}}, "properties of an object: .* 1000"),
        ({"pattern": "a" * 2**15 + "a"}, "characters of a pattern: expected at most 32768"),
    ],
)
def test_what_takes_quadratic_time_is_refused(schema, message):
    with pytest.raises(ValueError, match=f"^x: {message}"):
        GrammarSource.of_schema({"items": schema}, "x")
    with pytest.raises(ValueError, match="at most 32768 characters, got 32769"):
        GrammarSource("regex", "a" * 2**15 + "a", "x").grammar()


def test_the_end_is_allowed_after_the_text_alone(grammars):
    grammar = grammars.start(SOURCE)
    walk(grammars, grammar, "ab")
    assert 1 not in allowed(grammar)
    walk(grammars, grammar, "!")
    assert allowed(grammar) == {1}


@pytest.mark.parametrize("opened", [True, False])
def test_the_grammar_applies_after_reasoning(grammars, opened):
    tokenizer = grammars._tokenizer
    prompt = tokenizer.encode("<｜Assistant｜>" + BEGIN * opened, split_special_tokens=False)
    grammar = grammars.start(SOURCE, prompt)
    if not opened:
        begin = tokenizer.encode(BEGIN, split_special_tokens=False)[-1]
        plain = allowed(grammars.start(SOURCE))
        assert allowed(grammar) == {begin, *plain}
        walk(grammars, grammar, BEGIN)
    walk(grammars, grammar, "anything { at all\n")
    assert 1 not in allowed(grammar)
    walk(grammars, grammar, END + "cd!")
    assert allowed(grammar) == {1}


def test_without_reasoning_the_grammar_applies_at_once(grammars):
    tokenizer = grammars._tokenizer
    prompt = tokenizer.encode("<｜Assistant｜>", split_special_tokens=False)
    closed = tokenizer.encode("<｜Assistant｜>" + END, split_special_tokens=False)
    plain = allowed(grammars.start(SOURCE))
    assert allowed(grammars.start(SOURCE, closed)) == plain
    grammar = grammars.start(SOURCE, prompt)
    walk(grammars, grammar, "ab!")
    assert allowed(grammar) == {1}


def test_control_tokens_are_not_text(grammars):
    free = grammars.start(GrammarSource("regex", r"(.|\n)*", "x"))
    control = grammars._tokenizer._control
    assert len(control) >= 7
    assert allowed(free) & control.keys() == {1}


def test_the_cache_is_bounded_and_keeps_what_was_used_last(grammars):
    grammars._compiled.clear()
    sources = [GrammarSource("regex", f"a{{{i}}}", "x") for i in range(1, 41)]
    for source in sources:
        grammars.start(source)
        grammars.start(sources[0])
    assert len(grammars._compiled) == 32
    assert sources[0] in grammars._compiled
    assert sources[1] not in grammars._compiled
    again = GrammarSource("regex", "a{1}", "another field")
    assert again in grammars._compiled


def test_schemas_that_differ_in_white_space_are_one(grammars):
    texts = ['{"type":  "boolean"}', '{\n"type":"boolean"}']
    sources = [GrammarSource.of_schema(json.loads(text), "x") for text in texts]
    assert sources[0] == sources[1]


def test_white_space_ends(grammars):
    grammar = grammars.start(GrammarSource.of_schema({"type": "object"}, "x"))
    walk(grammars, grammar, "{\n" + " " * 60)
    for _ in range(40):
        spaces = [
            t for t in allowed(grammar) if not grammars._tokenizer.decode([t]).strip(" \t\r\n")
        ]
        if not spaces:
            break
        grammar.accept(max(spaces))
    assert not spaces


def test_errors_are_of_one_line(grammars):
    with pytest.raises(GrammarError, match=r"^x: .*unclosed group") as raised:
        grammars.start(GrammarSource("regex", "(", "x"))
    assert "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"(.*a.{0,40}b){12}", r"((a{1,1000}){1,1000}){1,1000}"])
def test_a_hostile_pattern_ends_within_its_limits(grammars, pattern):
    rng = np.random.default_rng(0)
    longest, message = 0.0, ""
    try:
        for _ in range(20):
            grammar = grammars.start(GrammarSource("regex", pattern, "x"))
            for _ in range(200):
                began = time.perf_counter()
                tokens = allowed(grammar)
                longest = max(longest, time.perf_counter() - began)
                if tokens == {1}:
                    break
                grammar.accept(int(rng.choice(sorted(tokens - {1}))))
    except GrammarError as error:
        message = str(error)
    assert message.startswith("x: the grammar became too complex")
    assert longest < 1


def test_a_tokenizer_that_cannot_be_read(grammars, monkeypatch, caplog):
    monkeypatch.setattr(grammars._tokenizer, "to_json", lambda: "{}")
    other = Grammars(grammars._tokenizer, W, [1])
    other.load()
    assert "structured output is refused" in caplog.text
    with pytest.raises(GrammarError, match="x: expected none, as llguidance cannot read"):
        other.start(GrammarSource("regex", "a", "x"))
