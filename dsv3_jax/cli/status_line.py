"""A line on the terminal that shows what the command is doing."""

from __future__ import annotations

import logging
import threading
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

_PRINT_SECONDS = 15.0
"""Time between two lines where there is no terminal."""
_LOGGER = logging.getLogger("dsv3_jax")


class _AboveLine(logging.Handler):
    """Prints what is logged above the line, which it would otherwise break.

    It does nothing while another handler prints on stderr, as in a server.
    """

    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if _LOGGER.handlers == [self]:
            self._console.print(Text(f"dsv3: {record.getMessage()}"), soft_wrap=True)


class StatusLine:
    """Context manager that shows a line on stderr and erases it at the end.

    The line has the activity, its seconds so far, and its progress, as in
    ``dsv3: generating, 12 s, 3,072 tokens``. What is logged meanwhile appears above it. Where
    stderr is not a terminal, the line is printed every 15 seconds.

    Args:
      activity: for example "compiling".
      console: where to write. Default: stderr.
    """

    def __init__(self, activity: str, console: Console | None = None):
        self._activity = activity
        self._progress = ""
        self._began = time.perf_counter()
        self._console = console or Console(stderr=True, highlight=False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print, name="dsv3-status", daemon=True)
        self._log = _AboveLine(self._console)
        self._live = Live(
            console=self._console,
            get_renderable=self._line,
            refresh_per_second=4,
            transient=True,
            # The command's own output must pass unchanged.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> StatusLine:
        self._began = time.perf_counter()
        if self._console.is_terminal:
            self._live.start()
            _LOGGER.addHandler(self._log)
        else:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:
            _LOGGER.removeHandler(self._log)
            self._live.stop()
        else:
            self._ended.set()
            self._thread.join()

    def show(self, progress: str) -> None:
        """Sets the progress. It appears at the next refresh, so that calling this costs nothing."""
        self._progress = progress

    def _print(self) -> None:
        while not self._ended.wait(_PRINT_SECONDS):
            self._console.print(self._line(), soft_wrap=True)

    def _line(self) -> Text:
        seconds = f"{time.perf_counter() - self._began:.0f} s"
        line = ", ".join(filter(None, (self._activity, seconds, self._progress)))
        # Never wrapped: only one line would be erased.
        return Text(f"dsv3: {line}", no_wrap=True, overflow="ellipsis")
