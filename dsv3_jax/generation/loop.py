"""The two loops that are jitted: prefill caches the prompts, decode generates many tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dsv3_jax.generation.adjustments import Adjustments
from dsv3_jax.generation.drafters import DraftContext, Drafter, Drafts
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.generation.selection import NewTokens, select_tokens
from dsv3_jax.generation.state import RUNNING, DecodeState
from dsv3_jax.model import DeepSeekV3


def prefill(
    model: DeepSeekV3,
    state: DecodeState,
    max_chunks: Int[Array, ""],
    drafter: Drafter | None = None,
    *,
    chunk: int,
) -> DecodeState:
    """Caches every prompt token except the last of each sequence, in chunks.

    Args:
      max_chunks: maximum number of chunks in this dispatch. The next dispatch continues after them.
      chunk: tokens per sequence and chunk.
    """

    def num_uncached(state: DecodeState) -> Int[Array, " B"]:
        return state.lengths - 1 - state.cache.lengths

    def cache_chunk(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        i, state = carry
        counts = jnp.clip(num_uncached(state), 0, chunk)
        return i + 1, _prefill_chunk(model, state, counts, drafter, chunk)

    def proceed(carry: tuple[jax.Array, DecodeState]) -> Bool[Array, ""]:
        i, state = carry
        return (i < max_chunks) & jnp.any(num_uncached(state) > 0)

    _, state = jax.lax.while_loop(proceed, cache_chunk, (jnp.int32(0), state))
    return state


def _prefill_chunk(
    model: DeepSeekV3,
    state: DecodeState,
    counts: Int[Array, " B"],
    drafter: Drafter | None,
    chunk: int,
) -> DecodeState:
    """Caches the next ``counts`` prompt tokens of each sequence, at most ``chunk``."""
    starts = state.cache.lengths
    positions = starts[:, None] + jnp.arange(chunk)
    tokens = jnp.take_along_axis(state.tokens, positions, axis=1, mode="clip")
    hidden, cache = model.extend(tokens, counts, state.cache, "expanded")
    if drafter is None or drafter.mtp_hidden is None:
        return dataclasses.replace(state, cache=cache)
    mtp_input = hidden.mtp_input(drafter.mtp_hidden)
    next_tokens = jnp.take_along_axis(state.tokens, positions + 1, axis=1, mode="clip")
    _, cache = model.extend_mtp(mtp_input, next_tokens, starts, counts, cache, "expanded")
    # The first decode step runs the MTP layer on the last position again, to get a draft from it.
    newest = jnp.take_along_axis(mtp_input, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
    return dataclasses.replace(
        state,
        cache=cache,
        mtp_inputs=state.mtp_inputs.at[:, :1].set(
            jnp.where((counts > 0)[:, None, None], newest, state.mtp_inputs[:, :1])
        ),
        num_mtp_inputs=jnp.minimum(cache.lengths, 1),
    )


def decode(
    model: DeepSeekV3,
    state: DecodeState,
    sampling: Sampling,
    max_steps: Int[Array, ""],
    drafter: Drafter | None = None,
    depth: int = 0,
    adjustments: Adjustments | None = None,
    *,
    vocab_size: int,
) -> DecodeState:
    """Runs up to ``max_steps`` decode steps. Ends early when no sequence is running.

    Args:
      depth: number of drafts per step; 0 without a drafter. At most the depth for which the state
        was created.
      adjustments: changes to the logits; None if no sequence asks for any.
      vocab_size: ids from here on are padding of the embedding and never selected.
    """
    model = model.precompute_for_decode()

    def step(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        i, state = carry
        return i + 1, decode_step(model, state, sampling, drafter, depth, vocab_size, adjustments)

    def proceed(carry: tuple[jax.Array, DecodeState]) -> Bool[Array, ""]:
        i, state = carry
        return (i < max_steps) & jnp.any(state.finished == RUNNING)

    _, state = jax.lax.while_loop(proceed, step, (jnp.int32(0), state))
    return state


def decode_step(
    model: DeepSeekV3,
    state: DecodeState,
    sampling: Sampling,
    drafter: Drafter | None,
    depth: int,
    vocab_size: int,
    adjustments: Adjustments | None = None,
) -> DecodeState:
    """Drafts tokens, checks them in one forward pass, and appends the accepted ones.

    Every running sequence gains the accepted drafts and one more token, the model's own. If some of
    its logits are not finite, it gains the tokens before them and ends.
    """
    is_running = state.finished == RUNNING
    drafts, state = _draft(model, state, is_running, sampling, drafter, depth, vocab_size)
    last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
    inputs = jnp.concatenate([last, drafts.tokens], axis=1)
    cached = state.cache.lengths
    hidden, cache = model.extend(
        inputs, jnp.where(is_running, 1 + drafts.counts, 0), state.cache, "absorbed"
    )
    new = select_tokens(
        model.logits(hidden.post_norm),
        drafts,
        sampling,
        state.lengths,
        state.limits,
        is_running,
        vocab_size=vocab_size,
        num_top_logprobs=state.top_tokens.shape[-1],
        acceptance=None if drafter is None else drafter.acceptance,
        adjustments=adjustments,
        known_tokens=state.tokens,
    )
    # Rejected drafts stay in the cache past its length, where later tokens overwrite them.
    cache = cache.with_lengths(cached + new.counts)
    state = _append_tokens(dataclasses.replace(state, cache=cache), new)
    state = _count_drafts(state, drafts, new.counts)
    if drafter is not None and drafter.mtp_hidden is not None:
        mtp_input = hidden.mtp_input(drafter.mtp_hidden)
        # The state has room for K drafts. This step may use fewer.
        padding = state.mtp_inputs.shape[1] - mtp_input.shape[1]
        state = dataclasses.replace(
            state,
            mtp_inputs=jnp.pad(mtp_input, ((0, 0), (0, padding), (0, 0))),
            num_mtp_inputs=jnp.where(is_running, new.counts, state.num_mtp_inputs),
        )
    finished = jnp.where(is_running, new.finished, state.finished)
    return dataclasses.replace(state, finished=finished, steps=state.steps + 1)


def _draft(
    model: DeepSeekV3,
    state: DecodeState,
    is_running: Bool[Array, " B"],
    sampling: Sampling,
    drafter: Drafter | None,
    depth: int,
    vocab_size: int,
) -> tuple[Drafts, DecodeState]:
    """Returns the drafts of one step, and the state with the drafter's cache brought up to date."""
    if drafter is None:
        drafts = Drafts.empty(len(state.tokens))
    else:
        context = DraftContext(
            tokens=state.tokens,
            lengths=state.lengths,
            is_running=is_running,
            cache=state.cache,
            mtp_inputs=state.mtp_inputs,
            num_mtp_inputs=state.num_mtp_inputs,
        )
        drafts, cache = drafter.draft(model, context, sampling, depth, vocab_size)
        state = dataclasses.replace(state, cache=cache)
    # Drafts past the limit are not checked. One position is reserved for the model's own token.
    room = jnp.where(is_running, state.limits - state.lengths - 1, 0)
    return drafts._replace(counts=jnp.clip(drafts.counts, 0, room)), state


