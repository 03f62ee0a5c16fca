"""Progress of a pass over files on stderr."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

_REFRESH_SECONDS = 0.1  # on a terminal, where one line changes
_PRINT_SECONDS = 5.0  # elsewhere, between two lines


class ByteProgress:
    """Context manager that counts processed bytes, from any thread, and shows their rate.

    On a terminal one line changes; elsewhere a line is printed every few seconds. The last line,
    with the bytes, the seconds and the rate, stays. While it is open, other messages must go
    through :meth:`print`.

    Args:
      total_bytes: sum of all future :meth:`add` calls.
      label: verb for the work, for example "verify".
    """

    def __init__(self, total_bytes: int, label: str):
        self._total, self._label = total_bytes, label
        self._unit, self._unit_name = (1e9, "GB") if total_bytes >= 1e9 else (1e6, "MB")
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._shown = time.perf_counter()

    def __enter__(self) -> ByteProgress:
        self._began = self._shown = time.perf_counter()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        seconds = time.perf_counter() - self._began
        done = f"{self._done / self._unit:.1f} {self._unit_name}"
        if self._done < self._total:
            done += f" of {self._total / self._unit:.1f}"
        self.print(f"{self._label} {done} in {_duration(seconds)}, {self._rate(seconds)}")

    def print(self, line: str) -> None:
        """Prints a line that stays."""
        self._console.print(Text(f"dsv3: {line}"), soft_wrap=True)

    def add(self, count: int) -> None:
        """Counts ``count`` more bytes as processed."""
        with self._lock:
            self._done += count
            now = time.perf_counter()
            is_terminal = self._console.is_terminal
            if now - self._shown < (_REFRESH_SECONDS if is_terminal else _PRINT_SECONDS):
                return
            self._shown = now
            line = self._line(now - self._began)
            if is_terminal:
                # Never wrapped: only one line would be overwritten.
                short = Text(f"dsv3: {line}", no_wrap=True, overflow="ellipsis")
                self._live.update(short, refresh=True)
            else:
                self.print(line)

    def _line(self, seconds: float) -> str:
        done = f"{self._done / self._unit:.1f}/{self._total / self._unit:.1f} {self._unit_name}"
        remaining = seconds * (self._total - self._done) / max(self._done, 1)
        return f"{self._label} {done}, {self._rate(seconds)}, {_duration(remaining)} to go"

    def _rate(self, seconds: float) -> str:
        rate = self._done / max(seconds, 1e-9)
        return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
