"""Shows on a terminal what the command is waiting for."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.text import Text


class Waiting:
    """A context that shows one line on stderr: what the command does, since how many seconds, and
    how far it is, such as ``dsv3: generating, 12 s, 3,072 tokens``. It erases the line at its end.

    Shows nothing if stderr is not a terminal.

    Args:
      doing: such as "compiling".
      console: where to write; default: stderr.
    """

    def __init__(self, doing: str, console: Console | None = None):
        self._doing = doing
        self._so_far = ""
        self._began = time.perf_counter()
        self._console = console or Console(stderr=True, highlight=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._line,
            refresh_per_second=4,
            transient=True,
            # What is printed meanwhile is the command's own affair.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Waiting:
        self._began = time.perf_counter()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, so_far: str) -> None:
        """Takes how far it is, to be shown from the next refresh on; costs nothing."""
        self._so_far = so_far

    def _line(self) -> Text:
        seconds = f"{time.perf_counter() - self._began:.0f} s"
        line = ", ".join(filter(None, (self._doing, seconds, self._so_far)))
        # One line, whatever the terminal's width: more of them would not be erased.
        return Text(f"dsv3: {line}", no_wrap=True, overflow="ellipsis")
