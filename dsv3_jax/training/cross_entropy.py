"""Losses of the LM head, with the logits of some positions of every sequence at a time.

The logits of all tokens would be the largest array of a training step: 10.7 GB in float32 for
16,384 tokens of Moonlight's vocabulary, and as much again for their gradient. So a loss has its own
gradient, computed in the forward pass, chunk after chunk: the logits are one matmul, in the dtype
of the hidden states; log-sum-exp and softmax are float32; the gradient by the logits, rounded to
the same dtype, is multiplied by the head and by the hidden states. The gradient of the head is
summed over the chunks in float32. Both gradients are multiplied by the loss's own cotangent, a
scalar, and then rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from dsv3_jax.layers.linear import Linear
from dsv3_jax.layers.on_mesh import apply, on_mesh
from pallas_kernels import cross_entropy
from pallas_kernels.dispatch import Implementation
from pallas_kernels.matmul import sum_dtype
from sharding import Layout

LOGITS_BYTES = 3 << 30
"""Largest number of bytes of logits in a chunk, per device.

Each chunk but the first reads and writes the sum of the head's gradient (1.3 GB for Moonlight), so
that few are faster. This takes 16,384 of Moonlight's tokens in two chunks in bfloat16."""


class Term(NamedTuple):
    """A loss of some positions as a function of their logits, and its gradient."""

    nats: Float32[Array, "B S"]
    best: Int[Array, "B S"]
    """The most probable token."""
    gradient: Float[Array, "B S W"] | None
    """The gradient of the weighted sum of ``nats`` by the logits, in their dtype, if there are
    weights."""


Project = Callable[[jax.Array], jax.Array]
"""Returns the logits of hidden states [B, S, D]."""
TermOf = Callable[[Project, jax.Array, jax.Array, jax.Array | None, Implementation], Term]
"""Returns the loss of hidden states [B, S, D] and another array [B, S, ...], with float32 weights
[B, S] of its gradient or None, by a back-end of :func:`pallas_kernels.cross_entropy`."""


def next_token(
    project: Project,
    hidden: Float[Array, "B S D"],
    targets: Int[Array, "B S"],
    weights: Float32[Array, "B S"] | None = None,
    implementation: Implementation = None,
) -> Term:
    """Returns ``-log p`` of the targets."""
    logits = project(hidden)
    best = jnp.argmax(logits, axis=-1)
    if weights is None:
        target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
        return Term(total - target_logits.astype(jnp.float32), best, None)
    rows = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), weights.reshape(-1)
    nats, gradient = cross_entropy(*rows, implementation=implementation)
    return Term(nats.reshape(targets.shape), best, gradient.reshape(logits.shape))


def divergence(
    project: Project,
    hidden: Float[Array, "B S D"],
    main: Float[Array, "B S D"],
    weights: Float32[Array, "B S"] | None = None,
    implementation: Implementation = None,
) -> Term:
    """Returns ``KL(p || q)``, where q is the distribution of ``hidden`` and p that of ``main``, a
    constant. It has one implementation."""
    del implementation
    logits = project(hidden)
    log_p, log_q = (
        jax.nn.log_softmax(each.astype(jnp.float32))
        for each in (jax.lax.stop_gradient(project(main)), logits)
    )
    nats, gradient = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1), None
    if weights is not None:
        gradient = (jnp.exp(log_q) - jnp.exp(log_p)) * weights[..., None]
        gradient = gradient.astype(logits.dtype)
    return Term(nats, jnp.argmax(logits, axis=-1), gradient)


