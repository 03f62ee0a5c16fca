"""The compiled step: prefill chunks and decoding requests in one pass through the network.

A step drafts tokens for the requests that decode, and runs three kinds of tokens through the model
together: the newest token of each of these requests, its drafts, and the tokens of the prefill
chunks. Dense layers and experts process all of them as one array [N, D], so that weights are read
once; attention alone treats the two groups differently. Then one token is sampled after each
finished prompt, and one or more for each decoding request.

A step without chunks repeats itself up to ``StepInput.steps`` times on the device.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from dsv3_jax.engine.device.state import SlotRows, SlotState
from dsv3_jax.engine.device.step_input import StepInput, StepShape, unpack
from dsv3_jax.generation.completion import RUNNING
from dsv3_jax.generation.drafters import DraftContext, Drafter, Drafts
from dsv3_jax.generation.sampling import Sampling, mask_vocab_padding
from dsv3_jax.generation.selection import NewTokens, select_tokens
from dsv3_jax.generation.settings import MAX_TOP_LOGPROBS
from dsv3_jax.kv_cache import LatentKVCache, SequenceTables, TokenBatch
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.model_io import Hidden


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the tokens after those of C chunks of T tokens."""

    logprobs: Float32[Array, "*C T"]
    top_tokens: Int[Array, "*C T k"]
    """The k most probable tokens, best first."""
    top_logprobs: Float32[Array, "*C T k"]


class StepOutput(NamedTuple):
    """Results that the host reads: n decode steps (one, if it prefills) of N = B + C rows.

    On each shard the requests that decode come first, then those of the chunks. F is the most new
    tokens of a decode step: one more than its drafts.
    """

    tokens: Int[Array, "n N F"]
    counts: Int[Array, "n N"]
    """Number of valid tokens; 0 after the request has ended, and for chunks that end no prompt."""
    finished: Int[Array, " N"]
    """RUNNING, STOPPED, FULL or NON_FINITE, after the last of these steps."""
    drafted: Int[Array, "n N"]
    """Number of drafts that were verified."""
    logprobs: Float32[Array, "n N F"]
    top_tokens: Int[Array, "n N F k"]
    top_logprobs: Float32[Array, "n N F k"]
    prompt: PromptLogprobs | None
    """Log-probabilities of the tokens after those of each chunk; None unless a request asks for
    them."""


class _Options(NamedTuple):
    """Static arguments of a step."""

    shape: StepShape
    drafter: Drafter | None
    vocab_size: int
    rows: SlotRows


class _Requests(NamedTuple):
    """Rows of the state that take part in a step."""

    slots: Int[Array, " B"]
    tables: Int[Array, "B max_pages"]
    is_running: Bool[Array, " B"]
    lengths: Int[Array, " B"]
    limits: Int[Array, " B"]
    sampling: Sampling

    @classmethod
    def of(
        cls,
        state: SlotState,
        options: _Options,
        slots: Int[Array, " B"],
        tables: Int[Array, "B max_pages"],
    ) -> _Requests:
        shape, rows = options.shape, options.rows
        is_slot = rows.is_slot(slots, state.num_slots)
        is_running = is_slot & (rows.get(state.finished, slots) == RUNNING)
        sampling = dataclasses.replace(rows.get(state.sampling, slots), mode=shape.options.sampling)
        lengths, limits = rows.get(state.lengths, slots), rows.get(state.limits, slots)
        return cls(slots, tables, is_running, lengths, limits, sampling)

    @property
    def sequences(self) -> SequenceTables:
        """The cached tokens of these requests: all except the last. None of a request that does not
        run, so that attention reads nothing for the padding of a batch."""
        return SequenceTables(self.tables, jnp.where(self.is_running, self.lengths - 1, 0))

    def cache(self, state: SlotState) -> LatentKVCache:
        """The cache of these requests."""
        return LatentKVCache(state.pool, self.sequences, state.routing_counts)


def step(
    model: DeepSeekV3,
    state: SlotState,
    buffer: Int32[Array, "*shards n"],
    *,
    shape: StepShape,
    drafter: Drafter | None,
    vocab_size: int,
) -> tuple[SlotState, StepOutput]:
    """Runs one dispatch: one step, or several decode steps.

    Args:
      buffer: the arguments, see :func:`dsv3_jax.engine.device.step_input.unpack`.
      vocab_size: ids from here on are padding of the embedding and never selected.
    """
    inputs = unpack(buffer, shape)
    rows = SlotRows(model.layout)
    options = _Options(shape, drafter, vocab_size, rows)
    state = state.rewind(inputs, rows)
    if shape.max_steps > 1:
        return _decode_steps(model, state, inputs, options)
    state = state.admit(inputs, rows)
    state, new, drafted, prompt = _step(model, state, inputs, options)
    one = jax.tree.map(lambda x: x[None], new)
    return state, _output(one, drafted[None], new.finished, prompt)


