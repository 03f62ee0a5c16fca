"""The Hopper kernel of sparse_mla_decode and sparse_mla_prefill.

It runs on a GPU, or interpreted with race detection.
"""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, func
from jaxlib.mlir.passmanager import PassManager

from pallas_kernels import (
    dequantize_latent,
    quantize_latent,
    sparse_mla_decode,
    sparse_mla_prefill,
)
from pallas_kernels.mla_decode import merge
from pallas_kernels.sparse_mla_decode import gather, mosaic_gpu
from pallas_kernels.sparse_mla_decode.mosaic_gpu import Work, divide
from tests.pallas_kernels.machine import INTERPRET, ON_GPU, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import TOLERANCES, check, device
from tests.pallas_kernels.sparse_mla_cases import SparseMlaDecodeCases, SparseMlaPrefillCases


@pytest.mark.parametrize("index", [0, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**32 - 1])
def test_the_address_of_an_index_has_64_bits(index):
    """4 sequences of 131,072 tokens with 2,048 indices per token have 2^30 indices: no memory here
    has room for these, so that the compiler computes the address of a constant index."""
    base = 7 << 40
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("load", ([], []))
            with ir.InsertionPoint(function.add_entry_block()):
                i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
                signed = index - (2**32 if index >= 2**31 else 0)
                gather._load(
                    arith.constant(i64, ir.IntegerAttr.get(i64, base)),
                    arith.constant(i32, ir.IntegerAttr.get(i32, signed)),
                )
                func.ReturnOp([])
        PassManager.parse("builtin.module(canonicalize)").run(module.operation)
        (address,) = re.findall(r"%\S+ = arith.constant (\d+) : i64", str(module))
    assert int(address) == base + 4 * index


@contextlib.contextmanager
def planned(work: Work | None):
    """Divides the work in this way, or as planned."""
    with pytest.MonkeyPatch.context() as patch:
        if work:
            patch.setattr(mosaic_gpu, "plan", lambda *sizes: work)
        yield


