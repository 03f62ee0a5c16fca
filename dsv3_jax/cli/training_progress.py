"""Progress of a training run on stderr."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text


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
        self._start: tuple[int, float] | None = None  # step and time

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
        return ", ".join(parts + self._remaining(step))

    def _remaining(self, step: int) -> list[str]:
        """Returns the remaining time, estimated from the steps since this session's first entry."""
        now = time.perf_counter()
        if self._start is None or step <= self._start[0]:
            # Steps 0 and 1 include compilation, so the clock starts after them.
            self._start = (step, now) if step else None
            return []
        first_step, first_time = self._start
        seconds = (now - first_time) / (step - first_step) * (self._steps - step)
        return [f"{seconds / 60:.0f} min to go" if seconds > 90 else f"{seconds:.0f} s to go"]
