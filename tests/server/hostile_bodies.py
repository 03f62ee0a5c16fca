"""A thousand bodies that a server has to refuse."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

Body = tuple[str, bytes]
"""Path and content of a request."""

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "demo", "prompt": "x = ", "max_tokens": 2, "temperature": 0},
    CHAT: {
        "model": "demo",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "chat_template_kwargs": {"eos_token": "x"},
    },
    MESSAGES: {
        "model": "demo",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "max_tokens": 2,
        "system": "y",
    },
    "/v1/responses": {
        "model": "demo",
        "input": [{"role": "user", "content": "x"}],
        "max_output_tokens": 2,
        "tools": [],
    },
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1, 2]},
}

_NUMBERS = "temperature top_p n seed presence_penalty frequency_penalty max_tokens top_k min_p"
_NUMBERS += " repetition_penalty min_tokens priority"
_LISTS = "stop_token_ids logit_bias stream_options stop messages prompt structured_outputs"
_NO_NUMBERS = [
    *("NaN", "Infinity", "-Infinity", "1e999", "-1" + "0" * 400, "9" * 5000, str(2**64)),
    *('"1"', "[]", "{}", "true", '"\\ud800"', "[" * 900 + "]" * 900, "1e-999e1", "0x10", "+1"),
]
_NO_LISTS = ["1", "true", "NaN", '[{"x": [1e999]}]', '{"\\u0000": {}}', '["", [[]]]', "[[[[]]]]"]
_BAD_UTF8 = [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xe2\x82", b"\x80"]
_NAMES = ["__proto__", "__class__", "model ", "Model", "prompt\n", "\x00", "\ud800", "{{7*7}}", "é"]


def hostile_bodies() -> list[Body]:
    """Returns all bodies."""
    return [
        *_wrong_values(),
        *_cut_bodies(),
        *_invalid_utf8(),
        *_random_bytes(),
        *_unknown_fields(),
        *_nested(),
        *_grammars(),
        *_template_arguments(),
    ]


def _with(path: str, name: str, value: str) -> Body:
    """Returns a valid body with one more field, whose value need not be JSON."""
    fields = {key: field for key, field in VALID[path].items() if key != name}
    return path, (json.dumps(fields)[:-1] + f', "{name}": {value}}}').encode()


def _wrong_values() -> Iterator[Body]:
    for path in (COMPLETIONS, CHAT):
        for name in _NUMBERS.split():
            yield from (_with(path, name, value) for value in _NO_NUMBERS)
        for name in _LISTS.split():
            yield from (_with(path, name, value) for value in _NO_LISTS)


def _cut_bodies() -> Iterator[Body]:
    for path, fields in VALID.items():
        content = json.dumps(fields).encode()
        yield from ((path, content[:end]) for end in range(len(content)))


def _invalid_utf8() -> Iterator[Body]:
    rng = random.Random(1)
    for path, fields in VALID.items():
        content = json.dumps(fields).encode()
        for wrong in _BAD_UTF8 * 4:
            position = rng.randrange(1, len(content))
            yield path, content[:position] + wrong + content[position:]


def _random_bytes() -> Iterator[Body]:
    rng = random.Random(2)
    for path in VALID:
        yield from ((path, rng.randbytes(rng.randrange(1, 5000))) for _ in range(20))


def _unknown_fields() -> Iterator[Body]:
    for path in VALID:
        for name in [*_NAMES, "x" * 100_000, "\\" * 500, "a\r\nSet-Cookie: b"]:
            fields = {**VALID[path], name: "{{ 1 / 0 }}"}
            yield path, json.dumps(fields).encode()


def _nested() -> Iterator[Body]:
    for path, fields in VALID.items():
        for name in fields:
            for depth in (200, 5000, 100_000):
                yield _with(path, name, "[" * depth + "]" * depth)
                yield _with(path, name, '{"a":' * depth + "1" + "}" * depth)


def _grammars() -> Iterator[Body]:
    levels: dict[str, Any] = {"type": "integer"}
    for _ in range(99):
        levels = {"type": "array", "items": levels}
    doubled = {"a0": {"type": "integer"}} | {
        f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i - 1}"}] * 2} for i in range(1, 40)
    }
    schemas: list[Any] = [
        *(
            {"$ref": "#"},
            {"$ref": "#/x"},
            {"$ref": "file:///etc/passwd"},
            {"allOf": [{"$ref": "#"}]},
        ),
        *({"anyOf": [{"$ref": "#"}] * 50}, {"type": "x"}, {"multipleOf": 999_983}, {"not": {}}),
        {"allOf": [{"properties": {f"a{i}": {"type": "string"}}} for i in range(500)]},
        {"allOf": [{"anyOf": [{"const": {"a": [i, j]}} for j in range(9)]} for i in range(9)]},
        {"enum": ["x" * 70_000, "y" * 70_000]},
        {"type": "string", "pattern": "(" * 5000},
        {"type": "array", "items": {"type": "integer", "minimum": 2, "maximum": 1}, "minItems": 1},
        {"$defs": doubled, "$ref": "#/$defs/a39", "type": "string"},
        {"items": levels, "type": "array", "x": [[[[]]]]},
    ]
    for schema in schemas:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        yield _with(CHAT, "response_format", json.dumps(form))
        yield _with(COMPLETIONS, "structured_outputs", json.dumps({"json": schema}))
    for form in [
        *({"regex": "(" * 5000}, {"regex": "a{2000}{2000}{2000}["}, {"regex": "\\p{Nope}"}),
        *({"regex": "x" * 200_000}, {"choice": []}, {"choice": ["a"] * 5000}, {"json": "[" * 5000}),
        *({"grammar": "start: x\nx: x"}, {"grammar": "start: " + "(" * 5000}, {"grammar": "{}"}),
        {"grammar": 'start: %json {"multipleOf": 999983}'},
    ]:
        yield _with(COMPLETIONS, "structured_outputs", json.dumps(form))


def _template_arguments() -> Iterator[Body]:
    for name in ("self", "messages", "add_generation_prompt", "split_special_tokens"):
        yield _with(CHAT, "chat_template_kwargs", json.dumps({name: "{{ 7 * 7 }}"}))
    for role in ("{{ 7 * 7 }}", "system\n", "<｜Assistant｜>", "tool", ""):
        yield _with(CHAT, "messages", json.dumps([{"role": role, "content": "x"}]))
