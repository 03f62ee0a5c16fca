"""A thousand bodies that a server has to refuse, and any number whose cost it has to bound."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from dsv3_jax.disaggregation.protocol import PrefillBody
from dsv3_jax.server.anthropic.request_types import CountRequest, MessagesRequest
from dsv3_jax.server.openai.chat import ChatRequest
from dsv3_jax.server.openai.completions import CompletionRequest
from dsv3_jax.server.openai.response_types import ResponsesRequest
from dsv3_jax.server.openai.tokens import DetokenizeRequest, TokenizeRequest

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


KINDS: dict[str, type[BaseModel]] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    "/chat/spans": ChatRequest,
    "/v1/responses": ResponsesRequest,
    MESSAGES: MessagesRequest,
    f"{MESSAGES}/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/prefill": PrefillBody,
}
"""The type of each endpoint's body."""

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_RICH_CHAT = {
    "model": "demo",
    "max_tokens": 1,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ],
    "tools": [_TOOL],
    "metadata": {"a": "b"},
    "stop": ["z"],
    "chat_template_kwargs": {"thinking": True, "a": {"b": [1]}},
}
_SCHEMA = {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}]}}}
_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
_RICH_MESSAGES = {
    "model": "demo",
    "max_tokens": 2,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": "y"}],
        },
    ],
    "tools": [{"name": "f", "input_schema": _SCHEMA}],
    "system": [{"type": "text", "text": "y"}],
}
_RICH: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        "model": "demo",
        "prompt": [[1, 2], [3]],
        "max_tokens": 1,
        "logit_bias": {"1": 2},
        "metadata": {"a": "b"},
        "stop": ["z"],
        "structured_outputs": {"json": _SCHEMA},
    },
    CHAT: _RICH_CHAT,
    "/chat/spans": {**_RICH_CHAT, "tools": [], "response_format": _FORM},
    "/v1/responses": {
        "model": "demo",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}],
        "metadata": {"a": "b"},
        "include": ["x"],
        "max_output_tokens": 1,
    },
    MESSAGES: _RICH_MESSAGES,
    f"{MESSAGES}/count_tokens": {k: v for k, v in _RICH_MESSAGES.items() if k != "max_tokens"},
    "/tokenize": {"messages": _RICH_CHAT["messages"], "tools": [_TOOL]},
    "/detokenize": {"tokens": [1, 2]},
    "/prefill": {
        "identity": "0" * 64,
        "tokens": [1] * 65,
        "first_page": 0,
        "num_pages": 1,
        "seconds": 1.0,
        "transfer": "http",
    },
}

_ELEMENTS = [
    "1",
    '"a"',
    "[]",
    "{}",
    "null",
    "1e5",
    "[1]",
    '{"a":1}',
    "true",
    "123456",
    '{"type":"x"}',
]
_ELEMENTS += [
    '{"type":"text","text":"x"}',
    '{"role":"user","content":"x"}',
    "[[1]]",
    '{"a":{"b":[]}}',
]
_TEXTS = [
    "a",
    ",",
    "\\\\",
    '\\"',
    "é",
    "[",
    "{",
    ":",
    "<｜User｜>",
    "\\u0000",
    "\\ud83d\\ude00",
    " ",
]
_SIZES = (100, 1000, 10_000, 30_000, 100_000, 500_000, 2_000_000, 4_000_000)
_SIZE_WEIGHTS = (4, 8, 8, 4, 4, 2, 1, 1)
_PLACE = "\ue000"


def costly_bodies(path: str, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yields bodies whose cost a server has to bound: of a valid one with all kinds of parts, one
    part at any depth is replaced by something long, deep or wide, up to the largest size."""
    rng = random.Random(f"{path} {seed}")
    for _ in range(count):
        body = json.loads(json.dumps(_RICH[path]))
        _replace_part(rng, body, list(KINDS[path].model_fields))
        text = json.dumps(body, ensure_ascii=False).replace(f'"{_PLACE}"', _costly_value(rng))
        yield text.encode()


def _replace_part(rng: random.Random, body: dict[str, Any], fields: list[str]) -> None:
    """Puts the mark of the costly value in place of a part, or of a field that may be missing."""
    node: Any = body
    if rng.random() < 0.4:
        name = rng.choice([*fields, "unknown"])
        body[name if name != "json_" else "json"] = _PLACE
        return
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = rng.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.8:
            node = node[key]
            continue
        if isinstance(node, dict) and rng.random() < 0.3:
            node["unknown"] = _PLACE
        else:
            node[key] = _PLACE
        return


def _costly_value(rng: random.Random) -> str:
    size = rng.choices(_SIZES, _SIZE_WEIGHTS)[0]
    kind = rng.randrange(8)
    if kind == 0:  # a list, with another element somewhere
        element = rng.choice(_ELEMENTS)
        elements = [element] * max(1, size // (len(element) + 1))
        elements[rng.choice((0, len(elements) // 2, -1))] = rng.choice(_ELEMENTS)
        return "[" + ",".join(elements) + "]"
    if kind == 1:  # an object with many keys
        element = rng.choice(_ELEMENTS)
        return "{" + ",".join(f'"k{i}":{element}' for i in range(size // (len(element) + 9))) + "}"
    if kind == 2:  # one key many times
        return "{" + ",".join(['"a":1'] * (size // 6)) + "}"
    if kind == 3:  # deep
        depth = min(size, rng.choice((50, 150, 250, 100_000)))
        begin, end = rng.choice((("[", "]"), ('{"a":', "}"), ('{"anyOf":[', "]}")))
        return begin * depth + "1" + end * depth
    if kind == 4:  # text
        text = rng.choice(_TEXTS)
        return '"' + text * (size // len(text.encode())) + '"'
    if kind == 5:  # a schema
        part = rng.choice(
            ('{"type":"integer"}', '{"enum":["a","b"]}', '{"$ref":"#"}', '{"pattern":"a+"}')
        )
        word = rng.choice(("anyOf", "allOf", "oneOf", "prefixItems"))
        parts = [part] * max(1, size // (len(part) + 1))
        schema = f'{{"{word}":[{",".join(parts)}]}}'
        if rng.random() < 0.5:
            names = (f'"p{i}":{part}' for i in range(max(1, size // (len(part) + 9))))
            schema = f'{{"type":"object","properties":{{{",".join(names)}}}}}'
        return schema
    if kind == 6:  # numbers
        number = rng.choice(("1e999", "9" * 400, "-1e-999", "1.5", str(2**31), str(2**64), "1e308"))
        return "[" + ",".join([number] * max(1, size // (len(number) + 1))) + "]"
    rows = size // 1000  # lists of lists
    row = "[" + ",".join(rng.choice(_ELEMENTS[:4]) for _ in range(300)) + "]"
    return "[" + ",".join([row] * max(1, rows)) + "]"