def _decode_steps(
    model: DeepSeekV3, state: SlotState, inputs: StepInput, options: _Options
) -> tuple[SlotState, StepOutput]:
    """Runs up to ``inputs.steps`` decode steps. Ends early when no request is running."""
    shape = options.shape
    steps = jnp.minimum(inputs.steps[0], shape.max_steps)
    shapes = jax.eval_shape(lambda state: _step(model, state, inputs, options)[1:], state)
    outputs = jax.tree.map(lambda x: jnp.zeros((shape.max_steps, *x.shape), x.dtype), shapes)

    def is_due(i: Int[Array, ""], state: SlotState) -> Bool[Array, ""]:
        requests = _decode_requests(state, inputs, options)
        return (i < steps) & jnp.any(requests.is_running)

    def body(carry: tuple) -> tuple:
        i, _, state, outputs = carry
        state, *new = _step(model, state, inputs, options)
        # Step i exists. On GPUs `.at[i].set` would check that in kernels of their own.
        outputs = jax.tree.map(
            lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, i, axis=0),
            outputs,
            tuple(new),
        )
        return i + 1, is_due(i + 1, state), state, outputs

    # The carry has the condition, because the host waits for it: computed between two steps, it
    # would be one more kernel that nothing overlaps.
    carry = jnp.int32(0), is_due(jnp.int32(0), state), state, outputs
    _, _, state, (new, drafted, _) = jax.lax.while_loop(lambda carry: carry[1], body, carry)
    finished = options.rows.get(state.finished, inputs.decode_slots)
    return state, _output(new, drafted, finished)


def _decode_requests(state: SlotState, inputs: StepInput, options: _Options) -> _Requests:
    """Returns the requests that decode."""
    return _Requests.of(state, options, inputs.decode_slots, inputs.decode_tables)


def _output(
    new: NewTokens,
    drafted: Int[Array, "n N"],
    finished: Int[Array, " N"],
    prompt: PromptLogprobs | None = None,
) -> StepOutput:
    tops = new.top_tokens, new.top_logprobs
    return StepOutput(new.tokens, new.counts, finished, drafted, new.logprobs, *tops, prompt)


def _step(
    model: DeepSeekV3, state: SlotState, inputs: StepInput, options: _Options
) -> tuple[SlotState, NewTokens, Int[Array, " N"], PromptLogprobs | None]:
    """Runs one step. Also returns its new tokens, how many drafts each request had, and the
    log-probabilities of the chunks' tokens."""
    shape, rows = options.shape, options.rows
    decodes = _decode_requests(state, inputs, options)
    drafts, state = _draft(model, state, decodes, inputs.max_drafts, options)
    batches, sampled = [], []
    if shape.decodes:
        batches.append(_decode_batch(state, rows, decodes, drafts))
        sampled.append(decodes)
    if shape.chunks:
        chunks, chunk_batch = _chunk_batch(state, inputs, options)
        batches.append(chunk_batch)
        sampled.append(chunks)
        padding = jnp.zeros((len(chunk_batch.tokens), drafts.tokens.shape[1]), jnp.int32)
        drafts = _with_undrafted(drafts, padding, rows)
    hidden, pool, expert_counts = model.extend_batches(batches, state.pool)
    cache = LatentKVCache(pool, batches[0].sequences, state.routing_counts)
    state = _with_cache(state, cache.add_routing_counts(0, expert_counts))
    prompt = None
    if shape.options.prompt_logprobs:
        next_tokens = _next_tokens(state, rows, inputs, shape.chunk_tokens)
        prompt = _prompt_logprobs(model, hidden[-1].post_norm, next_tokens, options.vocab_size)
    outputs = list(hidden)
    if shape.chunks:
        outputs[-1] = _at_last(hidden[-1], inputs.counts, 1 + drafts.tokens.shape[1])
    joined: Hidden = jax.tree.map(rows.concatenate, *outputs)
    requests: _Requests = jax.tree.map(rows.concatenate, *sampled)
    new = select_tokens(
        model.logits(joined.post_norm),
        drafts,
        requests.sampling,
        requests.lengths,
        requests.limits,
        requests.is_running,
        vocab_size=options.vocab_size,
        num_top_logprobs=shape.num_top_logprobs,
        acceptance=None if options.drafter is None else options.drafter.acceptance,
        adjustments=inputs.adjustments,
        known_tokens=rows.get(state.tokens, requests.slots) if shape.options.penalties else None,
    )
    state = _append(state, rows, requests, new)
    drafter = options.drafter
    if drafter is not None and drafter.mtp_hidden is not None:
        mtp_inputs = joined.mtp_input(drafter.mtp_hidden)
        state = _keep_mtp_inputs(state, rows, requests, mtp_inputs, new.counts)
        if shape.chunks:
            chunk_inputs = hidden[-1].mtp_input(drafter.mtp_hidden)
            state = _prefill_mtp(model, state, rows, inputs, batches[-1], chunk_inputs)
    return state, new, jnp.where(requests.is_running, drafts.counts, 0), prompt