class LossHead:
    """The LM head of a model together with its losses.

    Args:
      lm_head: a :class:`~dsv3_jax.layers.linear.Linear`, or any module that replaces it. The losses
        of such a module compute all logits at once, and their gradient is JAX's.
      layout: mesh layout of the model, or None.
    """

    def __init__(self, lm_head: Any, layout: Layout | None = None):
        self._lm_head, self._layout = lm_head, layout

    def sum(
        self,
        term_of: TermOf,
        hidden: Float[Array, "B T D"],
        other: Array,
        mask: Bool[Array, "B T"],
    ) -> tuple[Float32[Array, ""], Int[Array, "B T"]]:
        """Returns the sum of a loss over the positions in ``mask``, and the most probable token of
        every position. The gradient is that by ``hidden`` and the head.

        Args:
          hidden: hidden states after the norm.
          other: the last argument of ``term_of``.
        """
        if not isinstance(self._lm_head, Linear):  # replaced
            project = functools.partial(apply, self._lm_head, out_dtype=jnp.float32)
            nats, best, _ = term_of(project, hidden, other, None, None)
            return jnp.sum(nats * mask), best
        layout, dtype = self._layout, hidden.dtype
        (B, T, _), W = hidden.shape, self._lm_head.weight.shape[0]
        if layout is not None:
            B, W = B // layout.num_shards("batch"), W // layout.num_shards("vocab")
            T //= layout.num_shards("tokens")
        size = chunk_size(T, B * W * dtype.itemsize, LOGITS_BYTES)
        is_partitioned = layout is not None and not layout.fsdp_axes
        # XLA partitions the operations, but no kernel.
        implementation = "reference" if is_partitioned else None
        summed = functools.partial(_summed, (term_of, size, dtype, implementation))
        if layout is None or is_partitioned:
            return summed(self._lm_head.dense(dtype), hidden, other, mask)

        def body(lm_head: Linear, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            total, best = summed(lm_head.dense(dtype), *arrays)
            return layout.psum(total, "batch", "tokens"), best

        batch = layout.sequences_spec(hidden.shape[1])
        specs = (batch, batch, batch), (PartitionSpec(), batch)
        return on_mesh(layout, self._lm_head, body, *specs, ("lm_head",))(hidden, other, mask)


def token_nats(
    project: Project,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    vocabulary: int,
    limit: int,
) -> Float32[Array, "B T"]:
    """Returns ``-log p`` of each target, with float32 logits.

    Args:
      limit: largest number of bytes of logits in a chunk.
    """
    size = chunk_size(hidden.shape[1], 4 * len(hidden) * vocabulary, limit)
    return _evaluate(next_token, size, project, hidden, targets)[0]


def chunk_size(positions: int, position_bytes: int, limit: int) -> int:
    """Returns the number of positions in a chunk, which has at most ``limit`` bytes or one
    position. The number of chunks is a power of two, so that chunks of a long sequence divide it.
    """
    size = positions
    chunks = 1
    while size > 1 and size * position_bytes > limit:
        chunks *= 2
        size = -(-positions // chunks)
    return size


def _evaluate(
    term_of: TermOf, size: int, project: Project, hidden: jax.Array, other: jax.Array
) -> tuple[Float32[Array, "B T"], Int[Array, "B T"]]:
    """Returns the loss and the most probable token of every position."""

    def chunk(arrays: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return term_of(project, *arrays, None, None)[:2]

    T = hidden.shape[1]
    if size >= T:
        return chunk((hidden, other))
    chunks = jax.lax.map(chunk, (_split(hidden, size), _split(other, size)))
    return _joined(chunks[0], T), _joined(chunks[1], T)


_Settings = tuple[TermOf, int, jnp.dtype, Implementation]
"""The loss, positions per chunk, dtype of the hidden states, and back-end of the loss."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(
    settings: _Settings,
    weight: Float[Array, "W D"],
    hidden: Float[Array, "B T D"],
    other: Array,
    mask: Bool[Array, "B T"],
) -> tuple[Float32[Array, ""], Int[Array, "B T"]]:
    """Does :meth:`LossHead.sum`. Without a gradient, logits are float32, as in inference."""
    term_of, size, *_ = settings
    project = functools.partial(_logits, weight, jnp.float32)
    nats, best = _evaluate(term_of, size, project, hidden, other)
    return jnp.sum(nats * mask), best


def _logits(weight: jax.Array, dtype: Any, hidden: jax.Array) -> Float[Array, "B S W"]:
    return jnp.einsum("bsd,wd->bsw", hidden, weight, preferred_element_type=dtype)


def _forward(
    settings: _Settings, weight: jax.Array, hidden: jax.Array, other: jax.Array, mask: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    (term_of, size, dtype, implementation), T, f32 = settings, hidden.shape[1], jnp.float32

    def project(hidden: jax.Array) -> jax.Array:
        return _logits(weight, sum_dtype(dtype), hidden).astype(dtype)

    def chunk(arrays: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        hidden, other, mask = arrays
        weights = mask.astype(f32)
        nats, best, d_logits = term_of(project, hidden, other, weights, implementation)
        d_hidden = jnp.einsum("bsw,wd->bsd", d_logits, weight, preferred_element_type=f32)
        d_chunk = jnp.einsum("bsw,bsd->wd", d_logits, hidden, preferred_element_type=f32)
        return d_chunk, (nats, best, d_hidden)

    def add(d_weight: jax.Array, arrays: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        d_chunk, results = chunk(arrays)
        return d_weight + d_chunk, results

    arrays = tuple(_split(each, size) for each in (hidden, other, mask))
    # The sum does not begin with zeros, which would be written and read. With the barrier, the
    # first chunk's logits are no longer in memory when the others are computed.
    begun = chunk(tuple(each[0] for each in arrays)), tuple(each[1:] for each in arrays)
    (d_weight, first), rest = jax.lax.optimization_barrier(begun)
    d_weight, others = jax.lax.scan(add, d_weight, rest)
    chunks = (jnp.concatenate([one[None], some]) for one, some in zip(first, others, strict=True))
    nats, best, d_hidden = (_joined(each, T) for each in chunks)
    return (jnp.sum(nats * mask), best), (d_weight, d_hidden)


def _backward(
    settings: _Settings, residuals: tuple[jax.Array, jax.Array], cotangents: Any
) -> tuple[jax.Array | None, ...]:
    *_, dtype, _ = settings
    d_weight, d_hidden = ((cotangents[0] * each).astype(dtype) for each in residuals)
    return d_weight, d_hidden, None, None


_summed.defvjp(_forward, _backward)


def _split(x: Array, size: int) -> Array:
    """Returns chunks of ``size`` positions of x [B, T, ...], padded with zeros:
    [chunks, B, size, ...]."""
    padding = ((0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2))
    x = jnp.pad(x, padding)
    return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)


def _joined(chunks: Array, positions: int) -> Array:
    """Reverses :func:`_split`."""
    x = jnp.moveaxis(chunks, 0, 1)
    return x.reshape(len(x), -1, *x.shape[3:])[:, :positions]
