"""The messages between both processes. They trust each other: one has started the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dsv3_jax.engine import EngineError, QueueFullError, RequestError
from dsv3_jax.engine.requests.request import PromptRecord
from dsv3_jax.generation.completion import Completion, TopLogprobs
from dsv3_jax.generation.errors import NonFiniteLogitsError
from dsv3_jax.server.grammar import GrammarError, GrammarSource


class Hello(NamedTuple):
    """First message of the engine's process."""

    vocab_size: int
    end_tokens: tuple[int, ...]


class GrammarStart(NamedTuple):
    """A grammar of one answer, to be started in the engine's process. The arguments are those of
    :meth:`dsv3_jax.server.grammar.Grammars.start`."""

    source: GrammarSource
    prompt: Sequence[int] | None


class Call(NamedTuple):
    """Asks for the result of a method of :class:`EngineHost`."""

    number: int  # number of its reply
    method: str
    arguments: tuple[Any, ...]


class Reply(NamedTuple):
    """Result of a call."""

    number: int
    result: Any
    error: PortableError | None


class Gain(NamedTuple):
    """The text and tokens of one request since the last message."""

    id: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None
    accepted_drafts: list[int]
    prompt_record: PromptRecord | None  # with the first message of a request that asks for it
    completion: Completion | None  # at the end of the request
    error: PortableError | None  # if it failed


class Gains(NamedTuple):
    """The gains of all requests since the last message."""

    gains: list[Gain]


class Alive(NamedTuple):
    """A sign of life of the engine's process, which comes several times a second."""

    step_seconds: float
    """Seconds since the engine's step under way began, without those of compilations; 0 if there is
    none."""


class Compiling(NamedTuple):
    """The engine's process begins to compile a program that a step waits for, or has ended. It may
    give no sign of life meanwhile, because lowering keeps Python's lock."""

    program: str | None  # the program; None at the end


class Failed(NamedTuple):
    """The engine cannot serve any more."""

    message: str


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (EngineError, RequestError, QueueFullError, GrammarError, ValueError)
}
# Its completions do not travel. As a ValueError it would count as an error of the client.
_KINDS[NonFiniteLogitsError.__name__] = RequestError


class PortableError(NamedTuple):
    """An exception as text. Exceptions do not keep their causes, or their fields, in a pickle."""

    kind: str
    message: str
    cause: PortableError | None

    @classmethod
    def of(cls, error: BaseException) -> PortableError:
        """Returns an exception as text. One of an unknown class becomes one that it inherits from,
        or a RuntimeError."""
        kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _KINDS), "")
        cause = error.__cause__
        return cls(kind, str(error), None if cause is None else cls.of(cause))

    def exception(self) -> Exception:
        error = _KINDS.get(self.kind, RuntimeError)(self.message)
        if self.cause is not None:
            error.__cause__ = self.cause.exception()
        return error