def _draft(
    model: DeepSeekV3,
    state: SlotState,
    requests: _Requests,
    max_drafts: Int[Array, " B"],
    options: _Options,
) -> tuple[Drafts, SlotState]:
    """Returns drafts for the requests that decode, and the state with the drafter's cache."""
    if options.drafter is None or not len(requests.slots):
        return Drafts.empty(len(requests.slots)), state
    rows, slots = options.rows, requests.slots
    context = DraftContext(
        tokens=rows.get(state.tokens, slots),
        lengths=requests.lengths,
        is_running=requests.is_running,
        cache=requests.cache(state),
        mtp_inputs=rows.get(state.mtp_inputs, slots),
        num_mtp_inputs=jnp.where(requests.is_running, rows.get(state.num_mtp_inputs, slots), 0),
    )
    drafts, cache = options.drafter.draft(
        model, context, requests.sampling, options.shape.depth, options.vocab_size
    )
    # Drafts past the limit are not checked. One position is reserved for the model's own token.
    room = jnp.where(requests.is_running, requests.limits - requests.lengths - 1, 0)
    most = jnp.minimum(room, max_drafts)
    drafts = drafts._replace(counts=jnp.clip(drafts.counts, 0, most))
    return drafts, _with_cache(state, cache)


def _with_undrafted(drafts: Drafts, tokens: Int[Array, "C K"], rows: SlotRows) -> Drafts:
    """Returns the drafts with C more requests that have none."""
    logits = drafts.logits
    if logits is not None:
        logits = rows.pad(logits, len(tokens))
    return Drafts(
        rows.concatenate(drafts.tokens, tokens),
        rows.concatenate(drafts.counts, jnp.zeros(len(tokens), jnp.int32)),
        logits,
    )


def _decode_batch(
    state: SlotState, rows: SlotRows, requests: _Requests, drafts: Drafts
) -> TokenBatch:
    """Returns the newest token of each request, and its drafts."""
    last = rows.get(state.tokens, requests.slots, requests.lengths - 1)
    return TokenBatch(
        tokens=jnp.concatenate([last[:, None], drafts.tokens], axis=1),
        counts=jnp.where(requests.is_running, 1 + drafts.counts, 0),
        sequences=requests.sequences,
        form="absorbed",
    )


def _chunk_batch(
    state: SlotState, inputs: StepInput, options: _Options
) -> tuple[_Requests, TokenBatch]:
    """Returns the requests of the prefill chunks, which run if a token is to be sampled, and the
    chunks' tokens."""
    shape, rows = options.shape, options.rows
    positions = inputs.starts[:, None] + jnp.arange(shape.chunk_tokens)
    batch = TokenBatch(
        tokens=rows.get(state.tokens, inputs.chunk_slots[:, None], positions),
        counts=inputs.counts,
        sequences=SequenceTables(inputs.chunk_tables, inputs.starts),
        form=shape.chunk_form,
    )
    requests = _Requests.of(state, options, inputs.chunk_slots, inputs.chunk_tables)
    return requests._replace(is_running=requests.is_running & (inputs.is_last > 0)), batch


def _at_last(hidden: Hidden, counts: Int[Array, " C"], copies: int) -> Hidden:
    """Returns the hidden state of each chunk's last token, several times: [C, copies, D]."""
    last = jnp.maximum(counts - 1, 0)[:, None, None]

    def pick(x: jax.Array) -> jax.Array:
        one = jnp.take_along_axis(x, last, axis=1)
        return jnp.broadcast_to(one, (len(x), copies, x.shape[2]))

    return Hidden(pick(hidden.pre_norm), pick(hidden.post_norm))


