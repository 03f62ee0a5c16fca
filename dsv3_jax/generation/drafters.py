"""Drafters: they propose the next tokens, so that the model can check several in one step.

A drafter proposes up to ``depth`` tokens per sequence. Its proposals change the speed and nothing
else: :mod:`dsv3_jax.generation.selection` keeps the model's own distribution for any drafts.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from dsv3_jax.config import ModelConfig, MTPHidden
from dsv3_jax.generation.depth import AUTO_DEPTHS
from dsv3_jax.generation.sampling import DRAFT, Sampling, mask_vocab_padding, sample
from dsv3_jax.generation.settings import check_draft, parse_draft, unknown_draft
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.model import DeepSeekV3


class DraftContext(NamedTuple):
    """The part of the decoding state that drafters read."""

    tokens: Int[Array, "B S"]
    """Prompt and generated tokens; undefined past ``lengths``."""
    lengths: Int[Array, " B"]
    """Number of prompt and generated tokens."""
    is_running: Bool[Array, " B"]
    """Whether the sequence takes part in this step. Drafts of other sequences are ignored."""
    cache: LatentKVCache
    """Cache of all tokens of a sequence except the last. MTP drafters write the MTP layer's."""
    mtp_inputs: Float[Array, "B F D"]
    """Hidden states of the newest cached tokens, which the MTP layer has not processed yet."""
    num_mtp_inputs: Int[Array, " B"]
    """Number of valid ``mtp_inputs``."""


class Drafts(NamedTuple):
    """Proposed tokens after the last token of each sequence."""

    tokens: Int[Array, "B K"]
    counts: Int[Array, " B"]
    """Number of proposed tokens. The entries of ``tokens`` after them are undefined."""
    logits: Float32[Array, "B K W"] | None
    """Logits that each token was sampled from, after temperature and filters: the second result of
    :func:`~dsv3_jax.generation.sampling.sample`. None if the drafter is deterministic: then each
    token has probability 1."""

    @classmethod
    def empty(cls, batch_size: int) -> Drafts:
        """Returns drafts with K = 0."""
        return cls(jnp.zeros((batch_size, 0), jnp.int32), jnp.zeros(batch_size, jnp.int32), None)


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens inside the compiled decode loop.

    A drafter is a static argument of that loop, so it must be hashable. Equal drafters share
    compiled programs. A frozen dataclass is both.
    """

    @property
    def name(self) -> str:
        """Name shown in statistics."""
        ...

    @property
    def mtp_hidden(self) -> MTPHidden | None:
        """Hidden state of the model that the MTP layer takes; None if the drafter does not run the
        MTP layer, which then needs no cache."""
        ...

    @property
    def acceptance(self) -> float | None:
        """Probability with which drafts are accepted regardless of the model; None verifies them
        against the model."""
        ...

    def draft(
        self,
        model: DeepSeekV3,
        context: DraftContext,
        sampling: Sampling,
        depth: int,
        vocab_size: int,
    ) -> tuple[Drafts, LatentKVCache]:
        """Proposes tokens for the positions from ``context.lengths`` on.

        Args:
          depth: number of drafts per sequence; may be 0.
          vocab_size: ids from here on are padding of the embedding and must not be proposed.

        Returns:
          The drafts, and ``context.cache`` with the drafter's own part brought up to date.
        """
        ...


@dataclasses.dataclass(frozen=True)
class MTPDrafter:
    """Drafts with the model's first multi-token prediction layer.

    For later drafts of a step the layer is applied again to its own output. Each draft is sampled
    with the sequence's own settings. (Section 5.4.3 of the DeepSeek-V3 report drafts one token.)

    Attributes:
      mtp_hidden: the hidden state that the layer was trained on.
    """

    mtp_hidden: MTPHidden = "post_norm"
    name = "mtp"
    acceptance = None

    def draft(
        self,
        model: DeepSeekV3,
        context: DraftContext,
        sampling: Sampling,
        depth: int,
        vocab_size: int,
    ) -> tuple[Drafts, LatentKVCache]:
        cache, num_inputs = context.cache, context.num_mtp_inputs
        starts = cache.lengths - num_inputs
        positions = starts[:, None] + jnp.arange(context.mtp_inputs.shape[1])
        next_tokens = jnp.take_along_axis(context.tokens, positions + 1, axis=1, mode="clip")
        counts = jnp.where(context.is_running, num_inputs, 0)
        # The output at the newest token predicts the first draft.
        hidden, cache = model.extend_mtp(
            context.mtp_inputs, next_tokens, starts, counts, cache, "absorbed", newest_only=True
        )
        tokens, logits = [], []
        for k in range(depth):
            if k:
                # The model's hidden state does not exist yet; the layer's own output replaces it.
                hidden, cache = model.extend_mtp(
                    hidden.mtp_input(self.mtp_hidden),
                    tokens[-1][:, None],
                    cache.lengths + k - 1,
                    context.is_running.astype(jnp.int32),
                    cache,
                    "absorbed",
                )
            predicted = mask_vocab_padding(model.logits(hidden.post_norm[:, 0]), vocab_size)
            token, filtered = sample(predicted, sampling, context.lengths + k, DRAFT)
            tokens.append(token)
            logits.append(filtered)
        if not depth:
            return Drafts.empty(len(context.tokens)), cache
        # After a prompt of one token there is no hidden state to draft from.
        counts = jnp.where(num_inputs > 0, depth, 0)
        return Drafts(jnp.stack(tokens, axis=1), counts, jnp.stack(logits, axis=1)), cache


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Prompt look-up: proposes the tokens that followed an earlier occurrence of the last n-gram.

    The longest n-gram that occurs earlier is used, and its latest occurrence. The drafter needs no
    weights. It pays off where text repeats itself, as in edits and quotations.

    Attributes:
      longest: length of the longest n-gram to look up.
      shortest: length of the shortest n-gram to look up.
    """

    longest: int = 4
    shortest: int = 2
    name = "ngram"
    mtp_hidden = None
    acceptance = None

    def draft(
        self,
        model: DeepSeekV3,
        context: DraftContext,
        sampling: Sampling,
        depth: int,
        vocab_size: int,
    ) -> tuple[Drafts, LatentKVCache]:
        B, S = context.tokens.shape
        lengths = context.lengths[:, None]
        ends = jnp.arange(S)
        # match_lengths[b, i]: length of the longest n-gram that ends at position i and equals the
        # n-gram at the end of the sequence, up to `longest`.
        match_lengths = jnp.zeros((B, S), jnp.int32)
        matches = jnp.broadcast_to(ends < lengths - 1, (B, S))
        for n in range(self.longest):
            last = jnp.take_along_axis(context.tokens, jnp.maximum(lengths - 1 - n, 0), axis=1)
            # The tokens n positions earlier. No token is -1.
            earlier = jax.lax.pad(context.tokens, jnp.int32(-1), ((0, 0, 0), (n, -n, 0)))
            matches &= earlier == last
            match_lengths += matches
        scores = jnp.where(match_lengths >= self.shortest, match_lengths * S + ends, -1)
        best_score = jnp.max(scores, axis=1)
        start = best_score % S + 1
        # Past the end of the sequence, the copy continues with the tokens that it has copied.
        period = jnp.maximum(context.lengths - start, 1)
        positions = start[:, None] + jnp.arange(depth) % period[:, None]
        tokens = jnp.take_along_axis(context.tokens, positions, axis=1, mode="clip")
        return Drafts(tokens, jnp.where(best_score >= 0, depth, 0), None), context.cache


