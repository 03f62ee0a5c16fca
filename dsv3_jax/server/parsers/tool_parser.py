"""Tool calls in text that arrives piece by piece: what the parsers of all formats share.

A parser never fails. Markup that is not a tool call stays in the content. Arguments are passed on
as the model writes them, even if they are no JSON.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Collection
from typing import ClassVar

from dsv3_jax.server.parsers.events import CallArguments, CallBegin, Content, Event
from dsv3_jax.server.parsers.marker_reader import MarkerReader


class ToolParser(abc.ABC):
    """Follows one text. The events do not depend on its pieces, apart from where text is split."""

    ends_reasoning: ClassVar[tuple[str, ...]] = ()
    """Markers with which a model may end its reasoning, without ``</think>``."""

    def __init__(self) -> None:
        self._reader = MarkerReader(self._markers, self._read_text, self._read_marker)
        self._events: list[Event] = []
        self._calls = 0

    def add(self, text: str, *, is_last: bool = False) -> list[Event]:
        """Returns the events of the next piece."""
        self._reader.add(text, is_last=is_last)
        if is_last:
            self._end()
        events, self._events = self._events, []
        return events

    @abc.abstractmethod
    def _markers(self) -> Collection[str]:
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

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        call_id = call_id or f"call_{uuid.uuid4().hex[:24]}"
        self._events.append(CallBegin(self._calls, call_id, name))
        self._calls += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._calls - 1, text))
