"""Ctrl-C (SIGINT) in a command and in long calls. Imports the standard library alone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NoReturn, Self

STATUS = 130  # the exit status that a shell reports after Ctrl-C

_RESEND_SECONDS = 0.01  # delay until a lost interrupt is sent again
_TERMINATED = 128 + signal.SIGTERM  # the status that a shell reports for a killed command


class Interrupts:
    """Ends the process at once while modules are imported, and raises KeyboardInterrupt afterwards.

    An exception is no safe way out of an import: C extensions turn KeyboardInterrupt into
    ImportError, or crash. It does not leave a destructor or a callback of the garbage collector
    either, and JAX has such a callback. Python drops the exception there, so the signal is sent
    again until it raises elsewhere.

    A process that ignores SIGINT, such as a background job of a script, continues to ignore it.
    """

    def __init__(self) -> None:
        self.seen = False  # an interrupt. An exception after it is attributed to it.
        self._has_raised = False
        self._is_ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if not self._is_ignored:
            signal.signal(signal.SIGINT, lambda *_: os._exit(STATUS))

    def raise_from_now_on(self) -> None:
        """Makes later interrupts raise KeyboardInterrupt. Called when the modules are imported."""
        if not self._is_ignored:
            sys.unraisablehook = self._handle_unraisable
            signal.signal(signal.SIGINT, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if _is_called_from(frame, Interrupts._handle_unraisable.__code__):
            return  # Python would drop the exception here, too
        self._has_raised = True
        signal.default_int_handler(number, frame)

    def _handle_unraisable(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(unraisable)
            return
        self._has_raised = False
        threading.Thread(target=self._resend, daemon=True).start()

    def _resend(self) -> None:
        while True:
            time.sleep(_RESEND_SECONDS)
            if self._has_raised:
                return
            os.kill(os.getpid(), signal.SIGINT)


def _is_called_from(frame: FrameType | None, function: CodeType) -> bool:
    """Returns whether a function is on the stack that ends with ``frame``."""
    while frame is not None and frame.f_code is not function:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def report_interrupt(command: str, report: Callable[[], str]) -> Iterator[None]:
    """Prints a line on stderr if SIGINT (Ctrl-C) or SIGTERM (kill, a scheduler) ends the block of
    the subcommand ``command``. SIGTERM ends the process with status 143. ``report`` is called after
    the work has ended, and returns what was kept and how to continue."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    # A process that ignores SIGTERM, or has its own handler, keeps that behaviour.
    is_ours = in_main_thread and before == signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        status = error.code if isinstance(error, SystemExit) else STATUS
        if status in (STATUS, _TERMINATED):
            print(f"dsv3 {command}: interrupted: {report()}", file=sys.stderr)
        raise
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(_TERMINATED)


class FirstInterrupt:
    """Context manager in which the first SIGINT only sets a flag. A second one acts as before. It
    does nothing if it is not active, if SIGINT is ignored, or in other threads than the main one,
    where Python runs no signal handlers."""

    def __init__(self, is_active: bool = True) -> None:
        self.is_made = False  # whether there was a SIGINT
        self._is_active = is_active
        self._before: Any = None

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._is_active and in_main_thread and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_made:
            self._before(number, frame)
        self.is_made = True


class StopRequest(FirstInterrupt):
    """Ctrl-C as a request to stop at the next point where no work is lost."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.is_made:
            # Not with print, which the signal may have interrupted.
            line = "dsv3: stopping after this step; interrupt again to stop at once\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
        super()._handle(number, frame)


class DeferredInterrupt(FirstInterrupt):
    """Delays Ctrl-C until :meth:`deliver`: a dispatch to the device cannot be interrupted. Python
    would raise KeyboardInterrupt after it, perhaps in the middle of an update."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        super().__exit__(kind)
        if kind is None:
            self.deliver()

    def deliver(self, *, in_other_process: bool = False) -> None:
        """Calls the handler before if a SIGINT is pending, or arrived in another process. The
        default handler raises KeyboardInterrupt."""
        if self.is_made or in_other_process:
            self.is_made = False
            (self._before or signal.default_int_handler)(signal.SIGINT, None)
