"""Parts of an answer, in the order in which the model writes them."""

from __future__ import annotations

import dataclasses


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

    index: int
    """Number of tool calls before it."""
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
