"""Changes to logits that a request asks for: penalties, biases, and tokens that are excluded.

They come before temperature and filters, in this order. Let x be the logit of token i, c the number
of times that the completion contains it, and s whether the prompt or the completion does.

1. ``logit_bias``: ``x + bias[i]``.
2. ``repetition_penalty`` r, where s: ``x / r`` if x is positive, else ``x * r``.
3. ``frequency_penalty`` f and ``presence_penalty`` p: ``x - f * c - p * (c > 0)``.
4. ``min_tokens``, ``allowed_tokens``, ``banned_tokens``: -inf for tokens that are excluded.

The order and the penalties are those of vLLM; that of repetition is from transformers, the other
two from OpenAI's API.

With drafts, the logits after draft k are changed as if drafts 0 to k were part of the completion.
The result is then the distribution from which a step without drafts would sample, and verification
keeps it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, UInt32

from dsv3_jax.generation.request import Request


class Penalties(NamedTuple):
    """Changes of the logits of B sequences that depend on their tokens, and biases."""

    presence_penalty: Float32[Array, " B"]
    frequency_penalty: Float32[Array, " B"]
    repetition_penalty: Float32[Array, " B"]
    prompt_lengths: Int[Array, " B"]
    min_lengths: Int[Array, " B"]
    """Number of prompt and generated tokens before which no stop token is selected."""
    bias_tokens: Int[Array, "B n_bias"]
    """Ids of the biases, padded with any id that has a bias of 0."""
    biases: Float32[Array, "B n_bias"]

    def put(self, row: int, request: Request) -> None:
        """Writes the settings of a request into a row of host arrays."""
        arrays: Any = self
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            getattr(arrays, name)[row] = getattr(request, name)
        arrays.prompt_lengths[row] = len(request.prompt)
        arrays.min_lengths[row] = len(request.prompt) + request.min_tokens
        for i, (token, bias) in enumerate(request.logit_bias):
            arrays.bias_tokens[row, i] = token
            arrays.biases[row, i] = bias


class Adjustments(NamedTuple):
    """Everything that changes the logits of B sequences. A part that is None costs nothing."""

    penalties: Penalties | None = None
    allowed: UInt32[Array, "B n_words"] | None = None
    """Tokens that each sequence may generate, see
    :class:`dsv3_jax.generation.request.TokenMask`."""
    masks_next_only: Int[Array, " B"] | None = None
    """1 if ``allowed`` is for the next token of a sequence alone, and the tokens after it may be
    any; None if it is for all tokens of every sequence."""


def adjust_logits(
    logits: Float32[Array, "B T W"],
    adjustments: Adjustments,
    tokens: Int[Array, "B S"] | None,
    lengths: Int[Array, " B"],
    stop_tokens: Int[Array, "B n_stop"],
    drafts: Int[Array, "B K"],
) -> Float32[Array, "B T W"]:
    """Returns the logits from which tokens are selected, before temperature and filters.

    Args:
      logits: the model's logits after the last known token and after each of the K = T - 1 drafts.
      tokens: prompt and generated tokens, undefined past ``lengths``. Only penalties need them.
      stop_tokens: ids that ``min_tokens`` excludes, padded with -1.
    """
    penalties, allowed, masks_next_only = adjustments
    if penalties is not None:
        assert tokens is not None
        logits = _penalize(logits, penalties, tokens, lengths, stop_tokens, drafts)
    if allowed is not None:
        bits = allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
        is_allowed = bits.reshape(len(bits), -1)[:, None, : logits.shape[-1]] > 0
        if masks_next_only is not None:
            is_free = masks_next_only[:, None] & (jnp.arange(logits.shape[1]) > 0)
            is_allowed |= is_free[..., None] > 0
        logits = jnp.where(is_allowed, logits, -jnp.inf)
    return logits


def _penalize(
    logits: Float32[Array, "B T W"],
    penalties: Penalties,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    stop_tokens: Int[Array, "B n_stop"],
    drafts: Int[Array, "B K"],
) -> Float32[Array, "B T W"]:
    W = logits.shape[-1]
    positions = jnp.arange(tokens.shape[1])
    is_generated = positions >= penalties.prompt_lengths[:, None]
    # One scatter counts both: tokens of the prompt in [0, W), generated ones in [W, 2 W). Tokens
    # past the length are out of bounds and dropped.
    ids = jnp.where(positions < lengths[:, None], tokens + W * is_generated, 2 * W)
    counts = _added(jnp.zeros((len(ids), 2 * W), jnp.int32), ids, jnp.ones_like(ids))
    in_prompt, generated = counts[:, :W] > 0, counts[:, W:]
    bias = _added(jnp.zeros((len(ids), W), jnp.float32), penalties.bias_tokens, penalties.biases)
    stops = jnp.where(stop_tokens < 0, W, stop_tokens)
    is_stop = _added(jnp.zeros((len(ids), W), jnp.int32), stops, jnp.ones_like(stops)) > 0
    adjusted = []
    for t in range(logits.shape[1]):
        x = _penalized(logits[:, t] + bias, penalties, in_prompt, generated)
        is_early = lengths + t < penalties.min_lengths
        adjusted.append(jnp.where(is_early[:, None] & is_stop, -jnp.inf, x))
        next_draft = drafts[:, t : t + 1]
        generated = _added(generated, next_draft, jnp.ones_like(next_draft))
    return jnp.stack(adjusted, axis=1)


def _penalized(
    logits: Float32[Array, "B W"],
    penalties: Penalties,
    in_prompt: Bool[Array, "B W"],
    generated: Int[Array, "B W"],
) -> Float32[Array, "B W"]:
    repetition = penalties.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    x = jnp.where(in_prompt | (generated > 0), repeated, logits)
    x -= penalties.frequency_penalty[:, None] * generated
    return x - penalties.presence_penalty[:, None] * (generated > 0)


def _added(rows: jax.Array, ids: Int[Array, "B n"], values: jax.Array) -> jax.Array:
    """Returns ``rows`` [B, W] with ``values`` [B, n] added at ``ids``. It drops ids from W on."""

    # Not .at[sequences, ids]: on a mesh XLA may send the ids of all sequences to all devices.
    def add(row: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
        return row.at[ids].add(values, mode="drop")

    return jax.vmap(add)(rows, ids, values)
