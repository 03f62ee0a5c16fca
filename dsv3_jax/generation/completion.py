"""Results of the Generator: completions and statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, overload

FinishReason = Literal["stop", "length", "interrupted", "error", "cancelled", "timeout"]

RUNNING, STOPPED, FULL, NON_FINITE = range(4)
"""Values of ``finished`` of a sequence on the device. RUNNING: it takes further steps. STOPPED: a
stop token ended it. FULL: it has reached its limit. NON_FINITE: the logits after its last token
contain NaN or an infinity."""

FINISH_REASONS: dict[int, FinishReason] = {STOPPED: "stop", FULL: "length", NON_FINITE: "error"}

TopLogprobs = list[tuple[int, float]]
"""Most probable tokens of one position with their log-probabilities, best first."""


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Speculation statistics of one request, or of all requests of a call."""

    draft: str
    """Name of the drafter. ``synthetic:RATE`` accepts drafts at that rate regardless of the model.
    Its text is not the model's; it serves to measure speed."""
    steps: int
    """Number of decode steps, summed over requests."""
    tokens: int
    """Number of tokens generated in these steps."""
    drafted: tuple[int, ...]
    """Number of drafts that the model checked, by position in the step's draft."""
    accepted: tuple[int, ...]
    """Number of drafts that became tokens, by position in the step's draft."""

    @property
    def acceptance(self) -> tuple[float, ...]:
        """``accepted / drafted`` by position. A draft after a rejected one counts as rejected."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        return tuple(a / d if d else 0.0 for a, d in pairs)

    @property
    def accept_length(self) -> float:
        """Mean number of tokens per step: 1 + accepted drafts per step."""
        return self.tokens / self.steps if self.steps else 0.0

    @classmethod
    def total(cls, parts: Sequence[Speculation | None]) -> Speculation | None:
        """Adds up the statistics of requests with the same drafter. None if all are None."""
        present = [part for part in parts if part is not None]
        if not present:
            return None
        return cls(
            draft=present[0].draft,
            steps=sum(part.steps for part in present),
            tokens=sum(part.tokens for part in present),
            drafted=tuple(map(sum, zip(*(part.drafted for part in present), strict=True))),
            accepted=tuple(map(sum, zip(*(part.accepted for part in present), strict=True))),
        )

    def as_json(self) -> dict[str, Any]:
        """Returns a dictionary for ``json.dumps``."""
        return dataclasses.asdict(self) | {
            "acceptance": self.acceptance,
            "accept_length": self.accept_length,
        }


@dataclasses.dataclass(frozen=True)
class Completion:
    """Generated text and tokens of one request."""

    text: str
    """Generated text, without the stop string and without special tokens."""
    tokens: list[int]
    """All generated tokens, including the one that stopped the request."""
    logprobs: list[float]
    """Natural logarithm of each token's probability, before temperature and filters."""
    finish_reason: FinishReason
    """``stop``: a stop token or stop string; ``length``: max_new_tokens. Completions in exceptions
    (:mod:`dsv3_jax.generation.errors`) may also have ``interrupted``: generation ended early; or
    ``error``: the logits of the next token were not finite."""
    prompt_tokens: int
    """Number of tokens of the prompt."""
    top_logprobs: list[TopLogprobs] | None = None
    """Most probable (token, logprob) pairs of each position, best first. None if not requested."""
    speculation: Speculation | None = None
    """Statistics of this request; None without a drafter."""
    cached_tokens: int = 0
    """Number of prompt tokens that an engine's prefix cache saved."""
    prompt_logprobs: list[float | None] | None = None
    """Natural logarithm of the probability of each prompt token after those before it; None for the
    first. None if not requested from an engine, as below."""
    prompt_top_logprobs: list[TopLogprobs | None] | None = None
    """Most probable (token, logprob) pairs at the position of each prompt token, best first."""

    def as_json(self) -> dict[str, Any]:
        """Returns a dictionary for ``json.dumps``."""
        speculation = None if self.speculation is None else self.speculation.as_json()
        return dataclasses.asdict(self) | {"speculation": speculation}


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of one call of :meth:`Generator.generate`."""

    steps: int
    """Number of decode steps, each a forward pass of the main model. The first token of a
    completion comes from the prefill of its prompt, without one."""
    new_tokens: int
    """Number of generated tokens of all completions."""
    time_to_first_token: float
    """Seconds from the call to its first token, including any compilation."""
    seconds: float
    """Duration of the call."""
    tokens_per_second: float
    """Throughput after the first tokens."""
    speculation: Speculation | None = None
    """Sum over all requests; None without a drafter."""

    @property
    def drafted(self) -> int:
        """Number of drafts; 0 without speculation."""
        return sum(self.speculation.drafted) if self.speculation else 0

    @property
    def accepted(self) -> int:
        """Number of accepted drafts; 0 without speculation."""
        return sum(self.speculation.accepted) if self.speculation else 0

    @property
    def acceptance_rate(self) -> float:
        """``accepted / drafted``; 0 without speculation."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns a dictionary for ``json.dumps``."""
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
    """A piece of streamed text. Pieces are strings with attributes."""

    tokens: list[int]
    """Tokens generated since the previous piece."""
    finish_reason: FinishReason | None
    """Finish reason of the last piece; None for all others."""
    logprobs: list[float]
    """Natural logarithm of each token's probability, as in :class:`Completion`."""
    top_logprobs: list[TopLogprobs] | None
    """Most probable tokens of each position. None if not requested."""

    def __new__(
        cls,
        text: str,
        tokens: list[int],
        finish_reason: FinishReason | None,
        logprobs: list[float],
        top_logprobs: list[TopLogprobs] | None = None,
    ) -> Piece:
        piece = super().__new__(cls, text)
        piece.tokens = tokens
        piece.finish_reason = finish_reason
        piece.logprobs = logprobs
        piece.top_logprobs = top_logprobs
        return piece

    def __reduce__(self) -> tuple[type[Piece], tuple[Any, ...]]:
        """Lets copies and pickles keep the attributes, which those of a plain str would lose."""
        state = self.tokens, self.finish_reason, self.logprobs, self.top_logprobs
        return type(self), (self.text, *state)

    @property
    def text(self) -> str:
        """The text as a plain string."""
        return str(self)
