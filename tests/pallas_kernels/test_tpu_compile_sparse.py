"""Sparse attention compiled for TPUs that are not there, at DeepSeek-V3.2's sizes, by XLA alone."""

import functools

import jax
import jax.numpy as jnp
import pytest

from dsv3_jax.layers.paged_cache import CachedArray, write_scaled
from pallas_kernels import sparse_index, sparse_mla_decode, sparse_mla_prefill, top_k
from pallas_kernels.top_k.threshold import CHUNK_BYTES
from tests.pallas_kernels.tpu_topology import compile_for, needs_libtpu

pytestmark = [needs_libtpu, pytest.mark.compiles, pytest.mark.slow]
CHIP = "v5p"

shape = jax.ShapeDtypeStruct
BF16, I32, F32 = jnp.bfloat16, jnp.int32, jnp.float32
CONTEXT, PAGE = 32768, 64


def queries(B, T, H):
    return shape((B, T, H, 512), BF16), shape((B, T, H, 64), BF16)


def cache(B, dtype=BF16, width=640):
    pages = shape((B * CONTEXT // PAGE, PAGE, width), dtype)
    return pages, shape((B, CONTEXT // PAGE), I32)


def selected(B, T, K=2048):
    return shape((B, T, K), I32)


def index(B, T, dtype):
    """Arguments of sparse_index with 64 heads."""
    pages, tables = cache(B, dtype, 128)
    if dtype != BF16:
        pages = shape((pages.shape[0], PAGE + 8, 128), jnp.uint8)
    return shape((B, T, 64, 128), dtype), shape((B, T, 64), F32), pages, tables, shape((B,), I32)


def check(program, most_bytes):
    """The program fits: it makes no copy of the cache, nor of what it reads of it at once."""
    assert program.memory_analysis().temp_size_in_bytes < most_bytes


def test_sparse_decode():
    f = functools.partial(sparse_mla_decode, scale=0.135)
    check(compile_for(CHIP, f, *queries(8, 1, 128), *cache(8), selected(8, 1)), 2**29)


def test_sparse_prefill():
    f = functools.partial(sparse_mla_prefill, scale=0.135)
    latents = shape((1, CONTEXT, 576), BF16)
    check(compile_for(CHIP, f, *queries(1, 512, 128), latents, selected(1, 512)), 2**30)


@pytest.mark.parametrize("dtype", [BF16, jnp.float8_e4m3fn])
def test_index(dtype):
    f = functools.partial(sparse_index, page_size=None if dtype == BF16 else PAGE)
    check(compile_for(CHIP, f, *index(8, 2, dtype)), 2**28)


def test_float8_keys_take_144_bytes_a_token():
    """132 of them are keys and scales; pages of 66 rows are padded to 72. XLA pads no more, and a
    step that writes and reads them copies neither."""
    B, P = 8, 8 * CONTEXT // PAGE
    q, weights, pages, tables, lengths = index(B, 1, jnp.float8_e4m3fn)

    def step(pages, q, weights, tables, lengths, new):
        where = tables, lengths[:, None] - 1, jnp.ones((B, 1), bool)
        pages = write_scaled(pages, *where, new, PAGE)
        return pages, sparse_index(q, weights, pages, tables, lengths, page_size=PAGE)

    alone = compile_for(CHIP, lambda pages: pages[0], pages)
    arguments = alone.memory_analysis().argument_size_in_bytes
    spec = CachedArray(128, jnp.uint8, is_scaled=True)
    assert pages.shape[1:] == spec.page_shape(PAGE, "tpu")
    assert 144 <= arguments / (P * PAGE) < 145
    new = shape((B, 1, 132), jnp.uint8)
    program = compile_for(CHIP, step, pages, q, weights, tables, lengths, new)
    memory = program.memory_analysis()
    # The results do not overwrite the arguments here, but are no temporary arrays either.
    assert memory.temp_size_in_bytes < 8 * 4 * B * CONTEXT


def test_a_selection_takes_the_scores_and_little_else():
    """``dsv3_jax.plan.workspace`` counts the scores and ``CHUNK_BYTES``."""

    def select(*arrays):
        return top_k(sparse_index(*arrays), 2048)

    memory = compile_for(CHIP, select, *index(1, 512, BF16)).memory_analysis()
    assert 0 < memory.temp_size_in_bytes - 4 * 512 * CONTEXT < CHUNK_BYTES


def test_top_k():
    f = functools.partial(top_k, k=2048)
    check(compile_for(CHIP, f, shape((8, 1, 8192), F32)), 2**28)