def _append(state: SlotState, rows: SlotRows, requests: _Requests, new: NewTokens) -> SlotState:
    """Writes new tokens, lengths and ends to the rows of the requests that gained tokens or ended.

    A request has several chunks in a step if its prompt is long; only the last one of them writes.
    """
    slots = rows.only(requests.is_running, requests.slots, state.num_slots)
    offsets = jnp.arange(new.tokens.shape[1])
    positions = requests.lengths[:, None] + offsets
    # S is out of bounds, so the tokens after the first `counts` are dropped.
    positions = jnp.where(offsets < new.counts[:, None], positions, state.tokens.shape[1])
    return dataclasses.replace(
        state,
        tokens=rows.set(state.tokens, new.tokens, slots[:, None], positions),
        lengths=rows.set(state.lengths, requests.lengths + new.counts, slots),
        finished=rows.set(state.finished, new.finished, slots),
    )


def _keep_mtp_inputs(
    state: SlotState,
    rows: SlotRows,
    requests: _Requests,
    mtp_inputs: jax.Array,
    counts: Int[Array, " N"],
) -> SlotState:
    """Stores the hidden states that the MTP layer takes in the next step.

    There is one for each token that the request gained. A request whose prompt has just ended
    gained one token, and its hidden state is that of the last prompt token.
    """
    slots = rows.only(requests.is_running, requests.slots, state.num_slots)
    # The state has room for K drafts. This step may use fewer.
    padding = state.mtp_inputs.shape[1] - mtp_inputs.shape[1]
    padded = jnp.pad(mtp_inputs, ((0, 0), (0, padding), (0, 0)))
    return dataclasses.replace(
        state,
        mtp_inputs=rows.set(state.mtp_inputs, padded, slots),
        num_mtp_inputs=rows.set(state.num_mtp_inputs, counts, slots),
    )


def _prefill_mtp(
    model: DeepSeekV3,
    state: SlotState,
    rows: SlotRows,
    inputs: StepInput,
    batch: TokenBatch,
    mtp_inputs: jax.Array,
) -> SlotState:
    """Caches the chunks' positions in the MTP layer. Position i takes token i + 1, which for the
    last token of a prompt is the one that this step has sampled."""
    next_tokens = _next_tokens(state, rows, inputs, batch.tokens.shape[1])
    cache = LatentKVCache(state.pool, batch.sequences, state.routing_counts)
    _, cache = model.extend_mtp(
        mtp_inputs, next_tokens, inputs.starts, inputs.counts, cache, batch.form
    )
    return _with_cache(state, cache)


def _next_tokens(
    state: SlotState, rows: SlotRows, inputs: StepInput, count: int
) -> Int[Array, "C T"]:
    """Returns the tokens one position after those of the chunks."""
    positions = inputs.starts[:, None] + 1 + jnp.arange(count)
    return rows.get(state.tokens, inputs.chunk_slots[:, None], positions)


def _prompt_logprobs(
    model: DeepSeekV3,
    hidden: Float[Array, "C T D"],
    next_tokens: Int[Array, "C T"],
    vocab_size: int,
) -> PromptLogprobs:
    """Returns the log-probability of each next token, given those before it.

    One chunk is computed after the other, so that the logits of a single one exist at a time.

    Args:
      hidden: hidden states after the final norm.
      vocab_size: ids from here on are padding of the embedding.
    """

    def of_chunk(arguments: tuple[jax.Array, jax.Array]) -> PromptLogprobs:
        hidden, tokens = arguments
        logits = mask_vocab_padding(model.logits(hidden), vocab_size)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        top_logprobs, top_tokens = jax.lax.top_k(log_p, MAX_TOP_LOGPROBS)
        logprobs = jnp.take_along_axis(log_p, tokens[:, None], axis=-1)[:, 0]
        return PromptLogprobs(logprobs, top_tokens, top_logprobs)

    return jax.lax.map(of_chunk, (hidden, next_tokens))


def _with_cache(state: SlotState, cache: LatentKVCache) -> SlotState:
    """Returns the state with the pages and counts of a cache of some of its requests."""
    return dataclasses.replace(state, pool=cache.pool, routing_counts=cache.routing_counts)
