"""Tool calls in text that arrives piece by piece: what the parsers of all formats share, and the
events that they return.

A parser never fails. Markup that is not a tool call stays in the content. Arguments are passed on
as the model writes them, even if they are no JSON, with two exceptions: arguments that the model
leaves out are ``{}``, and their last character, or the end of a JSON object with what follows it,
is passed on with the end of the call. So a call that is cut off never has a whole object.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import itertools
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import ClassVar

from dsv3_jax.server.parsers.marker_reader import MarkerReader, Markers


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """New text of the reasoning."""

    text: str


@dataclasses.dataclass(frozen=True)
class Content:
    """New text of the answer itself."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallBegin:
    """Beginning of a tool call. Its arguments follow."""

    index: int  # number of tool calls before it
    id: str
    name: str


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """New text of a tool call's arguments, which should be JSON."""

    index: int
    text: str
    is_last: bool = False
    """Whether the call is at its end. That of a call that is cut off never comes."""


Event = Reasoning | Content | CallBegin | CallArguments


NAME = r"[a-zA-Z0-9_.-]{1,128}"
"""Names of functions that all formats can express. Other names are refused in requests, and are no
calls in answers."""

_IN_STRING, _OUTSIDE = re.compile(r'["\\]'), re.compile(r'["{}]')


class ToolParser(abc.ABC):
    """Follows one text. The events do not depend on its pieces, apart from where text is split."""

    ends_reasoning: ClassVar[tuple[str, ...]]
    """Markers of the beginning of calls, which end the reasoning like ``</think>``."""

    def __init__(self) -> None:
        self._reader = MarkerReader(self._markers, self._read_text, self._read_marker)
        self._events: list[Event] = []
        self._calls = 0
        self._arguments = _Arguments()  # of the last call
        # Markup that becomes content if no call follows.
        self._markup: list[str] = []
        self._has_calls = False  # in this section
        self._is_open = False  # the text ends where calls may follow
        self._has_broken_calls = False

    @property
    def is_finished(self) -> bool:
        """Whether all calls so far are at their end, and the text is outside of calls."""
        return not (self._is_open or self._has_broken_calls)

    def add(self, text: str, *, is_last: bool = False) -> list[Event]:
        """Returns the events of the next piece."""
        self._reader.add(text)
        if is_last:
            is_open = self._is_open
            self._reader.add("", is_last=True)
            self._is_open = is_open  # also after a part of a marker
            self._end()
        events, self._events = self._events, []
        return list(_joined(events))

    @abc.abstractmethod
    def _markers(self) -> Markers:
        """Returns the markers that count in the current state."""

    @abc.abstractmethod
    def _read_text(self, text: str) -> None:
        """Reads text between markers."""

    @abc.abstractmethod
    def _read_marker(self, marker: str) -> None:
        """Reads a marker."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Reads the end of the text."""

    def _add_content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _begin_section(self, marker: str) -> None:
        self._markup, self._has_calls, self._is_open = [marker], False, True

    def _read_between(self, text: str) -> None:
        """Reads text between calls. White space before a call or the section's end is markup."""
        content = text.rstrip()
        if content:
            self._markup_is_content(content)
            self._is_open = False
        self._markup.append(text[len(content) :])

    def _end_section(self, marker: str) -> None:
        if not self._has_calls:
            self._markup_is_content(marker)
        self._markup, self._is_open = [], False

    def _markup_is_content(self, text: str) -> None:
        self._add_content("".join(self._markup) + text)
        self._markup = []

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        call_id = call_id or f"call_{uuid.uuid4().hex[:24]}"
        self._events.append(CallBegin(self._calls, call_id, name))
        self._calls += 1
        self._arguments = _Arguments()
        self._markup, self._has_calls = [], True

    def _add_arguments(self, text: str) -> None:
        if text := self._arguments.add(text):
            self._events.append(CallArguments(self._calls - 1, text))

    def _end_call(self) -> None:
        self._events.append(CallArguments(self._calls - 1, self._arguments.rest(), is_last=True))


def _joined(events: Sequence[Event]) -> Iterator[Event]:
    """Yields events, with adjacent texts of the same part as one, so that those who add them up
    need no quadratic time."""
    for _, group in itertools.groupby(events, lambda e: (type(e), getattr(e, "index", None))):
        parts = list(group)
        match parts[-1]:
            case Content():
                yield Content("".join(part.text for part in parts if isinstance(part, Content)))
            case CallArguments(index, _, is_last):
                text = "".join(part.text for part in parts if isinstance(part, CallArguments))
                yield CallArguments(index, text, is_last=is_last)
            case event:
                yield event


class _Arguments:
    """Follows the arguments of one call, and keeps back their end."""

    def __init__(self) -> None:
        self._is_object: bool | None = None  # None for white space alone
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._rest: list[str] = []

    @property
    def is_whole(self) -> bool:
        """Whether they are a JSON object that is at its end."""
        return bool(self._is_object and self._rest)

    def add(self, text: str) -> str:
        """Returns the text that may be passed on."""
        if self._is_object is None:
            self._is_object = text.lstrip().startswith("{") if text.strip() else None
        if not self._is_object:
            text = "".join([*self._rest, text])
            self._rest = [text[-1:]]
            return text[:-1]
        end = 0 if self._rest else self._object_end(text)
        if end is None:
            return text
        self._rest.append(text[end:])
        return text[:end]

    def rest(self) -> str:
        """Returns the text that was kept back, for the end of the call."""
        return "{}" if self._is_object is None else "".join(self._rest)

    def _object_end(self, text: str) -> int | None:
        """Returns the position of the brace that closes the object, if the text has it."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                at, self._is_escaped = at + 1, False
                continue
            match = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if match is None:
                return None
            at, mark = match.end(), match[0]
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == "\\":
                self._is_escaped = True
            else:
                self._depth += 1 if mark == "{" else -1
                if not self._depth:
                    return at - 1
        return None


def function_name(text: str) -> str | None:
    """Returns the name of a function without white space around it, or None if it is none."""
    name = text.strip()
    return name if re.fullmatch(NAME, name) else None


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
                self._state, self._header, self._is_open = _State.HEADER, [], True
                self._markup.append(self.call_begin)
            elif marker == self.section_end:
                self._end_section(marker)
                self._state = _State.CONTENT

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
