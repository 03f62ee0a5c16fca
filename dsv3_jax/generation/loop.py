"""The two jitted loops: prefill the prompts chunk by chunk, decode many tokens a dispatch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from dsv3_jax.generation.sampling import Sampling, sample
from dsv3_jax.generation.state import FULL, RUNNING, STOPPED, DecodeState
from dsv3_jax.model import DeepSeekV3


def prefill(model: DeepSeekV3, state: DecodeState, *, chunk: int) -> DecodeState:
    """Caches every prompt token but the last of each row, ``chunk`` tokens a row at a time."""

    def missing(state: DecodeState) -> Int[Array, " B"]:
        return state.lengths - 1 - state.cache.lengths

    def body(state: DecodeState) -> DecodeState:
        positions = state.cache.lengths[:, None] + jnp.arange(chunk)
        tokens = jnp.take_along_axis(state.tokens, positions, axis=1, mode="clip")
        counts = jnp.clip(missing(state), 0, chunk)
        _, cache = model.extend(tokens, counts, state.cache, "expanded")
        return dataclasses.replace(state, cache=cache)

    return jax.lax.while_loop(lambda s: jnp.any(missing(s) > 0), body, state)


def decode(
    model: DeepSeekV3,
    state: DecodeState,
    sampling: Sampling,
    steps: Int[Array, ""],
    *,
    vocab_size: int,
) -> DecodeState:
    """Appends up to ``steps`` tokens to every running row; ends early when none runs.

    Args:
      vocab_size: ids from here on are padding of the embedding and never chosen.
    """

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        i, state = carry
        return i + 1, decode_step(model, state, sampling, vocab_size)

    def proceed(carry: tuple[jax.Array, DecodeState]) -> Bool[Array, ""]:
        i, state = carry
        return (i < steps) & jnp.any(state.finished == RUNNING)

    _, state = jax.lax.while_loop(proceed, body, (jnp.int32(0), state))
    return state


def decode_step(
    model: DeepSeekV3, state: DecodeState, sampling: Sampling, vocab_size: int
) -> DecodeState:
    running = state.finished == RUNNING
    last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
    hidden, cache = model.extend(last, running.astype(jnp.int32), state.cache, "absorbed")
    logits = model.logits(hidden.post_norm[:, 0])
    logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)
    token = sample(logits, sampling, state.lengths)
    state = _append(dataclasses.replace(state, cache=cache), running, token, logits)
    stopped = jnp.any(token[:, None] == sampling.stop_tokens, axis=-1)
    full = state.lengths >= state.limits
    outcome = jnp.where(stopped, STOPPED, jnp.where(full, FULL, RUNNING))
    return dataclasses.replace(
        state, finished=jnp.where(running, outcome, state.finished), steps=state.steps + 1
    )


def _append(
    state: DecodeState,
    running: Bool[Array, " B"],
    token: Int[Array, " B"],
    logits: Float32[Array, "B W"],
) -> DecodeState:
    """Writes each running row's token and its log-probabilities at the row's end."""
    rows = jnp.arange(token.shape[0])
    place = jnp.where(running, state.lengths, state.tokens.shape[1])  # out of bounds: dropped
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
    top_logprobs, top_tokens = jax.lax.top_k(logprobs, state.top_tokens.shape[-1])
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[rows, place].set(token, mode="drop"),
        logprobs=state.logprobs.at[rows, place].set(chosen, mode="drop"),
        top_tokens=state.top_tokens.at[rows, place].set(top_tokens, mode="drop"),
        top_logprobs=state.top_logprobs.at[rows, place].set(top_logprobs, mode="drop"),
        lengths=state.lengths + running,
    )