@functools.cache
def kernel(ctas: int, piece: int | None = None):
    """The back-end with few CTAs, which the interpreter runs one by one.

    Args:
      piece: pairs of key blocks per piece; the default is the plan's.
    """

    def decode(q_latent, q_rope, pages, block_tables, indices, *, scale):
        (B, T, K), work = indices.shape, None
        if not ON_GPU or piece:
            work = divide(B * T, -(-K // 128) * 128, ctas)
        if work and piece:
            pieces = -(-work.pairs // piece)
            work = Work(B * T, work.pairs, pieces, piece, -(-B * T * pieces // ctas))
        with planned(work):
            return mosaic_gpu.sparse_mla_decode(
                q_latent, q_rope, pages, block_tables, indices, scale=scale, interpret=INTERPRET
            )

    return decode


@kernel_runs
class TestMosaicGpu(SparseMlaDecodeCases):
    implementation = staticmethod(kernel(3))
    dtype = "bfloat16"
    widths = (512, 64)
    heads = 8
    # The same as test_ragged_selections, which has more queries than CTAs too.
    test_bfloat16 = None  # pyright: ignore[reportAssignmentType]
    test_many_queries = None  # pyright: ignore[reportAssignmentType]

    @pytest.fixture(autouse=True)
    def _small_gpu(self, monkeypatch):
        """Gives the merge kernel few CTAs, so that each merges several rows as on a GPU."""
        if not ON_GPU:
            monkeypatch.setattr(merge, "multiprocessors", lambda: 1)

    def wide(self, K=620, **kwargs):
        """Five pairs of key blocks, the last not full, of up to ``K`` tokens in pages of 96."""
        return self.random((640, 600, 90), K=K, page=96, max_pages=7, **kwargs)

    def test_pairs_of_key_blocks(self):
        """Pieces follow each other in a CTA."""
        self.check(self.wide())

    @pytest.mark.parametrize(
        ("H", "T", "piece"),
        [
            (8, 1, 2),
            pytest.param(72, 1, 2, marks=pytest.mark.slow),
            pytest.param(64, 2, 5, marks=pytest.mark.slow),
            pytest.param(128, 1, 3, marks=pytest.mark.slow),
        ],
    )
    def test_pieces_are_merged(self, H, T, piece):
        """Three CTAs have pieces of different lengths; tiles of heads that are not full."""
        self.check(self.wide(H=H, T=T), kernel(3, piece))

    @pytest.mark.parametrize(
        ("H", "T", "piece"), [(8, 1, None), pytest.param(72, 2, 2, marks=pytest.mark.slow)]
    )
    def test_float8_cache(self, H, T, piece):
        """Compared with bfloat16 pages of the same values. Unused slots contain NaN."""
        x = self.wide(H=H, T=T)
        pages = jnp.asarray(x.dense.pages, jnp.float32)
        stored = quantize_latent(pages[..., :512], pages[..., 512:])
        values = jnp.concatenate(dequantize_latent(stored, jnp.bfloat16), axis=-1)
        dense = dataclasses.replace(x.dense, pages=np.asarray(values, np.float64))
        want_out, want_lse = dataclasses.replace(x, dense=dense).expected()
        unused = np.isnan(x.dense.pages).any(-1, keepdims=True)
        stored = jnp.where(unused, jnp.uint8(255), stored)
        op = jax.jit(functools.partial(kernel(3, piece), scale=x.dense.scale))
        q_latent, q_rope, _, tables, _ = x.dense.arrays()
        out, lse = op(q_latent, q_rope, stored, tables, x.indices)
        check(np.asarray(out), want_out, TOLERANCES["bfloat16"])
        check(np.ravel(lse), np.ravel(want_lse), TOLERANCES["float32"])

    @pytest.mark.slow
    def test_result_does_not_depend_on_the_place_in_the_batch(self):
        x = self.wide()
        order = [2, 0, 1]
        moved = dataclasses.replace(
            x,
            dense=dataclasses.replace(
                x.dense,
                q_latent=x.dense.q_latent[order],
                q_rope=x.dense.q_rope[order],
                block_tables=x.dense.block_tables[order],
            ),
            indices=x.indices[order],
        )
        for got, want in zip(self.run(moved), self.run(x), strict=True):
            np.testing.assert_array_equal(got, want[order])


def prefill_kernel(q_latent, q_rope, latents, indices, *, scale):
    """The back-end with two CTAs."""
    (B, T, _), work = indices.shape, None
    if not ON_GPU:
        work = divide(B * T, 128, 2)
    with planned(work):
        return mosaic_gpu.sparse_mla_prefill(
            q_latent, q_rope, latents, indices, scale=scale, interpret=INTERPRET
        )


@kernel_runs
class TestPrefillMosaicGpu(SparseMlaPrefillCases):
    implementation = staticmethod(prefill_kernel)
    dtype = "bfloat16"
    widths = (512, 64)
    heads = 8
    tokens = 9

    @pytest.mark.slow
    def test_gradient_is_the_reference_s(self):
        x, latents = self.inputs()
        arrays = [
            device(a, self.dtype)
            for a in (x.dense.q_latent, x.dense.q_rope, np.nan_to_num(latents))
        ]

        def gradients(op):
            def loss(*arrays):
                return jnp.sum(op(*arrays, jax.device_put(x.indices), scale=0.3)[0] ** 2)

            return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)

        ours = gradients(prefill_kernel)
        reference = functools.partial(sparse_mla_prefill, implementation="reference")
        for got, want in zip(ours, gradients(reference), strict=True):
            got, want = (np.asarray(a, np.float64).reshape(1, -1) for a in (got, want))
            check(got, want, 4 * TOLERANCES["bfloat16"])


@pytest.mark.parametrize(("queries", "ctas"), [(1, 66), (33, 66), (40, 66), (200, 132), (7, 3)])
def test_division_covers_every_pair_once(queries, ctas):
    work = divide(queries, 2048, ctas)
    numbers = np.arange(work.total + 1)
    first = np.array([int(work.first_pair(jnp.int32(n))) for n in numbers])
    assert first[0] == 0
    assert first[-1] == queries * 16
    assert ((np.diff(first) > 0) & (np.diff(first) <= work.piece)).all()
    assert work.ctas <= ctas
    assert (work.pieces > 1) == (queries < 34)


def arrays(T=1, H=8, widths=(512, 64), dtype="bfloat16", width=None, B=2):
    C, R = widths
    return (
        jnp.ones((B, T, H, C), dtype),
        jnp.ones((B, T, H, R), dtype),
        jnp.ones((B * 4, 64, width or C + R), dtype),
        jnp.zeros((B, 4), jnp.int32),
        jnp.zeros((B, T, 128), jnp.int32),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "takes bfloat16, got float32"),
        ({"widths": (256, 64)}, r"got \(256, 64\)"),
        ({"width": 572}, "got 572"),
        ({"H": 12}, "multiple of 8 heads, got 12"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.sparse_mla_decode(*arrays(**changes), scale=0.1, interpret=object())


@off_gpu
def test_no_gpu():
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs, this is cpu"):
        sparse_mla_decode(*arrays(), scale=0.1, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("T", "H"),
    [(1, 16), pytest.param(2, 128, marks=pytest.mark.slow)],
)
def test_lowers_for_cuda(T, H, monkeypatch):
    """Lowering checks shared memory size and register layouts without a GPU."""
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    f = jax.jit(functools.partial(mosaic_gpu.sparse_mla_decode, scale=0.1))
    text = f.trace(*arrays(T, H)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
