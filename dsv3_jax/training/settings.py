"""What a training run does beside its steps."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What a run does beside its steps. "Every" counts steps, and 0 means at the end alone.

    Raises:
      ValueError: a number is out of range.
    """

    batch: int = 8
    """Windows a step."""
    length: int = 1024
    """Tokens a window."""
    seed: int = 0
    """Of the order of the windows."""
    log_every: int = 10
    """Steps between rows of metrics.jsonl."""
    eval_every: int = 0
    """Steps between evaluations on held-out text; also before the first step and at the end."""
    eval_batches: int = 16
    """Batches an evaluation takes at most, spread over the held-out text; 0 takes all."""
    save_every: int = 0
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept; 0 writes none, and the run cannot be resumed."""
    max_minutes: float | None = None
    """Stop after the first step that ends later than this."""

    def __post_init__(self) -> None:
        for name, least in {"batch": 1, "length": 2}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        for name in ("seed", "log_every", "eval_every", "eval_batches", "save_every", "keep"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError(f"max_minutes: expected more than 0, got {self.max_minutes}")
