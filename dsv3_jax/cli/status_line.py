"""A line on the terminal that shows what the command is doing."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.text import Text


class StatusLine:
    """Context manager that shows a line on stderr and erases it at the end.

    The line has the activity, its seconds so far, and its progress, as in
    ``dsv3: generating, 12 s, 3,072 tokens``. Nothing is shown if stderr is not a terminal.

    Args:
      activity: for example "compiling".
      console: where to write. Default: stderr.
    """

    def __init__(self, activity: str, console: Console | None = None):
        self._activity = activity
        self._progress = ""
        self._began = time.perf_counter()
        self._console = console or Console(stderr=True, highlight=False)
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
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, progress: str) -> None:
        """Sets the progress. It appears at the next refresh, so that calling this costs nothing."""
        self._progress = progress

    def _line(self) -> Text:
        seconds = f"{time.perf_counter() - self._began:.0f} s"
        line = ", ".join(filter(None, (self._activity, seconds, self._progress)))
        # Never wrapped: only one line would be erased.
        return Text(f"dsv3: {line}", no_wrap=True, overflow="ellipsis")
