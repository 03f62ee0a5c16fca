"""Tool calls of DeepSeek-V3.1, V3.1-Terminus and V3.2-Exp::

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from dsv3_jax.server.parsers.tool_parser import SectionParser, function_name


class DeepSeekV31Parser(SectionParser):
    """Parses tool calls of DeepSeek-V3.1."""

    section_begin = "<｜tool▁calls▁begin｜>"
    section_end = "<｜tool▁calls▁end｜>"
    call_begin = "<｜tool▁call▁begin｜>"
    arguments_begin = "<｜tool▁sep｜>"
    ends_reasoning = (section_begin,)
    call_ends = ("<｜tool▁call▁end｜>",)

    @staticmethod
    def read_header(header: str) -> tuple[str, str | None] | None:
        """Returns the name."""
        name = function_name(header)
        return (name, None) if name else None
