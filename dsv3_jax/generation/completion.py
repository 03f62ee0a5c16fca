"""What the Generator gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, overload

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """What one request came to."""

    text: str
    """Without the stop string, and without special tokens."""
    tokens: list[int]
    """All generated tokens, the one that stopped the request included."""
    logprobs: list[float]
    """Natural-log probability of each, before temperature and filters."""
    finish_reason: FinishReason
    """``stop``: a stop token or stop string; ``length``: max_new_tokens or max_len."""
    prompt_tokens: int
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """For each token, the most probable (token, logprob) pairs, best first."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Of one call of :meth:`Generator.generate`."""

    steps: int
    """Runs of the main model in the decode loop."""
    drafted: int
    accepted: int
    new_tokens: int
    time_to_first_token: float
    """Seconds from the call to the first token of the first batch, compilation included if any."""
    seconds: float
    """The whole call."""
    tokens_per_second: float
    """Tokens after each batch's first step, over the time they took."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 without speculation."""
        return self.accepted / self.drafted if self.drafted else 0.0


class Generation(Sequence[Completion]):
    """The completions, in the order of the prompts, and the call's :class:`Stats`."""

    def __init__(self, completions: Sequence[Completion], stats: Stats):
        self._completions = tuple(completions)
        self.stats = stats

    @overload
    def __getitem__(self, index: int) -> Completion: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Completion]: ...
    def __getitem__(self, index: int | slice) -> Completion | Sequence[Completion]:
        return self._completions[index]

    def __len__(self) -> int:
        return len(self._completions)

    def __repr__(self) -> str:
        return f"Generation({list(self._completions)!r}, stats={self.stats!r})"


class Piece(str):
    """Streamed text, with the tokens that came with it; the last piece has a finish_reason."""

    tokens: list[int]
    finish_reason: FinishReason | None

    def __new__(cls, text: str, tokens: list[int], finish_reason: FinishReason | None) -> Piece:
        piece = super().__new__(cls, text)
        piece.tokens = tokens
        piece.finish_reason = finish_reason
        return piece

    @property
    def text(self) -> str:
        return str(self)
