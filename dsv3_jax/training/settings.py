"""Settings of a training run that are not hyperparameters of its steps."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Data, logging, evaluation and checkpoint settings of a run.

    An interval of 0 means that the action happens only at the end of the run.

    Raises:
      ValueError: a number is out of range.
    """

    batch: int = 8
    """Number of sequences per step."""
    length: int = 1024
    """Tokens per sequence."""
    seed: int = 0
    """Seed of the order of the sequences."""
    log_every: int = 10
    """Steps between entries of metrics.jsonl."""
    eval_every: int = 0
    """Steps between evaluations on held-out text. There is always one before the first step and one
    at the end."""
    eval_batches: int = 16
    """Maximum number of batches per evaluation, spread over the held-out text. 0 means all."""
    save_every: int = 0
    """Steps between checkpoints."""
    keep: int = 2
    """Number of checkpoints to keep. 0 writes none, and the run cannot be resumed."""
    max_minutes: float | None = None
    """Time limit of a session. The first step that ends later is the session's last."""

    check_memory: bool = True
    """Whether to refuse, before it begins, a run whose step needs more memory than the devices
    have."""

    def __post_init__(self) -> None:
        for name, least in {"batch": 1, "length": 2}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        for name in ("seed", "log_every", "eval_every", "eval_batches", "save_every", "keep"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError(f"max_minutes: expected more than 0, got {self.max_minutes}")
