"""Tool calls of DeepSeek-V3.2, in DSML::

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">TEXT</｜DSML｜parameter>
    <｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

The parameters become one JSON object, which is streamed as they arrive. Strings are escaped; other
values are passed on as they are. A parameter or call without its end tag ends where the next one
begins. Like DeepSeek's own parser, this one refuses a call with text between its parameters, with a
malformed tag, a parameter that comes twice, or a value that is not JSON. Its text is content from
there on, and what has been streamed of its arguments is no whole object.
"""

from __future__ import annotations

import enum
import json
import re
from typing import Any

from dsv3_jax.server.parsers.marker_reader import Markers
from dsv3_jax.server.parsers.tool_parser import NAME, ToolParser

_BEGIN, _END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
_BEGINS = (f"\n\n{_BEGIN}", _BEGIN)  # the model separates a block from its content
_INVOKE, _INVOKE_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
_PARAMETER, _PARAMETER_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
_TAG_END = '">'
_KEY = re.compile(r'(?P<key>[^"\n]+)" string="(?P<string>true|false)')
# A value without its end tag ends before the line break that separates it from these.
_NEXT_TAGS = (_PARAMETER, _INVOKE, _INVOKE_END, _END)


class _State(enum.Enum):
    CONTENT = enum.auto()
    BLOCK = enum.auto()  # between calls
    INVOKE = enum.auto()  # the name of a function
    CALL = enum.auto()  # between parameters
    PARAMETER = enum.auto()  # the tag of a parameter
    VALUE = enum.auto()
    REFUSED = enum.auto()  # the rest of a call that is content


_MARKERS = {
    _State.CONTENT: _BEGINS,
    _State.BLOCK: (_INVOKE, _END),
    _State.INVOKE: (_TAG_END, _INVOKE, _INVOKE_END, _END),
    _State.CALL: (_PARAMETER, _INVOKE, _INVOKE_END, _END),
    _State.PARAMETER: (_TAG_END, _PARAMETER, _PARAMETER_END, _INVOKE, _INVOKE_END, _END),
    _State.VALUE: (_PARAMETER_END, *(f"\n{tag}" for tag in _NEXT_TAGS), *_NEXT_TAGS),
    _State.REFUSED: (_INVOKE, _INVOKE_END, _END),
}


class DeepSeekV32Parser(ToolParser):
    """Parses tool calls of DeepSeek-V3.2."""

    ends_reasoning = _BEGINS

    def __init__(self) -> None:
        super().__init__()
        self._state = _State.CONTENT
        self._tag: list[str] = []
        self._name = ""
        self._is_begun = False  # the call
        self._keys: set[str] = set()  # of its parameters
        self._is_string = False
        self._value: list[str] = []  # of a parameter that is no string

    def _markers(self) -> Markers:
        return Markers.of(_MARKERS[self._state])

    def _read_text(self, text: str) -> None:
        match self._state:
            case _State.CONTENT | _State.REFUSED:
                self._add_content(text)
            case _State.BLOCK:
                self._read_between(text)
            case _State.CALL if text.isspace():
                self._markup.append(text)
            case _State.CALL:
                self._refuse(text)
            case _State.INVOKE | _State.PARAMETER:
                self._tag.append(text)
            case _State.VALUE if self._is_string:
                self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            case _State.VALUE:
                self._value.append(text)
                self._add_arguments(text)

    def _read_marker(self, marker: str) -> None:
        match self._state:
            case _State.CONTENT:
                self._begin_section(marker)
                self._state = _State.BLOCK
            case _State.BLOCK:
                self._read_between_calls(marker)
            case _State.INVOKE:
                self._end_name(marker)
            case _State.CALL:
                self._read_between_parameters(marker)
            case _State.PARAMETER:
                if marker != _TAG_END or not self._read_key():
                    self._refuse("".join(self._tag))
                    self._read_refused(marker)
            case _State.VALUE:
                self._end_value(marker)
            case _State.REFUSED:
                self._read_refused(marker)

    def _read_between_calls(self, marker: str) -> None:
        if marker == _INVOKE:
            self._markup.append(marker)
            self._state, self._tag, self._is_open = _State.INVOKE, [], True
        else:
            self._end_section(marker)
            self._state = _State.CONTENT

    def _end_name(self, marker: str) -> None:
        name = "".join(self._tag)
        if marker == _TAG_END and re.fullmatch(NAME, name):
            self._markup += name, marker
            self._state, self._name, self._is_begun, self._keys = _State.CALL, name, False, set()
            return
        self._markup_is_content(name)
        self._state = _State.BLOCK
        if marker in (_TAG_END, _INVOKE_END):
            self._add_content(marker)
        else:
            self._read_between_calls(marker)

    def _read_between_parameters(self, marker: str) -> None:
        if marker == _PARAMETER:
            self._markup.append(marker)
            self._state, self._tag = _State.PARAMETER, []
            return
        self._begin_arguments()
        self._add_arguments("}")
        self._end_call()
        self._state, self._markup = _State.BLOCK, []
        if marker != _INVOKE_END:
            self._read_between_calls(marker)

    def _begin_arguments(self) -> None:
        """Begins the call with its first parameter, so that one without any that is cut off or
        refused is none."""
        if not self._is_begun:
            self._begin_call(self._name)
            self._add_arguments("{")
            self._is_begun = True

    def _read_key(self) -> bool:
        """Begins the value of a parameter. Returns whether its tag is valid."""
        match = _KEY.fullmatch("".join(self._tag))
        if match is None or match["key"] in self._keys:
            return False
        self._begin_arguments()
        separator = ", " if self._keys else ""
        self._keys.add(match["key"])
        self._is_string, self._value = match["string"] == "true", []
        key = json.dumps(match["key"], ensure_ascii=False)
        self._add_arguments(f"{separator}{key}: " + ('"' if self._is_string else ""))
        self._state, self._markup = _State.VALUE, []
        return True

    def _end_value(self, marker: str) -> None:
        if not self._is_string and not _is_json("".join(self._value)):
            self._refuse("")
            self._read_refused(marker)
            return
        if self._is_string:
            self._add_arguments('"')
        self._state = _State.CALL
        if marker != _PARAMETER_END:
            self._read_between_parameters(marker.removeprefix("\n"))

    def _refuse(self, text: str) -> None:
        """Makes the rest of a call content, from ``text`` on."""
        self._has_broken_calls |= self._is_begun
        self._markup_is_content(text)
        self._state = _State.REFUSED

    def _read_refused(self, marker: str) -> None:
        if (rest := marker.removeprefix("\n")) not in (_INVOKE, _END):
            self._add_content(marker)
            self._state = _State.BLOCK if rest == _INVOKE_END else _State.REFUSED
            return
        self._add_content(marker.removesuffix(rest))
        self._state = _State.BLOCK
        self._read_between_calls(rest)

    def _end(self) -> None:
        if self._state is _State.INVOKE:
            self._markup_is_content("".join(self._tag))
        elif self._state in (_State.CALL, _State.PARAMETER) and not self._is_begun:
            self._markup_is_content("".join(self._tag) if self._state is _State.PARAMETER else "")
        elif self._state is _State.BLOCK and not self._has_calls:
            self._markup_is_content("")


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"expected JSON, got {name}")
