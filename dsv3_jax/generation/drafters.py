"""Who guesses the next tokens, for the model to check several at once.

A drafter offers up to ``depth`` tokens a row. What it offers changes the speed and nothing else:
verification.py keeps the model's own distribution whatever the drafts are worth.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from dsv3_jax.generation.sampling import DRAFT, Sampling, sample
from dsv3_jax.generation.state import RUNNING, DecodeState
from dsv3_jax.model import DeepSeekV3, Hidden, MTPHidden


class Drafts(NamedTuple):
    """What a drafter offers behind the last token of each row."""

    tokens: Int[Array, "B K"]
    counts: Int[Array, " B"]
    """How many of them are offered; the others are anything."""
    logits: Float32[Array, "B K W"] | None
    """What each token was drawn from, before temperature and filters; None where the drafter is
    certain and offers its token with probability 1."""


@runtime_checkable
class Drafter(Protocol):
    """Static: equal drafters share compiled programs, so a drafter is a frozen dataclass."""

    @property
    def name(self) -> str:
        """How statistics call it."""
        ...

    @property
    def mtp_hidden(self) -> MTPHidden | None:
        """The hidden state to keep for the MTP layer, and thus whether that layer has a cache."""
        ...

    @property
    def acceptance(self) -> float | None:
        """None, unless drafts are accepted at this rate whatever the model says of them."""
        ...

    def draft(
        self,
        model: DeepSeekV3,
        state: DecodeState,
        sampling: Sampling,
        depth: int,
        vocab_size: int,
    ) -> tuple[Drafts, DecodeState]:
        """Drafts for positions ``state.lengths`` and on, and the state with the drafter's own
        cache brought up to date; ``depth`` may be 0."""
        ...


@dataclasses.dataclass(frozen=True)
class MTPDrafter:
    """The model's first multi-token prediction layer, applied again to its own output.

    Each draft is drawn under the row's own settings (V3 report, section 5.4.3, drafts one).

    Attributes:
      mtp_hidden: as the model was trained.
    """

    mtp_hidden: MTPHidden = "post_norm"
    name = "mtp"
    acceptance = None

    def draft(
        self,
        model: DeepSeekV3,
        state: DecodeState,
        sampling: Sampling,
        depth: int,
        vocab_size: int,
    ) -> tuple[Drafts, DecodeState]:
        running = state.finished == RUNNING
        starts = state.cache.lengths - state.pending
        places = starts[:, None] + jnp.arange(state.hidden.shape[1])
        following = jnp.take_along_axis(state.tokens, places + 1, axis=1, mode="clip")
        counts = jnp.where(running, state.pending, 0)
        hidden, cache = model.extend_mtp(
            state.hidden, following, starts, counts, state.cache, "absorbed"
        )
        # Of the tokens that are new since the last step, the newest one's output is the draft.
        newest = jnp.maximum(state.pending - 1, 0)[:, None, None]
        hidden = Hidden(*(jnp.take_along_axis(h, newest, axis=1) for h in hidden))
        tokens, logits = [], []
        for k in range(depth):
            if k:
                # The layer's own output stands in for the hidden state the model has yet to find.
                hidden, cache = model.extend_mtp(
                    hidden.feed(self.mtp_hidden),
                    tokens[-1][:, None],
                    cache.lengths + k - 1,
                    running.astype(jnp.int32),
                    cache,
                    "absorbed",
                )
            logits.append(mask_padding(model.logits(hidden.post_norm[:, 0]), vocab_size))
            tokens.append(sample(logits[-1], sampling, state.lengths + k, DRAFT))
        state = dataclasses.replace(state, cache=cache)
        if not depth:
            return no_drafts(state), state
        # A prompt of one token has left no hidden state to draft from.
        offered = jnp.where(state.pending > 0, depth, 0)
        return Drafts(jnp.stack(tokens, axis=1), offered, jnp.stack(logits, axis=1)), state


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Prompt look-up: where the row's last tokens stood before, what followed them then.

    The longest n-gram that occurs earlier counts, and of its occurrences the latest. Costs no
    weights; pays where text repeats itself, as in edits and quotations.

    Attributes:
      longest: tokens of the longest n-gram looked for.
      shortest: and of the shortest.
    """

    longest: int = 4
    shortest: int = 2
    name = "ngram"
    mtp_hidden = None
    acceptance = None

    def draft(
        self,
        model: DeepSeekV3,
        state: DecodeState,
        sampling: Sampling,
        depth: int,
        vocab_size: int,
    ) -> tuple[Drafts, DecodeState]:
        B, S = state.tokens.shape
        lengths = state.lengths[:, None]
        at = jnp.arange(S)
        # same[b, i]: how many tokens up to i agree with as many up to the row's last one.
        same = jnp.zeros((B, S), jnp.int32)
        unbroken = jnp.broadcast_to(at < lengths - 1, (B, S))
        for n in range(self.longest):
            last = jnp.take_along_axis(state.tokens, jnp.maximum(lengths - 1 - n, 0), axis=1)
            unbroken &= (jnp.roll(state.tokens, n, axis=1) == last) & (at >= n)
            same += unbroken
        score = jnp.where(same >= self.shortest, same * S + at, -1)
        found = jnp.max(score, axis=1)
        start = found % S + 1
        # Past the row's end the copy goes on with what it has copied.
        period = jnp.maximum(state.lengths - start, 1)
        places = start[:, None] + jnp.arange(depth) % period[:, None]
        tokens = jnp.take_along_axis(state.tokens, places, axis=1, mode="clip")
        return Drafts(tokens, jnp.where(found >= 0, depth, 0), None), state


@dataclasses.dataclass(frozen=True)
class SyntheticDrafter:
    """For benchmarks with random weights: the MTP layer drafts, and drafts are accepted at a given
    rate whatever the model says. It costs what MTP costs; its text is NOT the model's.

    Attributes:
      acceptance: probability of each draft after those accepted before it.
    """

    acceptance: float
    mtp_hidden: MTPHidden = "post_norm"

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance <= 1.0:
            raise ValueError(
                f"draft: expected a synthetic acceptance from 0 to 1, got {self.acceptance}"
            )

    @property
    def name(self) -> str:
        return f"synthetic:{self.acceptance:g}"

    def draft(
        self,
        model: DeepSeekV3,
        state: DecodeState,
        sampling: Sampling,
        depth: int,
        vocab_size: int,
    ) -> tuple[Drafts, DecodeState]:
        return MTPDrafter(self.mtp_hidden).draft(model, state, sampling, depth, vocab_size)


def no_drafts(state: DecodeState) -> Drafts:
    B = state.tokens.shape[0]
    return Drafts(jnp.zeros((B, 0), jnp.int32), jnp.zeros(B, jnp.int32), None)


def mask_padding(logits: Float32[Array, "*batch W"], vocab_size: int) -> Float32[Array, "*batch W"]:
    """Ids from ``vocab_size`` on are padding of the embedding and never chosen."""
    W = logits.shape[-1]
    return logits if vocab_size >= W else jnp.where(jnp.arange(W) < vocab_size, logits, -jnp.inf)
