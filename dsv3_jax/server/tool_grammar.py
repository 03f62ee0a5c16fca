"""Grammars of tool calls, for answers that have to call a tool with arguments that are valid."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsv3_jax.server.dsml_grammar import dsml_grammar
from dsv3_jax.server.grammar import JSON_OPTIONS, GrammarSource
from dsv3_jax.server.parsers.deepseek_v3 import DeepSeekV3Parser
from dsv3_jax.server.parsers.deepseek_v31 import DeepSeekV31Parser
from dsv3_jax.server.parsers.deepseek_v32 import DeepSeekV32Parser
from dsv3_jax.server.parsers.kimi_k2 import KimiK2Parser
from dsv3_jax.server.parsers.section_parser import SectionParser
from dsv3_jax.server.parsers.tool_formats import find_tool_parser
from dsv3_jax.server.schema_limits import MAX_TEXT, schema_text
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


def tool_call_grammar(
    tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], *, parallel: bool
) -> GrammarSource:
    """Returns the source of answers that consist of calls of these tools.

    Args:
      tools: as chat templates read them; at least one.
      parallel: whether an answer may contain several calls.

    Raises:
      ValueError: a schema exceeds a limit, or the format of the model's calls cannot express it.
    """
    parser = find_tool_parser(tokenizer)

    def rule(text: str) -> str:
        return _rule(tokenizer, text)

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
