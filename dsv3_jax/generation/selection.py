"""The tokens that one forward pass adds to each sequence, and why a sequence ends with them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from dsv3_jax.generation.adjustments import Adjustments, adjust_logits
from dsv3_jax.generation.completion import FULL, NON_FINITE, RUNNING, STOPPED
from dsv3_jax.generation.drafters import Drafts
from dsv3_jax.generation.sampling import Sampling, mask_vocab_padding
from dsv3_jax.generation.verification import num_leading_true, verify


class NewTokens(NamedTuple):
    """Tokens that one step adds to B sequences, at most T each."""

    tokens: Int[Array, "B T"]
    counts: Int[Array, " B"]
    """Number of valid tokens; 0 for sequences that do not run."""
    finished: Int[Array, " B"]
    """RUNNING, STOPPED, FULL or NON_FINITE, after these tokens."""
    logprobs: Float32[Array, "B T"]
    """log softmax(logits)[token], before adjustments, temperature and filters."""
    top_tokens: Int[Array, "B T n"]
    """The n most probable tokens, best first."""
    top_logprobs: Float32[Array, "B T n"]


def select_tokens(
    logits: Float32[Array, "B T W"],
    drafts: Drafts,
    sampling: Sampling,
    lengths: Int[Array, " B"],
    limits: Int[Array, " B"],
    is_running: Bool[Array, " B"],
    *,
    vocab_size: int,
    num_top_logprobs: int,
    acceptance: float | None = None,
    adjustments: Adjustments | None = None,
    known_tokens: Int[Array, "B S"] | None = None,
) -> NewTokens:
    """Accepts drafts, samples one more token, and ends sequences.

    A running sequence gains the accepted drafts and one token of the model's own, up to the first
    stop token. If some of its logits are not finite, it gains the tokens before them and ends.

    Args:
      logits: the model's logits after the last known token and after each of the T - 1 drafts.
      lengths: number of known tokens.
      limits: length at which a sequence ends. No draft goes past it.
      vocab_size: ids from here on are padding of the embedding and never selected.
      num_top_logprobs: n, the number of most probable tokens to report.
      acceptance: for benchmarks, accept drafts at this rate whatever the model computes.
      adjustments: changes to the logits from which tokens are selected. Log-probabilities are those
        of the model before them.
      known_tokens: prompt and generated tokens, undefined past ``lengths``, for penalties.
    """
    # A -inf that the model computed must not look like one that masks the vocabulary's padding. NaN
    # is the largest value to argmax, so the check of the maximum below detects it.
    logits = mask_vocab_padding(jnp.where(jnp.isneginf(logits), jnp.nan, logits), vocab_size)
    adjusted = logits
    if adjustments is not None:
        adjusted = adjust_logits(
            logits, adjustments, known_tokens, lengths, sampling.stop_tokens, drafts.tokens
        )
    tokens, accepted = verify(adjusted, drafts, sampling, lengths, acceptance)
    is_stop = jnp.any(tokens[..., None] == sampling.stop_tokens[:, None], axis=-1)
    is_stop &= jnp.arange(tokens.shape[1]) <= accepted[:, None]
    is_stopped = jnp.any(is_stop, axis=1)
    counts = jnp.where(is_stopped, jnp.argmax(is_stop, axis=1), accepted) + 1
    # Without adjustments the same argmax as in verify, which XLA computes once.
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)[..., None]
    max_logits = jnp.take_along_axis(logits, best, axis=-1)
    num_finite = num_leading_true(jnp.isfinite(max_logits[..., 0]))
    is_non_finite = num_finite < counts
    counts = jnp.where(is_running, jnp.minimum(counts, num_finite), 0).astype(jnp.int32)
    is_full = lengths + counts >= limits
    finished = jnp.where(is_stopped, STOPPED, jnp.where(is_full, FULL, RUNNING))
    # log_softmax, evaluated only at the tokens that are reported.
    log_total = jnp.log(jnp.sum(jnp.exp(logits - max_logits), axis=-1, keepdims=True))
    logprobs = jnp.take_along_axis(logits, tokens[..., None], axis=-1) - max_logits - log_total
    top_logits, top_tokens = jax.lax.top_k(logits, num_top_logprobs)
    return NewTokens(
        tokens=tokens,
        counts=counts,
        finished=jnp.where(is_non_finite, NON_FINITE, finished),
        logprobs=logprobs[..., 0],
        top_tokens=top_tokens,
        top_logprobs=top_logits - max_logits - log_total,
    )