def _append_tokens(state: DecodeState, new: NewTokens) -> DecodeState:
    """Appends the new tokens of each sequence and their log-probabilities."""
    sequences = jnp.arange(new.tokens.shape[0])[:, None]
    offsets = jnp.arange(new.tokens.shape[1])
    positions = state.lengths[:, None] + offsets
    # S is out of bounds, so the tokens after the first `counts` are dropped.
    positions = jnp.where(offsets < new.counts[:, None], positions, state.tokens.shape[1])

    def write(array: jax.Array, values: jax.Array) -> jax.Array:
        return array.at[sequences, positions].set(values, mode="drop")

    return dataclasses.replace(
        state,
        tokens=write(state.tokens, new.tokens),
        logprobs=write(state.logprobs, new.logprobs),
        top_tokens=write(state.top_tokens, new.top_tokens),
        top_logprobs=write(state.top_logprobs, new.top_logprobs),
        lengths=state.lengths + new.counts,
    )


def _count_drafts(state: DecodeState, drafts: Drafts, num_new: Int[Array, " B"]) -> DecodeState:
    """Adds one step to the statistics. A sequence that gained n tokens accepted n - 1 drafts."""
    draft_positions = jnp.arange(state.drafted.shape[1])
    return dataclasses.replace(
        state,
        drafted=state.drafted + (draft_positions < drafts.counts[:, None]),
        accepted=state.accepted + (draft_positions < num_new[:, None] - 1),
        sequence_steps=state.sequence_steps + (num_new > 0),
    )
