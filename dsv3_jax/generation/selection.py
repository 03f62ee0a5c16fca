"""The tokens that one forward pass adds to each sequence, by speculative sampling, and its end.

The tokens have exactly the model's own distribution (Leviathan et al. 2023, Chen et al. 2023). Let
p be the model's distribution at a position and q the drafter's, both after the sequence's
temperature and filters. A draft x is accepted with probability ``min(1, p(x) / q(x))``. The first
rejected draft is replaced by a token sampled from ``max(p - q, 0)``, normalised. If no draft is
rejected, the token after the last one is sampled from p. Each token is then distributed as p:
``min(p, q) + (1 - sum min(p, q)) * max(p - q, 0) / sum max(p - q, 0) = p``. At temperature 0, p and
q each have one token of probability 1, and the rule reduces to: accept drafts while they are equal
to the model's tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from dsv3_jax.generation.adjustments import Adjustments, adjust_logits
from dsv3_jax.generation.completion import FULL, NON_FINITE, RUNNING, STOPPED
from dsv3_jax.generation.drafters import Drafts
from dsv3_jax.generation.sampling import (
    ACCEPT,
    NEXT,
    Sampling,
    filter_logits,
    mask_vocab_padding,
    random_values,
    sample_filtered,
)


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


def verify(
    logits: Float32[Array, "B T W"],
    drafts: Drafts,
    sampling: Sampling,
    positions: Int[Array, " B"],
    acceptance: float | None = None,
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Returns the tokens of one step: the accepted drafts, then one token of the model's own.

    Args:
      logits: the model's logits after the last known token and after each of the T - 1 drafts.
      positions: position of the first draft.
      acceptance: for benchmarks, accept drafts at this rate instead.

    Returns:
      Tokens and the number of accepted drafts. The first ``accepted + 1`` tokens are valid.
    """
    K = drafts.tokens.shape[1]
    is_draft = jnp.arange(K) < drafts.counts[:, None]

    def uniform(k: jax.Array) -> jax.Array:
        return random_values(jax.random.uniform, sampling, positions + k, ACCEPT)

    u = jax.vmap(uniform, out_axes=1)(jnp.arange(K)) if K else jnp.zeros(drafts.tokens.shape)
    forced = None if acceptance is None else u < acceptance
    padded_drafts = jnp.pad(drafts.tokens, ((0, 0), (0, 1)))
    # Outside the greedy branch, because the decode loop computes it too: XLA then reads the logits
    # once for both.
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def sample_each(logits: jax.Array) -> jax.Array:
        def sample_one(logits: jax.Array, k: jax.Array) -> jax.Array:
            return sample_filtered(logits, sampling, positions + k, NEXT)

        return jax.vmap(sample_one, in_axes=(1, 0), out_axes=1)(logits, jnp.arange(K + 1))

    def verify_greedy() -> tuple[jax.Array, jax.Array]:
        is_accepted = best[:, :K] == drafts.tokens if forced is None else forced
        accepted = num_leading_true(is_accepted & is_draft)
        return jnp.where(jnp.arange(K + 1) < accepted[:, None], padded_drafts, best), accepted

    def verify_sampled() -> tuple[jax.Array, jax.Array]:
        log_p = filter_logits(logits, sampling)
        p = jax.nn.softmax(log_p, axis=-1)
        q = _draft_probabilities(drafts, logits.shape[-1])
        p_x, q_x = (_at_tokens(x, drafts.tokens) for x in (p[:, :K], q))
        is_accepted = u * q_x < p_x if forced is None else forced
        accepted = num_leading_true(is_accepted & is_draft)
        # The token after each draft, if that one is the last to be accepted. To sample only the one
        # that is needed would take longer on a GPU: each kernel would wait for ``accepted``.
        own = sample_each(log_p)
        if K and forced is None:
            # After the last draft the token is sampled from p: q counts as zero.
            q = jnp.pad(jnp.where(is_draft[..., None], q, 0.0), ((0, 0), (0, 1), (0, 0)))
            residual = _log_residual(log_p, p, q)
            other = sample_each(residual)
            # If p and q are almost equal, rounding may reject a draft although no residual is left.
            own = jnp.where(_at_tokens(residual, other) == -jnp.inf, own, other)
        return jnp.where(jnp.arange(K + 1) < accepted[:, None], padded_drafts, own), accepted

    return sampling.choose(verify_sampled, verify_greedy)


def num_leading_true(mask: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """Returns the number of True entries before the first False."""
    K = mask.shape[1]
    return jnp.min(jnp.where(mask, K, jnp.arange(K)), axis=1, initial=K)


def _at_tokens(x: Float32[Array, "B K W"], tokens: Int[Array, "B K"]) -> Float32[Array, "B K"]:
    return jnp.take_along_axis(x, tokens[..., None], axis=-1)[..., 0]


def _draft_probabilities(drafts: Drafts, W: int) -> Float32[Array, "B K W"]:
    if drafts.logits is None:
        return jax.nn.one_hot(drafts.tokens, W, dtype=jnp.float32)
    return jax.nn.softmax(drafts.logits, axis=-1)


def _log_residual(
    log_p: Float32[Array, "B T W"], p: Float32[Array, "B T W"], q: Float32[Array, "B T W"]
) -> Float32[Array, "B T W"]:
    """Returns ``log max(p - q, 0)`` up to a constant; exactly ``log_p`` where q is zero."""
    return jnp.where(q < p, log_p + jnp.log1p(-q / jnp.where(q < p, p, 1.0)), -jnp.inf)
