"""What the Generator gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, overload

FinishReason = Literal["stop", "length", "interrupted", "error"]


@dataclasses.dataclass(frozen=True)
class Speculation:
    """What drafting came to: of one request, or of all requests of a call."""

    draft: str
    """The drafter. ``synthetic:RATE`` accepts at that rate whatever the model says: such text is
    not the model's, and its figures show speed alone."""
    steps: int
    """Decode steps, summed over requests."""
    tokens: int
    """Tokens that came of them."""
    drafted: tuple[int, ...]
    """Drafts offered, by their place in a step."""
    accepted: tuple[int, ...]
    """Those of them that became tokens."""

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Accepted over drafted, by place; a draft behind a refused one counts as refused."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        return tuple(a / d if d else 0.0 for a, d in pairs)

    @property
    def accept_length(self) -> float:
        """Tokens a step: 1 + accepted drafts a step."""
        return self.tokens / self.steps if self.steps else 0.0

    @classmethod
    def total(cls, parts: Sequence[Speculation | None]) -> Speculation | None:
        """Of several requests with one drafter; None without any."""
        held = [part for part in parts if part is not None]
        if not held:
            return None
        return cls(
            draft=held[0].draft,
            steps=sum(part.steps for part in held),
            tokens=sum(part.tokens for part in held),
            drafted=tuple(map(sum, zip(*(part.drafted for part in held), strict=True))),
            accepted=tuple(map(sum, zip(*(part.accepted for part in held), strict=True))),
        )

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "acceptance": self.acceptance,
            "accept_length": self.accept_length,
        }


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
    """``stop``: a stop token or stop string; ``length``: max_new_tokens. What an exception carries
    (:mod:`dsv3_jax.generation.errors`) also has ``interrupted``, not at its end, and ``error``: the
    next token's logits were not finite."""
    prompt_tokens: int
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """For each token, the most probable (token, logprob) pairs, best first."""
    speculation: Speculation | None = None
    """None without a drafter."""

    def as_json(self) -> dict[str, Any]:
        speculation = None if self.speculation is None else self.speculation.as_json()
        return dataclasses.asdict(self) | {"speculation": speculation}


@dataclasses.dataclass(frozen=True)
class Stats:
    """Of one call of :meth:`Generator.generate`."""

    steps: int
    """Runs of the main model in the decode loop."""
    new_tokens: int
    time_to_first_token: float
    """Seconds from the call to the first token of the first batch, compilation included if any."""
    seconds: float
    """The whole call."""
    tokens_per_second: float
    """Tokens after each batch's first step, over the time they took."""
    speculation: Speculation | None = None
    """Over all requests; None without a drafter."""

    @property
    def drafted(self) -> int:
        return sum(self.speculation.drafted) if self.speculation else 0

    @property
    def accepted(self) -> int:
        return sum(self.speculation.accepted) if self.speculation else 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 without speculation."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "speculation": None if self.speculation is None else self.speculation.as_json(),
        }


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

    def __reduce__(self) -> tuple[type[Piece], tuple[str, list[int], FinishReason | None]]:
        """For copies and pickles: those of a str keep its text alone."""
        return type(self), (self.text, self.tokens, self.finish_reason)

    @property
    def text(self) -> str:
        return str(self)
