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
    """Log-probabilities of each chunk's next tokens; None unless a request asks for them."""


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
        rows: SlotRows,
        shape: StepShape,
        slots: Int[Array, " B"],
        tables: Int[Array, "B max_pages"],
    ) -> _Requests:
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


def step(
    model: DeepSeekV3,
    state: SlotState,
    buffer: Int32[Array, "*shards n"],
    *,
    shape: StepShape,
    drafter: Drafter | None,
    vocab_size: int,
) -> tuple[SlotState, StepOutput]:
    """Runs one dispatch, whose arguments :func:`unpack` finds in the buffer: one step, or several
    decode steps. Ids from ``vocab_size`` on are padding of the embedding and never selected."""
    inputs, rows = unpack(buffer, shape), SlotRows(model.layout)
    one = _Step(model, inputs, shape, drafter, vocab_size, rows)
    state = state.rewind(inputs, rows)
    if shape.max_steps > 1:
        return _decode_steps(one, state)
    state = state.admit(inputs, rows)
    state, new, drafted, prompt = one.run(state)
    stacked = jax.tree.map(lambda x: x[None], new)
    return state, _output(stacked, drafted[None], new.finished, prompt)


def _decode_steps(one: _Step, state: SlotState) -> tuple[SlotState, StepOutput]:
    """Runs up to ``inputs.steps`` decode steps. Ends early when no request is running."""
    most = one.shape.max_steps
    steps = jnp.minimum(one.inputs.steps[0], most)
    shapes = jax.eval_shape(lambda state: one.run(state)[1:], state)
    outputs = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), shapes)

    def is_due(i: Int[Array, ""], state: SlotState) -> Bool[Array, ""]:
        requests = one.decode_requests(state)
        return (i < steps) & jnp.any(requests.is_running)

    def body(carry: tuple) -> tuple:
        i, _, state, outputs = carry
        state, *new = one.run(state)
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
    finished = one.rows.get(state.finished, one.inputs.decode_slots)
    return state, _output(new, drafted, finished)


