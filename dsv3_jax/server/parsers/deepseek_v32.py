"""Tool calls of DeepSeek-V3.2, in DSML::

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">TEXT</｜DSML｜parameter>
    <｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

The parameters become one JSON object, which is streamed as they arrive. Strings are escaped; other
values are passed on as they are.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection

from dsv3_jax.server.parsers.tool_parser import ToolParser

_BEGIN, _END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
_BEGINS = (f"\n\n{_BEGIN}", _BEGIN)  # the model separates a block from its content
_INVOKE, _INVOKE_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
_PARAMETER, _PARAMETER_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
_TAG_END = '">'
_KEY = re.compile(r'(?P<key>[^"\n]+)" string="(?P<string>true|false)')


class _State(enum.Enum):
    CONTENT = enum.auto()
    BLOCK = enum.auto()  # between calls
    INVOKE = enum.auto()  # the name of a function
    CALL = enum.auto()  # between parameters
    PARAMETER = enum.auto()  # the tag of a parameter
    VALUE = enum.auto()


_MARKERS = {
    _State.CONTENT: _BEGINS,
    _State.BLOCK: (_INVOKE, _END),
    _State.INVOKE: (_TAG_END, _INVOKE, _INVOKE_END, _END),
    _State.CALL: (_PARAMETER, _INVOKE, _INVOKE_END, _END),
    _State.PARAMETER: (_TAG_END, _PARAMETER, _PARAMETER_END, _INVOKE_END, _END),
    _State.VALUE: (_PARAMETER_END, _INVOKE_END, _END),
}


class DeepSeekV32Parser(ToolParser):
    """Parses tool calls of DeepSeek-V3.2."""

    def __init__(self) -> None:
        super().__init__()
        self._state = _State.CONTENT
        self._tag = ""
        # Markup that becomes content if no call follows.
        self._markup = ""
        self._has_calls = False
        self._has_parameters = False
        self._is_string = False

    def _markers(self) -> Collection[str]:
        return _MARKERS[self._state]

    def _read_text(self, text: str) -> None:
        match self._state:
            case _State.CONTENT:
                self._add_content(text)
            case _State.BLOCK | _State.CALL if text.isspace():
                self._markup += text
            case _State.BLOCK | _State.CALL:
                self._markup_is_content(text)
            case _State.INVOKE | _State.PARAMETER:
                self._tag += text
            case _State.VALUE:
                self._add_arguments(_escaped(text) if self._is_string else text)

    def _read_marker(self, marker: str) -> None:
        if self._state in (_State.INVOKE, _State.PARAMETER):
            if marker == _TAG_END and self._read_tag():
                return
            self._markup_is_content(self._tag)
            self._state = _State.BLOCK if self._state is _State.INVOKE else _State.CALL
            if marker in (_TAG_END, _PARAMETER_END):
                self._add_content(marker)
                return
        if self._state is _State.VALUE:
            self._add_arguments('"' if self._is_string else "")
            self._state = _State.CALL
        if self._state is _State.CALL and marker in (_INVOKE, _INVOKE_END, _END):
            self._add_arguments("}")
            self._state, self._markup = _State.BLOCK, ""
            if marker == _INVOKE_END:
                return
        if marker in _BEGINS:
            self._state, self._markup, self._has_calls = _State.BLOCK, marker, False
        elif marker in (_INVOKE, _PARAMETER):
            self._state = _State.INVOKE if marker == _INVOKE else _State.PARAMETER
            self._tag, self._markup = "", self._markup + marker
        elif marker == _INVOKE_END:
            self._add_content(marker)
        elif marker == _END:
            if not self._has_calls:
                self._markup_is_content(marker)
            self._state, self._markup = _State.CONTENT, ""

    def _read_tag(self) -> bool:
        """Reads a tag up to its end. Returns whether it is valid."""
        if self._state is _State.INVOKE:
            if not self._tag.strip() or '"' in self._tag:
                return False
            self._begin_call(self._tag)
            self._add_arguments("{")
            self._state, self._has_calls, self._has_parameters = _State.CALL, True, False
        else:
            match = _KEY.fullmatch(self._tag)
            if match is None:
                return False
            self._is_string = match["string"] == "true"
            separator = ", " if self._has_parameters else ""
            key = json.dumps(match["key"], ensure_ascii=False)
            self._add_arguments(f"{separator}{key}: " + ('"' if self._is_string else ""))
            self._state, self._has_parameters = _State.VALUE, True
        self._markup = ""
        return True

    def _markup_is_content(self, text: str) -> None:
        self._add_content(self._markup + text)
        self._markup = ""

    def _end(self) -> None:
        if self._state in (_State.INVOKE, _State.PARAMETER):
            self._markup_is_content(self._tag)
        elif self._state is _State.BLOCK and not self._has_calls:
            self._markup_is_content("")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
