"""Grammars of tool calls, for answers that have to call a tool with arguments that are valid."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsv3_jax.server.grammar import JSON_OPTIONS, MAX_DEPTH, MAX_TEXT, GrammarSource, schema_text
from dsv3_jax.server.parsers.deepseek_v3 import DeepSeekV3Parser, DeepSeekV31Parser
from dsv3_jax.server.parsers.deepseek_v32 import DeepSeekV32Parser
from dsv3_jax.server.parsers.kimi_k2 import KimiK2Parser
from dsv3_jax.server.parsers.tool_formats import find_tool_parser
from dsv3_jax.server.parsers.tool_parser import SectionParser
from dsv3_jax.tokenizer import Tokenizer

# The text before and after a function's name in a call is a part of the format. Kimi-K2 numbers its
# calls.
_HEADERS: dict[type[SectionParser], tuple[str, str]] = {
    DeepSeekV3Parser: ('"function" {separator}', ""),
    DeepSeekV31Parser: ("", ""),
    KimiK2Parser: ('"functions."', '":" /[0-9]{1,3}/'),
}
_BETWEEN_CALLS: dict[type[SectionParser], str] = {DeepSeekV3Parser: "\n"}
_SEPARATOR = "<｜tool▁sep｜>"

_MARK = "｜DSML｜"
_BLOCK, _BLOCK_END = "\n\n<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"
_INVOKE, _INVOKE_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>\n"
_PARAMETER = '<｜DSML｜parameter name="'

# Literals of the grammar.
_NAME_END, _PARAMETER_END = json.dumps('">\n'), json.dumps("parameter>\n")
_STRING_TAG, _JSON_TAG = (json.dumps(f'" string="{each}">') for each in ("true", "false"))

_OTHERS = ("object", "array", "number", "integer", "boolean", "null")
_DEFINITIONS = ("$defs", "definitions")
_DESCRIPTIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}
_OBJECT = {*("type", "properties", "required", "additionalProperties", "$schema"), *_DEFINITIONS}
_STRING = {*("type", "pattern", "minLength", "maxLength"), *_DEFINITIONS}

Schema = Mapping[str, Any]
Rule = Callable[[str], str]
"""Returns a text as a part of a rule, in which control tokens are numbers."""


def dsml_grammar(rule: Rule, functions: Sequence[Schema], *, parallel: bool) -> str:
    """Returns the grammar of answers that call these functions, in llguidance's form of Lark."""
    if rule(_MARK).startswith('"'):
        raise ValueError(f"tool_choice: expected a tokenizer with the control token {_MARK}")
    grammar = _Grammar(functools.cache(rule))
    calls = [grammar.add_call(function) for function in functions]
    more = "call*" if parallel else ""
    start = f"start: {rule(_BLOCK)} call {more} {rule(_BLOCK_END)}"
    return "\n".join([start, f"call: {' | '.join(calls)}", *grammar.lines])


class _Grammar:
    """The rules of calls."""

    def __init__(self, rule: Rule):
        self.rule = rule
        self._names: dict[str, str] = {}
        self._length = 0
        self.lines: list[str] = []
        """Rules, one a line."""

    def add_call(self, function: Schema) -> str:
        """Adds the rules of a function. Returns the name of that of its calls."""
        schema = function.get("parameters") or {}
        schema_text(schema, "tools")  # its size and depth are within the limits
        properties, required = _properties(schema)
        values = _Values(self, schema)
        parameters = [
            self._add_parameter(key, values.rule(value)) + ("" if key in required else "?")
            for key, value in properties.items()
        ]
        body = " ".join(parameters)
        if not required:  # the template writes an empty line then
            body = f'({body} | "\\n")' if body else '"\\n"'
        begin = f"{self.rule(_INVOKE)} {_quoted(function['name'])} {_NAME_END}"
        return self.add(f"{begin} {body} {self.rule(_INVOKE_END)}", "call")

    def _add_parameter(self, key: str, value: str) -> str:
        """Adds the rule of a parameter. Returns its name."""
        if not re.fullmatch(r'[^"\n]+', key):
            raise ValueError(f"tools: expected a parameter's name without quotation marks: {key!r}")
        begin = f"{self.rule(_PARAMETER)} {_quoted(key)}"
        return self.add(f"{begin} {value} {self.rule(_MARK)} {_PARAMETER_END}")

    def add(self, definition: str, kind: str = "rule") -> str:
        """Returns the name of the rule or terminal with that definition. It is added once."""
        if (name := self._names.get(definition)) is None:
            name = self._names[definition] = f"{kind}{len(self.lines)}"
            self.lines.append(f"{name}: {definition}")
            self._length += len(self.lines[-1]) + 1
            if self._length > MAX_TEXT:
                raise ValueError(
                    f"tools: expected schemas whose grammar has at most {MAX_TEXT} characters, got"
                    " more"
                )
        return name


