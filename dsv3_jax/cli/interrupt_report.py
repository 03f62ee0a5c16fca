"""Reports what an interrupted command has kept, after Ctrl-C or a kill."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from dsv3_jax.cli.interrupts import STATUS

_TERMINATED = 128 + signal.SIGTERM  # the status that a shell reports for a killed command


@contextlib.contextmanager
def report_interrupt(command: str, report: Callable[[], str]) -> Iterator[None]:
    """Prints a line on stderr if SIGINT (Ctrl-C) or SIGTERM (kill, a scheduler) ends the block.

    SIGTERM ends the process with status 143.

    Args:
      command: name of the subcommand.
      report: returns what was kept and how to continue. It is called after the work has ended.
    """
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