def _output(
    new: NewTokens,
    drafted: Int[Array, "n N"],
    finished: Int[Array, " N"],
    prompt: PromptLogprobs | None = None,
) -> StepOutput:
    tops = new.top_tokens, new.top_logprobs
    return StepOutput(new.tokens, new.counts, finished, drafted, new.logprobs, *tops, prompt)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One step: its model, its arguments, and its static options."""

    model: DeepSeekV3
    inputs: StepInput
    shape: StepShape
    drafter: Drafter | None
    vocab_size: int
    rows: SlotRows

    def run(
        self, state: SlotState
    ) -> tuple[SlotState, NewTokens, Int[Array, " N"], PromptLogprobs | None]:
        """Also returns new tokens, drafts of each request, and the chunks' log-probabilities."""
        model, inputs, shape, rows = self.model, self.inputs, self.shape, self.rows
        decodes = self.decode_requests(state)
        drafts, state = self._draft(state, decodes)
        batches, sampled = [], []
        if shape.decodes:
            batches.append(_decode_batch(state, rows, decodes, drafts))
            sampled.append(decodes)
        if shape.chunks:
            chunks, chunk_batch = self._chunk_batch(state)
            batches.append(chunk_batch)
            sampled.append(chunks)
            drafts = _with_undrafted(drafts, len(chunk_batch.tokens), rows)
        hidden, pool, expert_counts = model.extend_batches(batches, state.pool)
        cache = LatentKVCache(pool, batches[0].sequences, state.routing_counts)
        state = _with_cache(state, cache.add_routing_counts(0, expert_counts))
        prompt = None
        if shape.options.prompt_logprobs:
            prompt = self._prompt_logprobs(hidden[-1].post_norm, self._next_tokens(state))
        outputs = list(hidden)
        if shape.chunks:
            outputs[-1] = _at_last(hidden[-1], inputs.counts, 1 + drafts.tokens.shape[1])
        joined: Hidden = jax.tree.map(rows.concatenate, *outputs)
        requests: _Requests = jax.tree.map(rows.concatenate, *sampled)
        drafter = self.drafter
        new = select_tokens(
            model.logits(joined.post_norm),
            drafts,
            requests.sampling,
            requests.lengths,
            requests.limits,
            requests.is_running,
            vocab_size=self.vocab_size,
            num_top_logprobs=shape.num_top_logprobs,
            acceptance=None if drafter is None else drafter.acceptance,
            adjustments=inputs.adjustments,
            known_tokens=rows.get(state.tokens, requests.slots)
            if shape.options.penalties
            else None,
        )
        state = self._append(state, requests, new)
        if drafter is not None and drafter.mtp_hidden is not None:
            mtp_inputs = joined.mtp_input(drafter.mtp_hidden)
            state = self._keep_mtp_inputs(state, requests, mtp_inputs, new.counts)
            if shape.chunks:
                chunk_inputs = hidden[-1].mtp_input(drafter.mtp_hidden)
                state = self._prefill_mtp(state, batches[-1], chunk_inputs)
        return state, new, jnp.where(requests.is_running, drafts.counts, 0), prompt

    def decode_requests(self, state: SlotState) -> _Requests:
        """Returns the requests that decode."""
        slots, tables = self.inputs.decode_slots, self.inputs.decode_tables
        return _Requests.of(state, self.rows, self.shape, slots, tables)

    def _draft(self, state: SlotState, requests: _Requests) -> tuple[Drafts, SlotState]:
        """Returns drafts for the requests that decode, and the state with the drafter's cache."""
        if self.drafter is None or not len(requests.slots):
            return Drafts.empty(len(requests.slots)), state
        rows, slots = self.rows, requests.slots
        context = DraftContext(
            tokens=rows.get(state.tokens, slots),
            lengths=requests.lengths,
            is_running=requests.is_running,
            cache=LatentKVCache(state.pool, requests.sequences, state.routing_counts),
            mtp_inputs=rows.get(state.mtp_inputs, slots),
            num_mtp_inputs=jnp.where(requests.is_running, rows.get(state.num_mtp_inputs, slots), 0),
        )
        drafts, cache = self.drafter.draft(
            self.model, context, requests.sampling, self.shape.depth, self.vocab_size
        )
        # Drafts past the limit are not checked. One position is reserved for the model's own token.
        room = jnp.where(requests.is_running, requests.limits - requests.lengths - 1, 0)
        most = jnp.minimum(room, self.inputs.max_drafts)
        drafts = drafts._replace(counts=jnp.clip(drafts.counts, 0, most))
        return drafts, _with_cache(state, cache)

    def _chunk_batch(self, state: SlotState) -> tuple[_Requests, TokenBatch]:
        """Returns the chunks' requests, which run if a token is to be sampled, and their tokens."""
        inputs, shape = self.inputs, self.shape
        positions = inputs.starts[:, None] + jnp.arange(shape.chunk_tokens)
        batch = TokenBatch(
            tokens=self.rows.get(state.tokens, inputs.chunk_slots[:, None], positions),
            counts=inputs.counts,
            sequences=SequenceTables(inputs.chunk_tables, inputs.starts),
            form=shape.chunk_form,
        )
        requests = _Requests.of(state, self.rows, shape, inputs.chunk_slots, inputs.chunk_tables)
        return requests._replace(is_running=requests.is_running & (inputs.is_last > 0)), batch

    def _append(self, state: SlotState, requests: _Requests, new: NewTokens) -> SlotState:
        """Writes new tokens, lengths and ends to the rows of the requests that gained tokens or
        ended.

        A request has several chunks in a step if its prompt is long; only the last of them writes.
        """
        rows = self.rows
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
        self, state: SlotState, requests: _Requests, mtp_inputs: jax.Array, counts: Int[Array, " N"]
    ) -> SlotState:
        """Stores the hidden states that the MTP layer takes in the next step, one for each token
        that the request gained. A request whose prompt has just ended gained one token, and its
        hidden state is that of the last prompt token."""
        rows = self.rows
        slots = rows.only(requests.is_running, requests.slots, state.num_slots)
        # The state has room for K drafts. This step may use fewer.
        padding = state.mtp_inputs.shape[1] - mtp_inputs.shape[1]
        padded = jnp.pad(mtp_inputs, ((0, 0), (0, padding), (0, 0)))
        return dataclasses.replace(
            state,
            mtp_inputs=rows.set(state.mtp_inputs, padded, slots),
            num_mtp_inputs=rows.set(state.num_mtp_inputs, counts, slots),
        )

    def _prefill_mtp(self, state: SlotState, batch: TokenBatch, mtp_inputs: jax.Array) -> SlotState:
        """Caches the chunks' positions in the MTP layer. Position i takes token i + 1, which for
        the last token of a prompt is the one that this step has sampled."""
        cache = LatentKVCache(state.pool, batch.sequences, state.routing_counts)
        starts, counts = self.inputs.starts, self.inputs.counts
        _, cache = self.model.extend_mtp(
            mtp_inputs, self._next_tokens(state), starts, counts, cache, batch.form
        )
        return _with_cache(state, cache)

    def _next_tokens(self, state: SlotState) -> Int[Array, "C T"]:
        """Returns the tokens one position after those of the chunks."""
        positions = self.inputs.starts[:, None] + 1 + jnp.arange(self.shape.chunk_tokens)
        return self.rows.get(state.tokens, self.inputs.chunk_slots[:, None], positions)

    def _prompt_logprobs(
        self, hidden: Float[Array, "C T D"], next_tokens: Int[Array, "C T"]
    ) -> PromptLogprobs:
        """Returns the log-probability of each next token, given those before it. One chunk is
        computed after the other, so that the logits of a single one exist at a time. ``hidden``:
        hidden states after the final norm."""

        def of_chunk(arguments: tuple[jax.Array, jax.Array]) -> PromptLogprobs:
            hidden, tokens = arguments
            logits = mask_vocab_padding(self.model.logits(hidden), self.vocab_size)
            log_p = jax.nn.log_softmax(logits, axis=-1)
            top_logprobs, top_tokens = jax.lax.top_k(log_p, MAX_TOP_LOGPROBS)
            logprobs = jnp.take_along_axis(log_p, tokens[:, None], axis=-1)[:, 0]
            return PromptLogprobs(logprobs, top_tokens, top_logprobs)

        return jax.lax.map(of_chunk, (hidden, next_tokens))


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


def _with_undrafted(drafts: Drafts, count: int, rows: SlotRows) -> Drafts:
    """Returns the drafts with ``count`` more requests that have none."""

    def more(array: jax.Array) -> jax.Array:
        return rows.concatenate(array, jnp.zeros((count, *array.shape[1:]), array.dtype))

    return jax.tree.map(more, drafts)


def _at_last(hidden: Hidden, counts: Int[Array, " C"], copies: int) -> Hidden:
    """Returns the hidden state of each chunk's last token, several times: [C, copies, D]."""
    last = jnp.maximum(counts - 1, 0)[:, None, None]

    def pick(x: jax.Array) -> jax.Array:
        one = jnp.take_along_axis(x, last, axis=1)
        return jnp.broadcast_to(one, (len(x), copies, x.shape[2]))

    return Hidden(pick(hidden.pre_norm), pick(hidden.post_norm))


def _with_cache(state: SlotState, cache: LatentKVCache) -> SlotState:
    """Returns the state with the pages and counts of a cache of some of its requests."""
    return dataclasses.replace(state, pool=cache.pool, routing_counts=cache.routing_counts)