class _Values:
    """The rules of the values of one function's parameters."""

    def __init__(self, grammar: _Grammar, root: Schema):
        self._grammar = grammar
        self._root = root
        self._definitions = {key: root[key] for key in _DEFINITIONS if key in root}
        self._references: dict[str, str | None] = {}  # their rules; None while one is made
        self._json: dict[str, str] = {}  # rules of schemas

    def rule(self, schema: object, depth: int = 0) -> str:
        """Returns the name of the rule of a parameter's values, with the end of its tag before
        them and ``</`` after them."""
        return self._grammar.add(" | ".join(dict.fromkeys(self._alternatives(schema, depth))))

    def _alternatives(self, schema: object, depth: int) -> list[str]:
        if depth > MAX_DEPTH:
            raise ValueError(f"tools: expected at most {MAX_DEPTH} levels of anyOf and $ref")
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise ValueError(f"tools: expected a schema of a parameter, got {schema!r:.80}")
        schema = {key: value for key, value in schema.items() if key not in _DESCRIPTIONS}
        for key in ("anyOf", "oneOf", "allOf", "$ref"):
            if key not in schema:
                continue
            if others := schema.keys() - {key, *_DEFINITIONS}:
                raise ValueError(
                    f"tools: expected {key} alone in a parameter, got {sorted(others)}"
                )
            if key == "$ref":
                return [self._reference(schema[key], depth)]
            branches = _list(schema, key)
            if key == "allOf" and len(branches) != 1:
                raise ValueError("tools: expected one schema in a parameter's allOf, got more")
            return [value for each in branches for value in self._alternatives(each, depth + 1)]
        if "enum" in schema or "const" in schema:
            return list(
                map(_choice, _list(schema, "enum") if "enum" in schema else [schema["const"]])
            )
        schema.setdefault("type", ["string", *_OTHERS])
        types = schema["type"]
        types = [types] if isinstance(types, str) else _list(schema, "type")
        values = []
        if "string" in types:
            values.append(f"{_STRING_TAG} {self._text(schema, is_alone=len(types) == 1)}")
        if others := [each for each in types if each != "string"]:
            values.append(f'{_JSON_TAG} {self._json_rule(schema | {"type": others})} "</"')
        return values

    def _reference(self, reference: object, depth: int) -> str:
        """Returns the name of the rule of the part of the schema that a ``$ref`` names."""
        if not (isinstance(reference, str) and reference.startswith("#/")):
            raise ValueError(f"tools: expected a $ref into the same schema, got {reference!r:.80}")
        if reference not in self._references:
            self._references[reference] = None
            self._references[reference] = self.rule(self._referred(reference), depth + 1)
        name = self._references[reference]
        if name is None:
            raise ValueError("tools: expected no circle of references in a parameter's schema")
        return name

    def _referred(self, reference: str) -> object:
        node: object = self._root
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if not (isinstance(node, Mapping) and key in node):
                raise ValueError(
                    f"tools: expected a $ref to a part of the schema, got {reference!r:.80}"
                )
            node = node[key]
        return node

    def _json_rule(self, schema: Schema) -> str:
        text = json.dumps({**schema, "x-guidance": JSON_OPTIONS}, separators=(",", ":"))
        if text not in self._json:
            whole = text
            if '"$ref"' in text:
                further = {**self._definitions, **schema, "x-guidance": JSON_OPTIONS}
                whole = json.dumps(further, separators=(",", ":"))
            self._json[text] = self._grammar.add(f"%json {whole}")
        return self._json[text]

    def _text(self, schema: Schema, *, is_alone: bool) -> str:
        """Returns the terminal of raw text with ``</`` after it. It may contain ``</``, but not the
        beginning of a tag, which ordinary tokens can spell."""
        if is_alone and (others := schema.keys() - _STRING):
            raise ValueError(
                f"tools: expected a string's schema of {sorted(_STRING)}, got {sorted(others)}"
            )
        least, most = (_length(schema, key) for key in ("minLength", "maxLength"))
        text = f"(?s:.){{{least or 0},{most}}}" if least or most else "(?s:.)*"
        pattern = f" & /{_whole(schema['pattern'])}<\\//" if "pattern" in schema else ""
        return self._grammar.add(f"/{text}<\\// & ~/(?s:.)*<\\/?{_MARK}(?s:.)*/{pattern}", "TEXT")


