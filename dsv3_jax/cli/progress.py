"""How a run goes, on stderr: one line that changes on a terminal, a line a row elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text


class Progress:
    """Shows the rows of a run. On a terminal it shows the seconds of preparation before the first
    row. A context; what else is said meanwhile goes through :meth:`say`.

    Args:
      steps: of the whole run.
      shown: False for all processes of a run but one.
      console: where to write; default: stderr.
    """

    def __init__(self, steps: int, *, shown: bool = True, console: Console | None = None):
        self._steps = steps
        self._console = console or Console(stderr=True, highlight=False, quiet=not shown)
        self._latest: str | None = None
        self._entered = time.perf_counter()
        self._live = Live(console=self._console, get_renderable=self._shown, refresh_per_second=4)
        self._held_out: float | None = None
        self._began: tuple[int, float] | None = None

    def __enter__(self) -> Progress:
        self._entered = time.perf_counter()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._console.print(Text(f"dsv3: {line}"), soft_wrap=True)

    def row(self, row: dict[str, Any]) -> None:
        if "held_out" in row:
            self._held_out = row["held_out"]["main"]
        line = self._line(row)
        if self._console.is_terminal:
            self._latest = line
            self._live.refresh()
        else:
            self.say(line)

    def _shown(self) -> Text:
        line = self._latest
        if line is None:
            line = f"preparing the first step, {time.perf_counter() - self._entered:.0f} s"
        # One line, whatever the terminal's width: more of them would not be written over.
        return Text(f"dsv3: {line}", no_wrap=True, overflow="ellipsis")

    def _line(self, row: dict[str, Any]) -> str:
        step = row["step"]
        parts = [f"step {step}/{self._steps}"]
        if "losses" in row:
            losses = row["losses"]
            parts.append(f"loss {losses['main']:.4f}")
            parts.append(f"MTP {losses['mtp']:.4f} ({losses['mtp_agreement']:.0%} agree)")
        if self._held_out is not None:
            parts.append(f"held out {self._held_out:.4f}")
        if row.get("expert_load"):
            parts.append(f"load {max(row['expert_load']):.2f}")
        if row.get("tokens_per_second"):
            parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
        if row.get("mfu"):
            parts.append(f"MFU {row['mfu']:.1%}")
        return ", ".join(parts + self._left(step))

    def _left(self, step: int) -> list[str]:
        """Time to go, by the steps since the first row that a session has shown."""
        now = time.perf_counter()
        if self._began is None or step <= self._began[0]:
            # Step 0 and 1 compile: counting begins behind them.
            self._began = (step, now) if step else None
            return []
        first, then = self._began
        seconds = (now - then) / (step - first) * (self._steps - step)
        return [f"{seconds / 60:.0f} min to go" if seconds > 90 else f"{seconds:.0f} s to go"]
