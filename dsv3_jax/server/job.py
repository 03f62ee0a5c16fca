"""One HTTP request's completions in the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from dsv3_jax.engine import EngineError, EngineRequest, RequestError
from dsv3_jax.generation.completion import Completion, Piece
from dsv3_jax.generation.errors import NonFiniteLogitsError
from dsv3_jax.server.errors import ApiError, engine_failed, overloaded
from dsv3_jax.server.grammar import GrammarError

_FAILURES = EngineError, RequestError, NonFiniteLogitsError


class Job:
    """The completions of one HTTP request: ``n`` for each of its prompts, in order. ``on_close`` is
    called once, when nobody waits for them any more."""

    def __init__(self, handles: Sequence[EngineRequest], on_close: Callable[[Job], None]):
        self.handles = list(handles)
        self._on_close: Callable[[Job], None] | None = on_close

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields pieces of text, with the index of their completion, as they arrive. Raises
        ApiError if a completion failed, was cancelled by the engine, or ran out of time."""
        if len(self.handles) == 1:  # without the tasks and the queue below, which cost every token
            async with contextlib.aclosing(_checked(self.handles[0])) as pieces:
                async for piece in pieces:
                    yield 0, piece
            return
        queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(maxsize=1)

        async def forward(index: int, handle: EngineRequest) -> None:
            try:
                async for piece in _checked(handle):
                    await queue.put((index, piece))
            except Exception as error:  # of any kind: the reader below waits for it
                await queue.put((index, error))

        tasks = [asyncio.create_task(forward(*each)) for each in enumerate(self.handles)]
        try:
            left = len(tasks)
            while left:
                index, piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                left -= piece.finish_reason is not None
                yield index, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def completions(self) -> list[Completion]:
        try:
            completions = await asyncio.gather(*(h.async_result() for h in self.handles))
        except _FAILURES as error:
            raise _failed(error) from None
        for completion in completions:
            _check_reason(completion.finish_reason)
        return completions

    def completion(self, index: int) -> Completion:
        """Returns a completion that is at its end."""
        return self.handles[index].result(0)

    def close(self) -> None:
        """Cancels what is not at its end. Further calls do nothing."""
        if self._on_close is not None:
            self._on_close(self)
            self._on_close = None


async def _checked(handle: EngineRequest) -> AsyncGenerator[Piece, None]:
    try:
        async with contextlib.aclosing(aiter(handle)) as pieces:
            async for piece in pieces:
                _check_reason(piece.finish_reason)
                yield piece
    except _FAILURES as error:
        raise _failed(error) from None


def _failed(error: Exception) -> ApiError:
    if isinstance(error.__cause__, GrammarError):
        return ApiError.of_engine(error.__cause__, "prompt")
    return engine_failed(error)


def _check_reason(reason: str | None) -> None:
    """Raises ApiError for a finish reason that is no success."""
    if reason == "timeout":
        raise ApiError(504, "request: it took longer than the server allows", kind="timeout_error")
    if reason not in (None, "stop", "length"):
        raise overloaded(f"request: the server ended it ({reason}); try again later")
