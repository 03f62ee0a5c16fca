"""The attention kernels compiled for TPUs that are not there, at DeepSeek-V3's sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import mla_decode, mla_prefill
from pallas_kernels.mla_decode import mosaic_tpu as decode_tpu
from tests.pallas_kernels.tpu_topology import (
    compile_for,
    compiled,
    devices,
    every_chip,
    kernels,
    needs_libtpu,
)

pytestmark = [needs_libtpu, pytest.mark.compiles]

shape = jax.ShapeDtypeStruct
DECODE = functools.partial(mla_decode, scale=0.135)
PREFILL = functools.partial(mla_prefill, scale=0.135)


def decode_arrays(B, T, H, *, dtype="bfloat16", context=32768, page=64, width=640):
    pages = shape((B * context // page, page, width), dtype)
    queries = (shape((B, T, H, n), dtype) for n in (512, 64))
    return *queries, pages, shape((B, context // page), jnp.int32), shape((B,), jnp.int32)


def prefill_arrays(B, T, S, H, *, dtype="bfloat16"):
    qkv = (shape((B, n, H, width), dtype) for n, width in ((T, 192), (S, 192), (S, 128)))
    return *qkv, shape((B,), jnp.int32), shape((B,), jnp.int32)


def check_decode(chip, B, T, H, **kwargs):
    """One kernel, to which XLA adds no copy of the pages."""
    arrays = decode_arrays(B, T, H, **kwargs)
    program = compile_for(chip, DECODE, *arrays)
    assert kernels(program) == 1
    pages = arrays[2].size * arrays[2].dtype.itemsize
    used = program.memory_analysis()
    assert used.argument_size_in_bytes >= pages
    assert used.temp_size_in_bytes < pages / 2


@every_chip
def test_decode(chip):
    check_decode(chip, 8, 1, 128)


@pytest.mark.slow
@every_chip
@pytest.mark.parametrize(
    ("B", "T", "H"),
    [(128, 1, 128), (8, 4, 128), (128, 2, 64), (1, 3, 16)],
)
def test_decode_of_other_sizes(chip, B, T, H):
    check_decode(chip, B, T, H)


@pytest.mark.slow
@every_chip
@pytest.mark.parametrize(
    "kwargs",
    [
        {"T": 2, "H": 64, "dtype": "float32"},
        {"T": 3, "H": 5, "dtype": "float32", "page": 8},
        {"T": 32, "H": 128},
        {"T": 1, "H": 128, "context": 163840},
    ],
)
def test_decode_of_other_kinds(chip, kwargs):
    check_decode(chip, B=3, **kwargs)


@every_chip
def test_pages_of_576_columns_are_copied(chip):
    """Into 640: why api.py asks for a multiple of 128."""
    arrays = decode_arrays(8, 1, 128, width=576)
    used = compile_for(chip, DECODE, *arrays).memory_analysis()
    assert used.temp_size_in_bytes > arrays[2].size * arrays[2].dtype.itemsize * 640 / 576


def test_block_tables_fill_smem():
    """The largest accepted block table leaves little of SMEM unused."""
    entries = decode_tpu.MOST_PAGES
    arrays = [*decode_arrays(1, 1, 16)]
    arrays[3] = shape((1, entries), jnp.int32)
    assert kernels(compile_for("v5e", DECODE, *arrays)) == 1


@every_chip
def test_prefill(chip):
    assert kernels(compile_for(chip, PREFILL, *prefill_arrays(1, 4096, 4096, 128))) == 1


@pytest.mark.slow
@every_chip
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((2, 128, 4096, 16), "float32"),
        ((1, 512, 65536, 8), "bfloat16"),  # keys in segments
        ((3, 130, 1208, 5), "bfloat16"),
        ((1, 7, 29, 1), "float32"),
    ],
)
def test_prefill_of_other_sizes(chip, sizes, dtype):
    program = compile_for(chip, PREFILL, *prefill_arrays(*sizes, dtype=dtype))
    assert kernels(program) == 1


@pytest.mark.parametrize(("chip", "chips"), [("v5p", "4x4x8"), ("tpu7x", "4x4x4")])
def test_both_on_a_pod(chip, chips):
    """128 devices: rows over eight, heads over sixteen. ``None`` picks the kernels."""
    mesh = Mesh(np.reshape(devices(chip, chips), (8, 16)), ("data", "tensor"))
    rows, heads = PartitionSpec("data"), PartitionSpec("data", None, "tensor")
    specs = (heads, heads, rows, rows, rows), (heads, heads, heads, rows, rows)

    def both(decode, prefill):
        return DECODE(*decode), PREFILL(*prefill)

    function = jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
    arrays = decode_arrays(64, 2, 128), prefill_arrays(8, 512, 512, 128)
    laid = jax.tree.map(
        lambda x, spec: shape(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), arrays, specs
    )
    assert kernels(compiled(jax.jit(function).lower(*laid))) == 2


@pytest.mark.parametrize(
    ("function", "arrays"),
    [(DECODE, decode_arrays(2, 1, 16)), (PREFILL, prefill_arrays(1, 8, 8, 1))],
)
def test_two_layers_lower_a_kernel_once(function, arrays):
    mesh = Mesh(np.array(devices("v5p")[:1]), ("device",))

    def layers(*arrays):
        return [function(*arrays) for _ in range(2)]

    whole = PartitionSpec()
    mapped = jax.shard_map(layers, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    lowered = jax.jit(mapped).lower(*arrays)
    assert lowered.as_text().count("@tpu_custom_call") == 1
