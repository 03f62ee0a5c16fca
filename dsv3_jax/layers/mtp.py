"""The multi-token prediction layer: a decoder layer behind two norms and a projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.block import DecoderLayer
from dsv3_jax.layers.linear import Linear, WeightArgs
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.norm import RMSNorm, norm_dtype
from dsv3_jax.layers.on_mesh import batch_sharded
from dsv3_jax.layers.paged_cache import Form, LayerCache, LayerPages
from dsv3_jax.layers.rope import Rotation


class SharedHead(nnx.Module):
    """The norm before the LM head, which an MTP layer does not share with the model."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        norms = norm_dtype(config, dtype)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=norms)


class MTPLayer(DecoderLayer):
    """Multi-token prediction: from ``h_i`` and token i+1, the hidden state that predicts i+2.

    ``y_i = layer(eh_proj [enorm(embedding of token i+1) | hnorm(h_i)])`` (V3 report, equation 21;
    the checkpoint's order, embedding first). Embedding and LM head are the model's own.
    """

    def __init__(self, config: ModelConfig, **weights: Unpack[WeightArgs]):
        super().__init__(config, dense=False, **weights)
        rngs, dtype = weights["rngs"], weights["dtype"]
        D, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(D, eps=eps, dtype=norm_dtype(config, dtype))
        self.hnorm = RMSNorm(D, eps=eps, dtype=norm_dtype(config, dtype))
        self.eh_proj = Linear(2 * D, D, std=config.initializer_range, rngs=rngs, dtype=dtype)
        self.shared_head = SharedHead(config, dtype=dtype)

    def join(
        self, hidden: Float[Array, "B T D"], next_embedding: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Returns the layer's input, from the hidden state of token i and the embedding of token
        i+1."""
        joined = jnp.concatenate([self.enorm(next_embedding), self.hnorm(hidden)], axis=-1)
        return batch_sharded(self.layout, "eh_proj", self.eh_proj, joined)

    def extend_newest(
        self,
        x: Float[Array, "B T D"],
        rotation: Rotation,
        cache: LayerCache,
        form: Form,
        extend: Callable[..., tuple[Array, LayerPages, RoutingStats | None]],
    ) -> tuple[Float[Array, "B 1 D"], LayerPages, RoutingStats | None]:
        """Does :meth:`extend`, or the function ``extend`` in its place, but only returns the output
        at the last valid token. Of the other tokens the layer computes what it caches. The output
        of a sequence without valid tokens is undefined."""
        newest = newest_positions(cache)
        x_newest, rotation_newest = jax.tree.map(lambda a: select(a, newest), (x, rotation))
        cache_newest = newest_cache(cache, newest)
        # Nothing uses this output, so that the compiler keeps only what the cache needs. The second
        # call writes the newest token's entry again, with the same value.
        _, pages, _ = extend(x, rotation, cache, form)
        return extend(x_newest, rotation_newest, cache_newest._replace(pages=pages), form)


def newest_positions(cache: LayerCache) -> Array:
    """Returns the index [B] of each sequence's last valid token among the new ones, or 0."""
    return jnp.maximum(jnp.sum(cache.valid, axis=1, dtype=jnp.int32) - 1, 0)


def newest_cache(cache: LayerCache, newest: Array) -> LayerCache:
    """Returns the cache of a step that adds only the tokens at ``newest`` [B]."""
    starts, valid = cache.starts + newest, jnp.any(cache.valid, axis=1, keepdims=True)
    return cache._replace(starts=starts, valid=valid)


def select(array: Float[Array, "B T *rest"], newest: Array) -> Float[Array, "B 1 *rest"]:
    """Returns each sequence's value at ``newest`` [B]."""
    index = newest.reshape(-1, *(1,) * (array.ndim - 1))
    return jnp.take_along_axis(array, index, axis=1)
