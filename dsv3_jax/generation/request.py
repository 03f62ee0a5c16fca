"""What a caller asks of the Generator, checked, and what comes back."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, overload

FLOAT32_MAX = 2.0**128 - 2.0**104

FinishReason = Literal["stop", "length"]
Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt with its settings.

    Raises:
      ValueError: a setting is out of range; the message names it, what was expected and what came.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        integer, real = numbers.Integral, numbers.Real  # NumPy's are among them
        check("max_new_tokens", self.max_new_tokens, "an integer of at least 1", integer, 1)
        expected = "a number in [0, 3.4e38]"
        check("temperature", self.temperature, expected, real, 0, FLOAT32_MAX)
        check("top_p", self.top_p, "a number in (0, 1]", real, 0, 1)
        if self.top_p == 0:
            raise ValueError("top_p: expected a number in (0, 1], got 0")
        check("top_k", self.top_k, "an integer in [0, 2**31)", integer, 0, 2**31 - 1)
        check("min_p", self.min_p, "a number in [0, 1]", real, 0, 1)
        check("seed", self.seed, "an integer in [0, 2**32)", integer, 0, 2**32 - 1)
        if "" in self.stop:
            raise ValueError("stop: expected strings that are not empty, got ''")


def check(
    name: str, value: Any, expected: str, kind: type, least: float, most: float = math.inf
) -> None:
    """Raises ValueError unless the value is of that kind, no bool, and from least to most."""
    right = isinstance(value, kind) and not isinstance(value, bool)
    if not right or not least <= value <= most:  # NaN compares false
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


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
