"""DeepSeek-V3's attention layer with its cache, compiled for TPUs without having one."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dsv3_jax import presets
from dsv3_jax.kv_cache import CacheSpec, LatentKVCache
from dsv3_jax.layers.attention import MultiHeadLatentAttention
from dsv3_jax.layers.paged_cache import LayerCache
from dsv3_jax.layers.rope import rotation_at
from tests.pallas_kernels.tpu_topology import (
    compiled,
    kernels,
    needs_libtpu,
    one_device,
)

CONFIG, BATCH, CONTEXT = presets.DEEPSEEK_V3, 16, 32768


def program(form, T, *, steps=1, platform="tpu"):
    """Compiles ``steps`` steps of T tokens per sequence, with a donated cache; returns its pages
    too."""

    def layer():
        rngs = nnx.Rngs(0)
        return MultiHeadLatentAttention(CONFIG, rngs=rngs, dtype=jnp.bfloat16, quantization=None)

    graph, state = nnx.split(nnx.eval_shape(layer))

    def empty():
        spec = CacheSpec.of_config(CONFIG, jnp.bfloat16)
        cache = LatentKVCache.init(spec, BATCH, CONTEXT, platform=platform)
        return cache.block_tables, cache.lengths, cache.pool.layers[0]

    def run(state, x, tables, starts, pages):
        attention, valid = nnx.merge(graph, state), jnp.ones((BATCH, T), jnp.bool_)

        def step(i, carry):
            x, pages = carry
            rotation = rotation_at(CONFIG, starts[:, None] + i * T + jnp.arange(T))
            cache = LayerCache(pages, tables, starts + i * T, valid)
            return attention.extend_batches(x, rotation, [cache], [form])

        return jax.lax.fori_loop(0, steps, step, (x, pages))

    mesh, replicated = one_device("v5p"), PartitionSpec()
    x = jax.ShapeDtypeStruct((BATCH, T, CONFIG.hidden_size), jnp.bfloat16)
    arrays = state, x, *jax.eval_shape(empty)
    arguments = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, replicated)),
        arrays,
    )
    run = jax.shard_map(run, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False)
    return compiled(jax.jit(run, donate_argnums=4).lower(*arguments)), arguments[-1]["latent"]


def copies(compiled_program, pages) -> int:
    """Counts the copies of all pages that XLA inserted."""
    dimensions = ",".join(map(str, pages.shape))
    return len(re.findall(rf"= bf16\[{dimensions}\]\S* copy\(", compiled_program.as_text()))


@pytest.mark.compiles
@needs_libtpu
def test_decode_writes_and_reads_the_cache_in_place():
    decode, pages = program("absorbed", 2, steps=8)
    assert kernels(decode) == 1
    assert copies(decode, pages) == 0
    assert decode.memory_analysis().alias_size_in_bytes >= 2 * pages.size


@pytest.mark.compiles
@needs_libtpu
def test_a_narrower_cache_is_copied():
    """XLA copies unpadded pages before and after the loop, so a TPU's pages are padded."""
    decode, pages = program("absorbed", 1, steps=8, platform="gpu")
    assert copies(decode, pages) == 2
    assert decode.memory_analysis().temp_size_in_bytes > 2 * pages.size


@pytest.mark.compiles
@needs_libtpu
@pytest.mark.slow
def test_prefill():
    """A chunk after cached tokens attends to itself and to blocks of the cache."""
    prefill, pages = program("expanded", 64)
    assert kernels(prefill) == 2
    assert copies(prefill, pages) == 0