@dataclasses.dataclass(frozen=True)
class SyntheticDrafter:
    """Drafts with the MTP layer and accepts the drafts at a given rate, regardless of the model.

    For benchmarks with random weights: a step costs as much as with :class:`MTPDrafter`, but the
    generated text is NOT the model's.

    Attributes:
      acceptance: probability that a draft is accepted, given that all before it were.
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
        context: DraftContext,
        sampling: Sampling,
        depth: int,
        vocab_size: int,
    ) -> tuple[Drafts, LatentKVCache]:
        return MTPDrafter(self.mtp_hidden).draft(model, context, sampling, depth, vocab_size)


@dataclasses.dataclass(frozen=True)
class DraftPlan:
    """The drafter of one call, and the depths that it may use."""

    drafter: Drafter | None = None
    depths: tuple[int, ...] = (0,)
    """Numbers of drafts per step to choose from. A single entry is a fixed depth."""

    @property
    def max_depth(self) -> int:
        """Maximum number of drafts per step."""
        return max(self.depths)

    @property
    def mtp(self) -> bool:
        """Whether the MTP layer drafts, so that it has a cache."""
        return self.drafter is not None and self.drafter.mtp_hidden is not None

    @classmethod
    def read(cls, draft: object, draft_depth: Any, config: ModelConfig) -> DraftPlan:
        """Interprets the arguments ``draft`` and ``draft_depth`` of :meth:`Generator.generate`.

        Raises:
          ValueError: ``draft`` is not a drafter, the depth is out of range, or the model has no MTP
            layer although the drafter needs one.
        """
        check_draft(draft, draft_depth)
        if draft is None:
            return cls()
        drafter = draft
        if isinstance(draft, str):
            kind, rate = parse_draft(draft)
            by_name = MTPDrafter() if kind == "mtp" else NgramDrafter()
            drafter = by_name if rate is None else SyntheticDrafter(rate)
        if not isinstance(drafter, Drafter):
            raise unknown_draft(draft)
        if drafter.mtp_hidden is not None and not config.num_nextn_predict_layers:
            raise ValueError(
                f"draft: expected a model with an MTP layer for {drafter.name!r}, got one without "
                "(a checkpoint that lacks it, or load(mtp=False))"
            )
        return cls(drafter, AUTO_DEPTHS if draft_depth == "auto" else (int(draft_depth),))