def _choice(choice: object) -> str:
    """Returns the value with its tag, and with ``</`` after it."""
    is_text = isinstance(choice, str)
    text = choice if is_text else json.dumps(choice, ensure_ascii=False)
    assert isinstance(text, str)
    if _MARK in text:
        raise ValueError(f"tools: expected a choice without {_MARK}, got {text!r:.80}")
    return f"{_STRING_TAG if is_text else _JSON_TAG} {_quoted(f'{text}</')}"


def _properties(schema: Schema) -> tuple[dict[str, Any], set[str]]:
    """Returns the properties of a function's arguments, and which of them are required."""
    if others := schema.keys() - _OBJECT - _DESCRIPTIONS - {"maxProperties"}:
        raise ValueError(
            f"tools: expected parameters of {sorted(_OBJECT)} for DSML, got {sorted(others)}"
        )
    named, needed = schema.get("properties") or {}, schema.get("required") or ()
    if not isinstance(named, Mapping):
        raise ValueError(f"tools: expected an object of properties, got {named!r:.80}")
    if not (isinstance(needed, Sequence) and all(isinstance(each, str) for each in needed)):
        raise ValueError(f"tools: expected a list of required properties, got {needed!r:.80}")
    properties: dict[str, Any] = dict(named)
    required: set[str] = set(needed)
    properties |= {key: {} for key in sorted(required - properties.keys())}
    if "maxProperties" in schema:
        most = _length(schema, "maxProperties")
        if most and int(most) < len(properties):
            raise ValueError("tools: expected no maxProperties below the number of properties")
        properties = properties if most else {}
    return properties, required


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema[key]
    if not (isinstance(value, list) and value):
        raise ValueError(f"tools: expected a list with elements as {key}, got {value!r:.80}")
    return value


def _length(schema: Schema, key: str) -> str:
    """Returns a length in a schema as text, or an empty one if there is none."""
    value = schema.get(key)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(
            f"tools: expected a number from 0 to {2**31 - 1} as {key}, got {value!r:.80}"
        )
    return str(value)


def _whole(pattern: object) -> str:
    """Returns the expression of whole texts in which a pattern occurs, as JSON schemas mean it."""
    if not isinstance(pattern, str):
        raise ValueError(f"tools: expected text as pattern, got {pattern!r:.80}")
    text = pattern
    begin, text = ("", text[1:]) if text.startswith("^") else ("(?s:.)*", text)
    is_anchored = text.endswith("$") and not text.endswith("\\$")
    end, text = ("", text[:-1]) if is_anchored else ("(?s:.)*", text)
    # A slash that is not escaped would end the expression, and so would the end of its line.
    text = re.sub(r"(?s:\\.)|/", lambda part: "\\/" if part[0] == "/" else part[0], text)
    text = text.replace("\n", "\\n").replace("\r", "\\r")
    return f"{begin}(?:{text}){end}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def tool_call_grammar(
    tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], *, parallel: bool
) -> GrammarSource:
    """Returns the source of answers that consist of calls of these tools."""
    parser = find_tool_parser(tokenizer)
    rule = functools.partial(_rule, tokenizer)
    if parser is DeepSeekV32Parser:
        text = dsml_grammar(rule, [tool["function"] for tool in tools], parallel=parallel)
        return GrammarSource("lark", text, "tools", is_trusted=True)
    assert issubclass(parser, SectionParser)
    before, after = _HEADERS[parser]
    before = before.format(separator=rule(_SEPARATOR))
    calls, arguments, length = [], [], 0
    for i, tool in enumerate(tools):
        function = tool["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        calls.append(f"{before} {name} {after} {rule(parser.arguments_begin)} arguments{i}")
        schema = {
            "type": "object",
            **(function.get("parameters") or {}),
            "x-guidance": JSON_OPTIONS,
        }
        arguments.append(f"arguments{i}: %json {schema_text(schema, 'tools')}")
        length += len(arguments[-1])
        if length > MAX_TEXT:
            raise ValueError(f"tools: expected schemas of at most {MAX_TEXT} characters, got more")
    more = f"({rule(_BETWEEN_CALLS.get(parser, ''))} call)*" if parallel else ""
    lines = [
        f"start: {rule(parser.section_begin)} call {more} {rule(parser.section_end)}",
        f"call: {rule(parser.call_begin)} ({' | '.join(calls)}) {rule(parser.call_ends[0])}",
        *arguments,
    ]
    return GrammarSource("lark", "\n".join(lines), "tools", is_trusted=True)


def _rule(tokenizer: Tokenizer, text: str) -> str:
    """Returns a text as a part of a rule, in which control tokens are numbers."""
    parts = []
    controls = {text: f"<[{i}]>" for i, text in tokenizer.control_tokens.items()}
    for part in re.split("(" + "|".join(map(re.escape, controls)) + ")", text):
        if part:
            parts.append(controls.get(part) or json.dumps(part, ensure_ascii=False))
    return " ".join(parts)
