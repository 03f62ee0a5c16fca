"""Tool calls of DeepSeek-V2.5, V3, V3-0324 and R1, with arguments in a fenced block of JSON::

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
ARGUMENTS
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

and those of DeepSeek-V3.1, V3.1-Terminus and V3.2-Exp::

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from dsv3_jax.server.parsers.tool_parser import SectionParser, function_name

_CALL_END = "<｜tool▁call▁end｜>"


class DeepSeekV3Parser(SectionParser):
    """Parses tool calls of DeepSeek-V3."""

    section_begin = "<｜tool▁calls▁begin｜>"
    section_end = "<｜tool▁calls▁end｜>"
    call_begin = "<｜tool▁call▁begin｜>"
    arguments_begin = "\n```json\n"
    ends_reasoning = (section_begin,)
    call_ends = (f"\n```{_CALL_END}", f"```{_CALL_END}", _CALL_END)

    @staticmethod
    def read_header(header: str) -> tuple[str, str | None] | None:
        """Returns the name after the type of the tool, which is always ``function``."""
        kind, _, rest = header.partition("<｜tool▁sep｜>")
        name = function_name(rest)
        return (name, None) if kind.strip() == "function" and name else None


class DeepSeekV31Parser(DeepSeekV3Parser):
    """Parses tool calls of DeepSeek-V3.1."""

    arguments_begin = "<｜tool▁sep｜>"
    call_ends = (_CALL_END,)

    @staticmethod
    def read_header(header: str) -> tuple[str, str | None] | None:
        name = function_name(header)
        return (name, None) if name else None
