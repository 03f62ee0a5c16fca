"""Limits of a scheduler. Pure Python."""

from __future__ import annotations

import dataclasses


class QueueFullError(RuntimeError):
    """The waiting queue holds as many requests as it may."""


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a scheduler."""

    max_running: int
    """Number of slots of each shard."""
    chunk_tokens: int
    """Most tokens in a chunk; one chunk is one segment of the compiled step."""
    max_chunks: int
    """Most chunks of each shard in a step. Its product with ``chunk_tokens`` is the shard's prefill
    budget of a step."""
    multi_step_decodes: int | None = None
    """Most requests on a shard that decode several steps in a dispatch; None for no limit."""
    max_waiting: int = 4096
    priority_seconds: float = 10.0
    """Head start, in seconds, that a request has over one with the next higher priority number."""

    separate: bool = False
    """Whether a step either prefills or decodes. Prompts come first."""
    refill_steps: int = 1
    """While requests wait: decode steps of a dispatch during which the slot of a request that has
    ended may stay empty."""

    aligned_prefixes: bool = False
    """Whether a request reuses whole chunks alone, which other requests prefilled as it would have:
    no part of a chunk, and no tokens that were generated."""

    def __post_init__(self) -> None:
        names = ("max_running", "chunk_tokens", "max_chunks", "max_waiting", "refill_steps")
        for name in names:
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
