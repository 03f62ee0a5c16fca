"""Launches programs on the engine's state, in a thread of its own.

A launch can block: XLA's GPU runtime waits for the device where a program has a loop whose length
is known on the device alone, and a long queue of kernels blocks as well. In its own thread a launch
does not keep the engine from planning the next step and processing earlier results.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

from dsv3_jax.engine.device.state import SlotState
from dsv3_jax.engine.errors import EngineError

_T = TypeVar("_T")


class Launcher:
    """Owns the state, and applies functions to it one after the other in the order of their launch.

    Args:
      state: the initial state. Functions may donate it, so nobody else keeps it.
      background: whether a thread runs them. Otherwise each has run when :meth:`launch` returns.
    """

    def __init__(self, state: SlotState, *, background: bool):
        self._state = state
        self._error: BaseException | None = None
        self._is_closed = False
        self._closing = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any]] | None]
        self._queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if background:
            # A daemon, unlike the threads of a pool: while the interpreter waits for threads that
            # read results, the engine goes on. The engine's own thread ends this one.
            self._thread = threading.Thread(target=self._work, name="dsv3-launcher", daemon=True)
            self._thread.start()

    @property
    def state(self) -> SlotState:
        """The newest state. A launch under way may delete its arrays; their shapes stay."""
        return self._state

    def launch(self, function: Callable[[SlotState], tuple[SlotState, _T]]) -> Future[_T]:
        """Applies a function that takes the state, and returns the next state and a result.

        The future has the result or the error. After an error the state may be lost, so all later
        launches fail.

        Raises:
          EngineError: the launcher is closed.
        """
        future: Future[_T] = Future()
        with self._closing:  # a launch behind the end of the queue would wait for ever
            if self._is_closed:
                raise _closed()
            if self._thread is not None:
                self._queue.put((future, function))
                return future
        self._run(future, function)
        return future

    def close(self) -> None:
        """Ends the thread after the launch under way, and frees the state's arrays. Launches behind
        it fail with an EngineError."""
        with self._closing:
            self._is_closed = True
            self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
        for array in jax.tree.leaves(self._state):
            if isinstance(array, jax.Array):
                array.delete()

    def _work(self) -> None:
        """The body of the thread."""
        while (launch := self._queue.get()) is not None:
            with contextlib.suppress(BaseException):  # the future has it, and later ones wait
                self._run(*launch)

    def _run(
        self, future: Future[_T], function: Callable[[SlotState], tuple[SlotState, _T]]
    ) -> None:
        if self._is_closed:
            # Not cancelled: `concurrent.futures.wait` would not see that.
            future.set_exception(_closed())
            return
        try:
            if self._error is not None:
                raise EngineError("launch: an earlier one failed") from self._error
            self._state, result = function(self._state)
        except BaseException as error:
            self._error = self._error or error
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            future.set_result(result)


def _closed() -> EngineError:
    return EngineError("launch: expected one before the shutdown")
