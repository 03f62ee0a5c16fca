"""The grammar of DeepSeek-V3.2's tool calls, see :mod:`dsv3_jax.server.parsers.deepseek_v32`.

A parameter's value is raw text if it is a string, and JSON otherwise. So a schema of arguments is
divided into those of its properties, and each of these into its strings and its other values.
Properties come in the order of the schema, and none that it does not name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsv3_jax.server.grammar import JSON_OPTIONS
from dsv3_jax.server.schema_limits import schema_text

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
_MOST_REFERENCES = 16

Schema = Mapping[str, Any]
Rule = Callable[[str], str]
"""Returns a text as a part of a rule, in which control tokens are numbers."""


def dsml_grammar(rule: Rule, functions: Sequence[Schema], *, parallel: bool) -> str:
    """Returns the grammar of answers that call these functions, in llguidance's form of Lark.

    Raises:
      ValueError: the vocabulary lacks the control token of DSML, or the grammar cannot express a
        schema.
    """
    if rule(_MARK).startswith('"'):
        raise ValueError(f"tool_choice: expected a tokenizer with the control token {_MARK}")
    grammar = _Grammar(rule)
    calls = [grammar.add_call(function) for function in functions]
    more = "call*" if parallel else ""
    start = f"start: {rule(_BLOCK)} call {more} {rule(_BLOCK_END)}"
    return "\n".join([start, f"call: {' | '.join(calls)}", *grammar.lines])


class _Grammar:
    """The rules of calls."""

    def __init__(self, rule: Rule):
        self._rule = rule
        self._names: dict[str, str] = {}
        self.lines: list[str] = []
        """Rules, one a line."""

    def add_call(self, function: Schema) -> str:
        """Adds the rules of a function. Returns the name of that of its calls."""
        name, schema = function["name"], function.get("parameters") or {}
        if '"' in name:
            raise ValueError(f"tools: expected a name without quotation marks, got {name!r:.80}")
        properties, required = _properties(schema)
        call = f"call{len(self.lines)}"
        self.lines.append("")
        place = len(self.lines) - 1
        parameters = [
            self._add_parameter(key, values, schema) + ("" if key in required else "?")
            for key, values in properties.items()
        ]
        body = " ".join(parameters)
        if not required:  # the template writes an empty line then
            body = f'({body} | "\\n")' if body else '"\\n"'
        begin = f"{self._rule(_INVOKE)} {_quoted(name)} {_NAME_END}"
        self.lines[place] = f"{call}: {begin} {body} {self._rule(_INVOKE_END)}"
        return call

    def _add_parameter(self, key: str, schema: object, root: Schema) -> str:
        """Adds the rules of a parameter. Returns its name."""
        if not re.fullmatch(r'[^"\n]+', key):
            raise ValueError(f"tools: expected a parameter's name without quotation marks: {key!r}")
        values = [
            f"{_STRING_TAG if is_text else _JSON_TAG} {value}"
            for is_text, value in self._values(schema, root, 0)
        ]
        value = self._add(" | ".join(values))
        begin = f"{self._rule(_PARAMETER)} {_quoted(key)}"
        return self._add(f"{begin} {value} {self._rule(_MARK)} {_PARAMETER_END}")

    def _values(self, schema: object, root: Schema, depth: int) -> list[tuple[bool, str]]:
        """Returns rules of a parameter's values with ``</`` after them, and which are raw text."""
        if depth > _MOST_REFERENCES:
            raise ValueError("tools: expected no circle of references in a parameter's schema")
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
            branches = [_referred(schema[key], root)] if key == "$ref" else schema[key]
            if key == "allOf" and len(branches) != 1:
                raise ValueError("tools: expected one schema in a parameter's allOf, got more")
            return [value for each in branches for value in self._values(each, root, depth + 1)]
        if "enum" in schema or "const" in schema:
            choices = schema["enum"] if "enum" in schema else [schema["const"]]
            return [self._choice(choice) for choice in choices]
        types = schema.get("type", ["string", *_OTHERS])
        types = [types] if isinstance(types, str) else list(types)
        values = [(True, self._text(schema, is_alone=len(types) == 1))] if "string" in types else []
        if others := [each for each in types if each != "string"]:
            definitions = {key: root[key] for key in _DEFINITIONS if key in root}
            json_schema = definitions | schema | {"type": others, "x-guidance": JSON_OPTIONS}
            value = self._add(f"%json {schema_text(json_schema, 'tools')}")
            values.append((False, f'{value} "</"'))
        return values

    def _choice(self, choice: object) -> tuple[bool, str]:
        is_text = isinstance(choice, str)
        text = choice if is_text else json.dumps(choice, ensure_ascii=False)
        assert isinstance(text, str)
        if _MARK in text:
            raise ValueError(f"tools: expected a choice without {_MARK}, got {text!r:.80}")
        return is_text, _quoted(f"{text}</")

    def _text(self, schema: Schema, *, is_alone: bool) -> str:
        """Returns the terminal of raw text with ``</`` after it. It may contain ``</``, but not the
        mark, which ordinary tokens can spell."""
        if is_alone and (others := schema.keys() - _STRING):
            raise ValueError(
                f"tools: expected a string's schema of {sorted(_STRING)}, got {sorted(others)}"
            )
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        text = f"(?s:.){{{least},{most}}}" if least or most != "" else "(?s:.)*"
        pattern = f" & /{_whole(schema['pattern'])}<\\//" if "pattern" in schema else ""
        return self._add(f"/{text}<\\// & ~/(?s:.)*<\\/{_MARK}(?s:.)*/{pattern}", "TEXT")

    def _add(self, definition: str, kind: str = "rule") -> str:
        """Returns the name of the rule or terminal with that definition. It is added once."""
        if (name := self._names.get(definition)) is None:
            name = self._names[definition] = f"{kind}{len(self.lines)}"
            self.lines.append(f"{name}: {definition}")
        return name


