"""Tool calls in a section: ``SECTION_BEGIN (CALL_BEGIN header ARGUMENTS arguments CALL_END)*
SECTION_END``. DeepSeek-V3, V3.1 and Kimi-K2 differ in the markers and in what a header contains."""

from __future__ import annotations

import abc
import enum
from collections.abc import Collection
from typing import ClassVar

from dsv3_jax.server.parsers.tool_parser import ToolParser


class _State(enum.Enum):
    CONTENT = enum.auto()
    SECTION = enum.auto()  # between calls
    HEADER = enum.auto()
    ARGUMENTS = enum.auto()


class SectionParser(ToolParser):
    """Parses sections. Subclasses define the markers and the header."""

    section_begin: ClassVar[str]
    section_end: ClassVar[str]
    call_begin: ClassVar[str]
    arguments_begin: ClassVar[str]
    call_ends: ClassVar[tuple[str, ...]]
    """Alternatives, the longest first. The last one is the control token alone."""

    def __init__(self) -> None:
        super().__init__()
        self._state = _State.CONTENT
        self._header = ""
        # Markup since the section's beginning or its last call. It becomes content if no call
        # follows.
        self._markup = ""
        self._has_calls = False

    @staticmethod
    @abc.abstractmethod
    def read_header(header: str) -> tuple[str, str | None] | None:
        """Returns the function's name and, if the model writes one, the call's id. None if
        ``header`` is malformed."""

    def _markers(self) -> Collection[str]:
        match self._state:
            case _State.CONTENT:
                return (self.section_begin,)
            case _State.SECTION:
                return self.call_begin, self.section_end
            case _State.HEADER:
                ends = (self.call_begin, self.call_ends[-1], self.section_end)
                return self.arguments_begin, *ends
            case _State.ARGUMENTS:
                return *self.call_ends, self.section_end

    def _read_text(self, text: str) -> None:
        match self._state:
            case _State.CONTENT:
                self._add_content(text)
            case _State.SECTION if not text.isspace():
                self._markup_is_content(text)
            case _State.SECTION:
                self._markup += text
            case _State.HEADER:
                self._header += text
            case _State.ARGUMENTS:
                self._add_arguments(text)

    def _read_marker(self, marker: str) -> None:
        if self._state is _State.HEADER:
            self._end_header(marker)
        elif marker == self.section_begin:
            self._state, self._markup, self._has_calls = _State.SECTION, marker, False
        elif marker == self.call_begin:
            self._begin_header()
        elif marker == self.section_end:
            if self._state is _State.SECTION and not self._has_calls:
                self._markup_is_content(marker)
            self._state, self._markup = _State.CONTENT, ""
        else:
            self._state = _State.SECTION

    def _begin_header(self) -> None:
        self._state, self._header = _State.HEADER, ""
        self._markup += self.call_begin

    def _end_header(self, marker: str) -> None:
        name_and_id = self.read_header(self._header) if marker == self.arguments_begin else None
        if name_and_id is not None:
            self._begin_call(*name_and_id)
            self._state, self._markup, self._has_calls = _State.ARGUMENTS, "", True
            return
        self._markup_is_content(self._header)
        if marker == self.call_begin:
            self._begin_header()
            return
        self._add_content(marker)
        self._state = _State.CONTENT if marker == self.section_end else _State.SECTION

    def _markup_is_content(self, text: str) -> None:
        self._add_content(self._markup + text)
        self._markup = ""

    def _end(self) -> None:
        if self._state is _State.HEADER:
            self._markup_is_content(self._header)
        elif self._state is _State.SECTION and not self._has_calls:
            self._markup_is_content("")
