"""Tool calls of Kimi-K2::

    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>
    ARGUMENTS<|tool_call_end|><|tool_calls_section_end|>

There is no line break. The model itself writes the id, ``functions.NAME:INDEX``, and expects it in
the history; so clients get it as it is.
"""

from __future__ import annotations

import re

from dsv3_jax.server.parsers.tool_parser import NAME, SectionParser

_ID = re.compile(rf"(?:functions\.)?+(?P<name>{NAME}):\d+")


class KimiK2Parser(SectionParser):
    """Parses tool calls of Kimi-K2."""

    section_begin = "<|tool_calls_section_begin|>"
    section_end = "<|tool_calls_section_end|>"
    call_begin = "<|tool_call_begin|>"
    arguments_begin = "<|tool_call_argument_begin|>"
    ends_reasoning = (section_begin,)
    call_ends = ("<|tool_call_end|>",)

    @staticmethod
    def read_header(header: str) -> tuple[str, str | None] | None:
        call_id = header.strip()
        match = _ID.fullmatch(call_id)
        return (match["name"], call_id) if match else None