def _properties(schema: Schema) -> tuple[dict[str, Any], set[str]]:
    """Returns the properties of a function's arguments, and which of them are required."""
    if others := schema.keys() - _OBJECT - _DESCRIPTIONS - {"maxProperties"}:
        raise ValueError(
            f"tools: expected parameters of {sorted(_OBJECT)} for DSML, got {sorted(others)}"
        )
    properties: dict[str, Any] = dict(schema.get("properties") or {})
    required: set[str] = set(schema.get("required") or ())
    properties |= {key: {} for key in sorted(required - properties.keys())}
    if "maxProperties" in schema:
        if schema["maxProperties"] != 0 and schema["maxProperties"] < len(properties):
            raise ValueError("tools: expected no maxProperties below the number of properties")
        properties = properties if schema["maxProperties"] else {}
    return properties, required


def _referred(reference: object, root: Schema) -> object:
    """Returns the part of a schema that a ``$ref`` names."""
    node: object = root
    if not (isinstance(reference, str) and reference.startswith("#/")):
        raise ValueError(f"tools: expected a $ref into the same schema, got {reference!r:.80}")
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if not (isinstance(node, Mapping) and key in node):
            raise ValueError(
                f"tools: expected a $ref to a part of the schema, got {reference!r:.80}"
            )
        node = node[key]
    return node


def _whole(pattern: object) -> str:
    """Returns the expression of whole texts in which a pattern occurs, as JSON schemas mean it."""
    text = str(pattern)
    begin, text = ("", text[1:]) if text.startswith("^") else ("(?s:.)*", text)
    is_anchored = text.endswith("$") and not text.endswith("\\$")
    end, text = ("", text[:-1]) if is_anchored else ("(?s:.)*", text)
    escaped = re.sub(r"(?<!\\)/", r"\\/", text)
    return f"{begin}(?:{escaped}){end}"


def _quoted(text: str) -> str:
    """Returns a text as a literal."""
    return json.dumps(text, ensure_ascii=False)
