"""The two jitted loops: prefill the prompts chunk by chunk, decode many tokens a dispatch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from dsv3_jax.generation.drafters import Drafter, Drafts, mask_padding, no_drafts
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.generation.state import FULL, NOT_FINITE, RUNNING, STOPPED, DecodeState
from dsv3_jax.generation.verification import verify
from dsv3_jax.model import DeepSeekV3


def prefill(
    model: DeepSeekV3,
    state: DecodeState,
    chunks: Int[Array, ""],
    drafter: Drafter | None = None,
    *,
    chunk: int,
) -> DecodeState:
    """Caches every prompt token but the last of each row, ``chunk`` tokens a row at a time.

    Args:
      chunks: most of them in this dispatch; another goes on where it ended.
    """

    def missing(state: DecodeState) -> Int[Array, " B"]:
        return state.lengths - 1 - state.cache.lengths

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        i, state = carry
        return i + 1, extended(state)

    def extended(state: DecodeState) -> DecodeState:
        starts = state.cache.lengths
        positions = starts[:, None] + jnp.arange(chunk)
        tokens = jnp.take_along_axis(state.tokens, positions, axis=1, mode="clip")
        counts = jnp.clip(missing(state), 0, chunk)
        hidden, cache = model.extend(tokens, counts, state.cache, "expanded")
        if drafter is None or drafter.mtp_hidden is None:
            return dataclasses.replace(state, cache=cache)
        feed = hidden.feed(drafter.mtp_hidden)
        following = jnp.take_along_axis(state.tokens, positions + 1, axis=1, mode="clip")
        _, cache = model.extend_mtp(feed, following, starts, counts, cache, "expanded")
        # The last place is run again by the first decode step, whose draft it is.
        newest = jnp.take_along_axis(feed, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
        return dataclasses.replace(
            state,
            cache=cache,
            hidden=state.hidden.at[:, :1].set(
                jnp.where((counts > 0)[:, None, None], newest, state.hidden[:, :1])
            ),
            pending=jnp.minimum(cache.lengths, 1),
        )

    def proceed(carry: tuple[jax.Array, DecodeState]) -> Bool[Array, ""]:
        i, state = carry
        return (i < chunks) & jnp.any(missing(state) > 0)

    _, state = jax.lax.while_loop(proceed, body, (jnp.int32(0), state))
    return state


def decode(
    model: DeepSeekV3,
    state: DecodeState,
    sampling: Sampling,
    steps: Int[Array, ""],
    drafter: Drafter | None = None,
    depth: int = 0,
    *,
    vocab_size: int,
) -> DecodeState:
    """Runs up to ``steps`` decode steps; ends early when no row runs.

    Args:
      depth: drafts a step, at most the K that the state has room for; 0 without a drafter.
      vocab_size: ids from here on are padding of the embedding and never chosen.
    """
    model = model.ready_to_decode()

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        i, state = carry
        return i + 1, decode_step(model, state, sampling, drafter, depth, vocab_size)

    def proceed(carry: tuple[jax.Array, DecodeState]) -> Bool[Array, ""]:
        i, state = carry
        return (i < steps) & jnp.any(state.finished == RUNNING)

    _, state = jax.lax.while_loop(proceed, body, (jnp.int32(0), state))
    return state


def decode_step(
    model: DeepSeekV3,
    state: DecodeState,
    sampling: Sampling,
    drafter: Drafter | None,
    depth: int,
    vocab_size: int,
) -> DecodeState:
    """Drafts, checks all drafts in one pass of the model, and appends what holds.

    A running row gains one token at least: the model's own behind the accepted drafts. Where its
    logits are not finite, it gains what comes before them, and ends.
    """
    running = state.finished == RUNNING
    if drafter is None:
        drafts = no_drafts(state)
    else:
        drafts, state = drafter.draft(model, state, sampling, depth, vocab_size)
    # Drafts that a row has no room for are not worth checking: one place is the model's own.
    room = jnp.where(running, state.limits - state.lengths - 1, 0)
    drafts = drafts._replace(counts=jnp.clip(drafts.counts, 0, room))
    last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
    fed = jnp.concatenate([last, drafts.tokens], axis=1)
    before = state.cache.lengths
    hidden, cache = model.extend(
        fed, jnp.where(running, 1 + drafts.counts, 0), state.cache, "absorbed"
    )
    logits = model.logits(hidden.post_norm)
    # An infinity of the model's own must not pass for one of mask_padding's. As NaN it is the
    # largest of the logits, as argmax orders them, and so shows without another pass over them.
    logits = mask_padding(jnp.where(jnp.isneginf(logits), jnp.nan, logits), vocab_size)
    acceptance = None if drafter is None else drafter.acceptance
    tokens, accepted = verify(logits, drafts, sampling, state.lengths, acceptance)

    place = jnp.arange(fed.shape[1])
    stops = jnp.any(tokens[..., None] == sampling.stop_tokens[:, None], axis=-1)
    stops &= place <= accepted[:, None]
    stopped = jnp.any(stops, axis=1)
    gained = jnp.where(stopped, jnp.argmax(stops, axis=1), accepted) + 1
    # verify searches for the most probable token too: XLA does it once for both.
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)[..., None]
    peak = jnp.take_along_axis(logits, best, axis=-1)
    finite = jnp.cumprod(jnp.isfinite(peak[..., 0]).astype(jnp.int32), axis=1).sum(axis=1)
    broken = finite < gained
    gained = jnp.where(running, jnp.minimum(gained, finite), 0).astype(jnp.int32)
    # The rewind: what was cached of refused drafts lies past the length, and is overwritten.
    cache = dataclasses.replace(cache, lengths=before + gained)
    state = _append(dataclasses.replace(state, cache=cache), gained, tokens, logits, peak)
    state = _count(state, drafts, gained)
    if drafter is not None and drafter.mtp_hidden is not None:
        feed = hidden.feed(drafter.mtp_hidden)
        missing = state.hidden.shape[1] - feed.shape[1]  # where a shallower depth runs
        state = dataclasses.replace(
            state,
            hidden=jnp.pad(feed, ((0, 0), (0, missing), (0, 0))),
            pending=jnp.where(running, gained, state.pending),
        )
    full = state.lengths >= state.limits
    outcome = jnp.where(stopped, STOPPED, jnp.where(full, FULL, RUNNING))
    outcome = jnp.where(broken, NOT_FINITE, outcome)
    return dataclasses.replace(
        state, finished=jnp.where(running, outcome, state.finished), steps=state.steps + 1
    )


def _append(
    state: DecodeState,
    gained: Int[Array, " B"],
    tokens: Int[Array, "B T"],
    logits: Float32[Array, "B T W"],
    peak: Float32[Array, "B T 1"],
) -> DecodeState:
    """Writes each row's new tokens and their log-probabilities at the row's end. ``peak`` is the
    largest logit of each position."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    step = jnp.arange(tokens.shape[1])
    inside = step < gained[:, None]
    places = jnp.where(inside, state.lengths[:, None] + step, state.tokens.shape[1])  # or dropped

    def put(array: jax.Array, values: jax.Array) -> jax.Array:
        return array.at[rows, places].set(values, mode="drop")

    # log_softmax of what is asked for.
    total = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True))
    chosen = (jnp.take_along_axis(logits, tokens[..., None], axis=-1) - peak - total)[..., 0]
    top_logits, top_tokens = jax.lax.top_k(logits, state.top_tokens.shape[-1])
    return dataclasses.replace(
        state,
        tokens=put(state.tokens, tokens),
        logprobs=put(state.logprobs, chosen),
        top_tokens=put(state.top_tokens, top_tokens),
        top_logprobs=put(state.top_logprobs, top_logits - peak - total),
        lengths=state.lengths + gained,
    )


def _count(state: DecodeState, drafts: Drafts, gained: Int[Array, " B"]) -> DecodeState:
    """Adds the step to the statistics: a row that gained g tokens has accepted g - 1 drafts."""
    place = jnp.arange(state.drafted.shape[1])
    return dataclasses.replace(
        state,
        drafted=state.drafted + (place < drafts.counts[:, None]),
        accepted=state.accepted + (place < gained[:, None] - 1),
        row_steps=state.row_steps + (gained > 0),
    )
