"""Progress of a command on stderr: a line of its activity, of bytes, or of a training run."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

_PRINT_SECONDS, _PRINT_BYTES_SECONDS = 15.0, 5.0
"""Time between two lines of an activity, and of bytes, where there is no terminal."""
_REFRESH_SECONDS = 0.1
"""Time between two changes of the line of bytes on a terminal."""
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
            if now - self._shown < (_REFRESH_SECONDS if is_terminal else _PRINT_BYTES_SECONDS):
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


class TrainingProgress:
    """Context manager that shows the metrics of a run: on a terminal in one line that changes, else
    in one line per entry of metrics.jsonl.

    On a terminal it shows the seconds of preparation until the first entry. While it is open, other
    messages must go through :meth:`print`.

    Args:
      steps: number of steps of the whole run.
      is_shown: False on every process of a run but one.
      console: where to write. Default: stderr.
    """

    def __init__(self, steps: int, *, is_shown: bool = True, console: Console | None = None):
        self._steps = steps
        self._console = console or Console(stderr=True, highlight=False, quiet=not is_shown)
        self._latest: str | None = None
        self._entered = time.perf_counter()
        self._live = Live(
            console=self._console, get_renderable=self._renderable, refresh_per_second=4
        )
        self._held_out: tuple[float, int] | None = None  # the last measured loss, and its step

    def __enter__(self) -> TrainingProgress:
        self._entered = time.perf_counter()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def print(self, line: str) -> None:
        """Prints a line that stays."""
        self._console.print(Text(f"dsv3: {line}"), soft_wrap=True)

    def show(self, entry: dict[str, Any]) -> None:
        """Shows a entry of metrics.jsonl."""
        if "held_out" in entry:
            held_out = entry["held_out"]
            # Training of drafts does not change the main loss.
            self._held_out = held_out.get("drafts") or held_out["main"], entry["step"]
        line = self._line(entry)
        if self._console.is_terminal:
            self._latest = line
            self._live.refresh()
        else:
            self.print(line)

    def _renderable(self) -> Text:
        line = self._latest
        if line is None:
            line = f"preparing the first step, {time.perf_counter() - self._entered:.0f} s"
        # Never wrapped: only one line would be overwritten.
        return Text(f"dsv3: {line}", no_wrap=True, overflow="ellipsis")

    def _line(self, entry: dict[str, Any]) -> str:
        step = entry["step"]
        parts = [f"step {step}/{self._steps}"]
        if "losses" in entry:
            losses = entry["losses"]
            parts.append(f"loss {losses['main']:.4f}")
            parts.append(f"MTP {losses['mtp']:.4f} ({losses['mtp_agreement']:.0%} agree)")
            if losses.get("drafts"):
                parts.append(f"drafts {losses['drafts']:.4f}")
        if self._held_out is not None:
            loss, measured = self._held_out
            at = "" if measured == step else f" at step {measured}"
            # A terminal has one line, which keeps the last measurement. A log has a line for it.
            if not at or self._console.is_terminal:
                parts.append(f"held out {loss:.4f}{at}")
        if entry.get("expert_load"):
            parts.append(f"load {max(entry['expert_load']):.2f}")
        if entry.get("tokens_per_second"):
            parts.append(f"{entry['tokens_per_second']:,.0f} tokens/s")
        if entry.get("mfu"):
            parts.append(f"MFU {entry['mfu']:.1%}")
        if entry.get("peak_memory_bytes"):
            parts.append(f"{entry['peak_memory_bytes'] / 1e9:.1f} GB")
        if entry.get("seconds_left"):
            parts.append(f"{_duration(entry['seconds_left'])} to go")
        return ", ".join(parts)
