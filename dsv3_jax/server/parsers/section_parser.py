"""Tool calls in a section: ``SECTION_BEGIN (CALL_BEGIN header ARGUMENTS arguments CALL_END)*
SECTION_END``. DeepSeek-V3, V3.1 and Kimi-K2 differ in the markers and in what a header contains."""

from __future__ import annotations

import abc
import enum
from typing import ClassVar

from dsv3_jax.server.parsers.marker_reader import Markers
from dsv3_jax.server.parsers.tool_parser import ToolParser


class _State(enum.Enum):
    CONTENT = enum.auto()
    SECTION = enum.auto()  # between calls
    HEADER = enum.auto()
    NO_ARGUMENTS = enum.auto()  # of a call: only white space so far
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
        self._header: list[str] = []
        self._name: str = ""
        self._id: str | None = None

    @staticmethod
    @abc.abstractmethod
    def read_header(header: str) -> tuple[str, str | None] | None:
        """Returns the function's name and, if the model writes one, the call's id. None if
        ``header`` is malformed."""

    def _markers(self) -> Markers:
        match self._state:
            case _State.CONTENT:
                markers = (self.section_begin,)
            case _State.SECTION:
                markers = (self.call_begin, self.section_end)
            case _State.HEADER:
                ends = (self.call_begin, self.call_ends[-1], self.section_end)
                markers = (self.arguments_begin, *ends)
            case _State.NO_ARGUMENTS | _State.ARGUMENTS:
                markers = (*self.call_ends, self.call_begin, self.section_end)
        return Markers.of(markers)

    def _read_text(self, text: str) -> None:
        match self._state:
            case _State.CONTENT:
                self._add_content(text)
            case _State.SECTION:
                self._read_between(text)
            case _State.HEADER:
                self._header.append(text)
            case _State.NO_ARGUMENTS if text.isspace():
                self._markup.append(text)
            case _State.NO_ARGUMENTS | _State.ARGUMENTS:
                self._begin_arguments()
                self._add_arguments(text)

    def _read_marker(self, marker: str) -> None:
        match self._state:
            case _State.CONTENT:
                self._begin_section(marker)
                self._state = _State.SECTION
            case _State.HEADER:
                self._end_header(marker)
            case _State.NO_ARGUMENTS if marker in (self.call_begin, self.section_end):
                self._markup_is_content("")
                self._state = _State.SECTION
            case _State.ARGUMENTS if marker == self.call_begin and not self._arguments.is_whole:
                self._add_arguments(marker)
            case _State.NO_ARGUMENTS | _State.ARGUMENTS:
                self._begin_arguments()
                self._end_call()
                self._state = _State.SECTION
        if self._state is _State.SECTION:
            if marker == self.call_begin:
                self._begin_header()
            elif marker == self.section_end:
                self._end_section(marker)
                self._state = _State.CONTENT

    def _begin_header(self) -> None:
        self._state, self._header, self._is_open = _State.HEADER, [], True
        self._markup.append(self.call_begin)

    def _end_header(self, marker: str) -> None:
        header = "".join(self._header)
        name_and_id = self.read_header(header) if marker == self.arguments_begin else None
        if name_and_id is not None:
            self._name, self._id = name_and_id
            self._markup += header, marker
            self._state = _State.NO_ARGUMENTS
            return
        self._markup_is_content(header)
        self._state = _State.SECTION
        if marker not in (self.call_begin, self.section_end):
            self._add_content(marker)

    def _begin_arguments(self) -> None:
        """Begins the call with its arguments, so that one that is cut off before them is none."""
        if self._state is _State.NO_ARGUMENTS:
            self._begin_call(self._name, self._id)
            self._state = _State.ARGUMENTS

    def _end(self) -> None:
        if self._state is _State.HEADER:
            self._markup_is_content("".join(self._header))
        elif self._state is _State.NO_ARGUMENTS or not self._has_calls:
            self._markup_is_content("")
