"""What is kept of work that Ctrl-C or a kill ends."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from dsv3_jax.cli.interrupts import STATUS

_TERMINATED = 128 + signal.SIGTERM  # what a shell reports for a command that a kill ended


@contextlib.contextmanager
def saying_what_is_kept(command: str, kept: Callable[[], str]) -> Iterator[None]:
    """Says in one line on stderr what is kept and how to continue, if SIGINT (Ctrl-C) or SIGTERM
    (kill, a scheduler) ends the block. SIGTERM ends the process with status 143.

    Args:
      command: name of the subcommand.
      kept: makes the line; is called when the work has ended.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    # A process that ignores SIGTERM, or has a handler of its own, goes on doing so.
    in_charge = in_main_thread and before == signal.SIG_DFL
    if in_charge:
        signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        status = error.code if isinstance(error, SystemExit) else STATUS
        if status in (STATUS, _TERMINATED):
            print(f"dsv3 {command}: interrupted: {kept()}", file=sys.stderr)
        raise
    finally:
        if in_charge:
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(_TERMINATED)
