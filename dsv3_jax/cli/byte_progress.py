"""How far a pass over files is, on stderr: a line that changes on a terminal, else one at times."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

_EVERY = 0.1  # seconds between two states of the line on a terminal
_EVERY_LINE = 5.0  # seconds between two lines elsewhere


class ByteProgress:
    """Counts bytes, from any thread. A context; what else is said meanwhile goes through
    :meth:`say`. It leaves one line behind: the bytes, the seconds and the rate.

    Args:
      total_bytes: all that will be added.
      label: what is done to them, "verify".
    """

    def __init__(self, total_bytes: int, label: str):
        self._total, self._label = total_bytes, label
        self._unit, self._name = (1e9, "GB") if total_bytes >= 1e9 else (1e6, "MB")
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
        done = f"{self._done / self._unit:.1f} {self._name}"
        if self._done < self._total:
            done += f" of {self._total / self._unit:.1f}"
        self.say(f"{self._label} {done} in {_time(seconds)}, {self._rate(seconds)}")

    def say(self, line: str) -> None:
        self._console.print(Text(f"dsv3: {line}"), soft_wrap=True)

    def add(self, count: int) -> None:
        """That many bytes more are done."""
        with self._lock:
            self._done += count
            now = time.perf_counter()
            terminal = self._console.is_terminal
            if now - self._shown < (_EVERY if terminal else _EVERY_LINE):
                return
            self._shown = now
            line = self._line(now - self._began)
            if terminal:
                # One line, whatever the terminal's width: more of them would not be written over.
                short = Text(f"dsv3: {line}", no_wrap=True, overflow="ellipsis")
                self._live.update(short, refresh=True)
            else:
                self.say(line)

    def _line(self, seconds: float) -> str:
        done = f"{self._done / self._unit:.1f}/{self._total / self._unit:.1f} {self._name}"
        left = seconds * (self._total - self._done) / max(self._done, 1)
        return f"{self._label} {done}, {self._rate(seconds)}, {_time(left)} to go"

    def _rate(self, seconds: float) -> str:
        rate = self._done / max(seconds, 1e-9)
        return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
