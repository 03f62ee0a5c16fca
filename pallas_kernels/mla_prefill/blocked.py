"""mla_prefill and its gradient in plain JAX, by blocks of queries and keys.

Memory is linear in the number of tokens: the scores of one block of queries with one block of keys
exist at a time. Blocks of keys that no query of a block sees are not computed. Sums are float32,
and matmuls take operands of the dtype of the arguments, as in FlashAttention.

The gradient needs the result ``out`` and its log-sum-exp, not the probabilities (FlashAttention-2,
algorithm 2). With ``delta = rowsum(out * d_out) - d_lse``, and sums over the visible pairs::

    p    = exp(scale * q k^T - lse)
    d_v  = p^T d_out
    d_s  = p * (d_out v^T - delta)
    d_q  = scale * d_s k
    d_k  = scale * d_s^T q
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

LONGEST_BLOCK, SHORTEST_BLOCK = 512, 128  # queries and keys
MOST_SCORE_BYTES = 1 << 28  # float32 scores of a block, of all sequences and heads
_NO_SCORE = -1e30  # a maximum over no scores; finite, because -inf - -inf is NaN

Heads = Float[Array, "blocks B H block width"]


def mla_prefill(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    first_keys: Int[Array, "B T"] | None = None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    """Implements :func:`pallas_kernels.mla_prefill`, without its gradient."""
    block = _Tiles.of(q, k, starts, lengths, first_keys).block
    if 0 in q.shape or max(q.shape[1], k.shape[1]) <= block:
        raise NotImplementedError(
            f"takes several blocks, here of {block} tokens, got {q.shape} and {k.shape}; the"
            " reference computes a single one"
        )
    return attend(q, k, v, starts, lengths, first_keys, scale=scale)


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"] | None,
    lengths: Int[Array, " B"] | None,
    first_keys: Int[Array, "B T"] | None = None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    """Returns out and lse, for any number of queries and keys."""
    tiles = _Tiles.of(q, k, starts, lengths, first_keys)
    keys, values = (tiles.split(tiles.without_padding(x)) for x in (k, v))

    def attend_block(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, q = inputs

        def add(j: jax.Array, sums: _Softmax) -> _Softmax:
            scores = _product("bhtk,bhsk->bhts", q, keys[j]) * scale
            return sums.add(jnp.where(tiles.mask(i, j), scores, -jnp.inf), values[j])

        first, end = tiles.key_blocks_of(i)
        sums = lax.fori_loop(first, end, add, _Softmax.zeros(q, v.shape[-1]))
        out, lse = sums.result()
        return out.astype(q.dtype), lse

    blocks, T = tiles.split(q), q.shape[1]
    out, lse = lax.map(attend_block, (jnp.arange(len(blocks)), blocks))
    return tiles.join(out, T), tiles.join(lse[..., None], T)[..., 0]


def gradients(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"] | None,
    lengths: Int[Array, " B"] | None,
    first_keys: Int[Array, "B T"] | None,
    out: Float[Array, "B T H V"],
    lse: Float32[Array, "B T H"],
    d_out: Float[Array, "B T H V"],
    d_lse: Float32[Array, "B T H"] | None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S H K"], Float[Array, "B S H V"]]:
    """Returns the gradients of q, k and v. ``d_lse`` is None if lse has no gradient.

    Keys and values past a sequence's length have gradients of zero.
    """
    tiles = _Tiles.of(q, k, starts, lengths, first_keys)
    k, v = tiles.without_padding(k), tiles.without_padding(v)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = delta if d_lse is None else delta - d_lse
    lse = jnp.where(lse == -jnp.inf, 0.0, lse)  # queries that see no key: all is masked
    queries, d_outs = tiles.split(q), tiles.split(d_out)
    lses, deltas = tiles.split(lse[..., None]), tiles.split(delta[..., None])

    def of_keys(
        d_queries: jax.Array, inputs: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns the gradients of a block of keys and values, and adds those of all queries."""
        j, k, v = inputs

        def add(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            d_queries, d_k, d_v = sums
            q, d_out = queries[i], d_outs[i]
            scores = _product("bhtk,bhsk->bhts", q, k) * scale
            p = jnp.where(tiles.mask(i, j), jnp.exp(scores - lses[i]), 0.0)
            d_p = _product("bhtv,bhsv->bhts", d_out, v)
            d_s = (p * (d_p - deltas[i])).astype(q.dtype)
            d_v += _product("bhts,bhtv->bhsv", p.astype(v.dtype), d_out)
            d_k += _product("bhts,bhtk->bhsk", d_s, q)
            return d_queries.at[i].add(_product("bhts,bhsk->bhtk", d_s, k)), d_k, d_v

        zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        first, end = tiles.query_blocks_of(j)
        d_queries, d_k, d_v = lax.fori_loop(first, end, add, (d_queries, *zeros))
        return d_queries, ((d_k * scale).astype(k.dtype), d_v.astype(v.dtype))

    keys, values = tiles.split(k), tiles.split(v)
    d_queries, (d_keys, d_values) = lax.scan(
        of_keys,
        jnp.zeros(queries.shape, jnp.float32),
        (jnp.arange(len(keys)), keys, values),
    )
    T, S = q.shape[1], k.shape[1]
    d_q = tiles.join((d_queries * scale).astype(q.dtype), T)
    return d_q, tiles.join(d_keys, S), tiles.join(d_values, S)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Blocks of queries and of keys, and which queries see which keys."""

    block: int
    queries: int
    keys: int
    starts: jax.Array | None
    lengths: jax.Array | None
    first_keys: jax.Array | None
    """First key that each query sees, [blocks, B, block] with repeated last queries."""

    @classmethod
    def of(
        cls,
        q: jax.Array,
        k: jax.Array,
        starts: jax.Array | None,
        lengths: jax.Array | None,
        first_keys: jax.Array | None,
    ) -> _Tiles:
        """Chooses the fewest blocks whose scores fit in MOST_SCORE_BYTES, with little padding."""
        B, T, H, _ = q.shape
        longest, S = LONGEST_BLOCK, k.shape[1]
        while longest > SHORTEST_BLOCK and B * H * longest**2 * 4 > MOST_SCORE_BYTES:
            longest //= 2
        tokens = max(T, S, 1)
        count = -(-tokens // longest)
        block = 8 * -(-tokens // (8 * count))
        if first_keys is not None:
            first_keys = jnp.pad(first_keys, ((0, 0), (0, -T % block)), mode="edge")
            first_keys = first_keys.reshape(B, -1, block).swapaxes(0, 1)
        return cls(block, T, S, starts, lengths, first_keys)

    def mask(self, i: jax.Array, j: jax.Array) -> Bool[Array, "#B 1 block block"]:
        """Returns which queries of block i see which keys of block j."""
        offsets = jnp.arange(self.block)
        last = self.block * i + offsets  # key that each query sees
        last = last[None] if self.starts is None else self.starts[:, None] + last
        s, ends = self.block * j + offsets, jnp.asarray(self.keys)
        ends = ends[None] if self.lengths is None else jnp.minimum(self.lengths, ends)
        visible = (s <= last[..., None]) & (s < ends[:, None, None])
        if self.first_keys is not None:
            visible &= s >= self.first_keys[i][..., None]
        return visible[:, None]

    def key_blocks_of(self, i: jax.Array) -> tuple[jax.Array | int, jax.Array]:
        """Returns the first block of keys that queries of block i see, and the end of all."""
        visible = jnp.minimum(self._start() + self.block * (i + 1), self._end())
        end = jnp.clip(-(-visible // self.block), 0, -(-self.keys // self.block))
        if self.first_keys is None:
            return 0, end
        return jnp.maximum(jnp.min(self.first_keys[i]) // self.block, 0), end

    def query_blocks_of(self, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the first block of queries that see keys of block j, and the end of all."""
        count = -(-self.queries // self.block)
        first = jnp.clip((self.block * j - self._start()) // self.block, 0, count)
        end = jnp.asarray(count)
        if self.first_keys is not None:
            sees = jnp.min(self.first_keys, axis=(1, 2)) < self.block * (j + 1)
            end = jnp.max(jnp.where(sees, jnp.arange(1, count + 1), 0))
        return jnp.where(self.block * j < self._end(), first, count), end

    def _start(self) -> jax.Array:
        return jnp.asarray(0) if self.starts is None else jnp.max(self.starts)

    def _end(self) -> jax.Array:
        keys = jnp.asarray(self.keys)
        return keys if self.lengths is None else jnp.minimum(keys, jnp.max(self.lengths))

    def without_padding(self, x: Float[Array, "B S H width"]) -> Float[Array, "B S H width"]:
        """Zeroes what is past a sequence's length. It may be NaN, and 0 * NaN is NaN."""
        if self.lengths is None:
            return x
        valid = jnp.arange(self.keys) < self.lengths[:, None]
        return jnp.where(valid[..., None, None], x, 0)

    def split(self, x: Float[Array, "B n H width"]) -> Heads:
        """Returns the blocks of tokens, the last one padded with zeros."""
        B, n, H, width = x.shape
        x = jnp.pad(x, ((0, 0), (0, -n % self.block), (0, 0), (0, 0)))
        return x.reshape(B, -1, self.block, H, width).transpose(1, 0, 3, 2, 4)

    def join(self, blocks: Heads, n: int) -> Float[Array, "B n H width"]:
        """Inverts :meth:`split`."""
        _, B, H, _, width = blocks.shape
        return blocks.transpose(1, 0, 3, 2, 4).reshape(B, -1, H, width)[:, :n]


class _Softmax(NamedTuple):
    """Sums of an online softmax over blocks of keys."""

    maximum: Float32[Array, "B H t 1"]
    total: Float32[Array, "B H t 1"]
    values: Float32[Array, "B H t V"]

    @classmethod
    def zeros(cls, q: Float[Array, "B H t K"], width: int) -> _Softmax:
        """Returns the sums over no keys, for values ``width`` wide."""
        one = (*q.shape[:-1], 1)
        return cls(
            jnp.full(one, _NO_SCORE, jnp.float32),
            jnp.zeros(one, jnp.float32),
            jnp.zeros((*q.shape[:-1], width), jnp.float32),
        )

    def add(self, scores: Float32[Array, "B H t s"], values: Float[Array, "B H s V"]) -> _Softmax:
        """Adds a block of keys."""
        maximum = jnp.maximum(self.maximum, jnp.max(scores, axis=-1, keepdims=True))
        p, factor = jnp.exp(scores - maximum), jnp.exp(self.maximum - maximum)
        total = self.total * factor + jnp.sum(p, axis=-1, keepdims=True)
        product = _product("bhts,bhsv->bhtv", p.astype(values.dtype), values)
        return _Softmax(maximum, total, self.values * factor + product)

    def result(self) -> tuple[Float32[Array, "B H t V"], Float32[Array, "B H t"]]:
        """Returns the mean of the values, and the log-sum-exp of the scores."""
        safe = jnp.where(self.total == 0.0, 1.0, self.total)
        lse = jnp.where(self.total == 0.0, -jnp.inf, jnp.log(safe) + self.maximum)
        return self.values / safe, lse[..., 0]
