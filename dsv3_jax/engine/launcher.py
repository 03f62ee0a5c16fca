"""Launches programs on the engine's state, in a thread of its own.

A launch can block: XLA's GPU runtime waits for the device where a program has a loop whose length
is known on the device alone, and a long queue of kernels blocks as well. In its own thread a launch
does not keep the engine from planning the next step and processing earlier results.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from dsv3_jax.engine.errors import EngineError
from dsv3_jax.engine.state import SlotState

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
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        if background:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "dsv3-launcher")

    @property
    def state(self) -> SlotState:
        """The newest state. A launch under way may delete its arrays; their shapes stay."""
        return self._state

    def launch(self, function: Callable[[SlotState], tuple[SlotState, _T]]) -> Future[_T]:
        """Applies a function that takes the state, and returns the next state and a result.

        The future has the result or the error. After an error the state may be lost, so all later
        launches fail.
        """
        if self._thread is not None:
            return self._thread.submit(self._run, function)
        future: Future[_T] = Future()
        try:
            future.set_result(self._run(function))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Ends the thread after the launch under way. Those behind it are cancelled."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, function: Callable[[SlotState], tuple[SlotState, _T]]) -> _T:
        if self._error is not None:
            raise EngineError("launch: an earlier one failed") from self._error
        try:
            self._state, result = function(self._state)
        except BaseException as error:
            self._error = error
            raise
        return result
