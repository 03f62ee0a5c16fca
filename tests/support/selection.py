"""Tokens that an indexer selects."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax.layers.paged_cache import PageShard
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.layers.sparse_attention import SparseAttention


def selected_tokens(attention: SparseAttention, x: jax.Array, rotation: Rotation) -> list[set[int]]:
    """Returns the tokens that each query of one sequence selects, from the attention's input."""

    @jax.jit
    def select(state: nnx.State, x: jax.Array, rotation: Rotation) -> jax.Array:
        module = nnx.merge(graph, state)
        queries = module.indexer.queries(x, module.query_latent(x), rotation)
        entries = module.indexer.whole_pages(x, rotation)
        start, table = jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32)
        return module.indexer.select(queries, entries, table, start, PageShard(x.shape[1]))

    graph, state = nnx.split(attention)
    return [set(row[row >= 0].tolist()) for row in np.asarray(select(state, x, rotation))[0]]
