"""Rope of a block of results: eight neighbouring numbers of each token, which are four pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.decoder_layer.vectors import token_and_number
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.ir import REF, array, asm, const, i64, inline
from pallas_kernels.route.lanes import LANES, LAYOUT, SHAPE, filled, load, thread_index


def store_rotated(
    ref: Any, row_of: Callable[[Any], Any], first: int, pair: jax.Array, block: jax.Array,
    cos_g: Any, sin_g: Any, tokens: int, interpret: Any,
) -> None:  # fmt: skip
    """Rotates a block's pairs and stores them: the first numbers of all pairs come first.

    A whole warpgroup calls it.

    Args:
      ref: [rows, columns] in global memory.
      row_of: function from tokens to their rows, negative for those that are not stored.
      first: column of the first pair's first number.
      pair: number of the block's first pair.
      block: see :mod:`pallas_kernels.decoder_layer.vectors`.
      cos_g, sin_g: float32 [M, R / 2].
    """
    half = cos_g.shape[1]
    if interpret is not None:
        pairs = block.reshape(-1)[:64].reshape(8, 4, 2)
        for t in range(tokens):
            cos, sin = (each[t, pl.ds(pair, 4)] for each in (cos_g, sin_g))
            one, two = pairs[t, :, 0], pairs[t, :, 1]
            row = row_of(t)

            @when(row >= 0)
            def _(row: Any = row, one: Any = one, two: Any = two, cos: Any = cos, sin: Any = sin):
                ref[row, pl.ds(first + pair, 4)] = (one * cos - two * sin).astype(ref.dtype)
                ref[row, pl.ds(first + half + pair, 4)] = (two * cos + one * sin).astype(ref.dtype)

        return
    token, number = token_and_number()
    exists = (token < tokens) & (thread_index(0) < 2)
    token = jnp.minimum(token, tokens - 1)
    own = lax.shift_right_logical(number, filled(1)) + pair
    is_second = jnp.bitwise_and(number, 1)
    cos, sin = (load(each, token * half + own, LANES, None) for each in (cos_g, sin_g))
    other = _neighbour(block)
    rotated = block * cos + jnp.where(is_second == 1, other, -other) * sin
    row = jnp.where(exists, row_of(token), -1)
    _store(ref, row, own + first + is_second * half, rotated)


def _neighbour(block: jax.Array) -> jax.Array:
    """Returns the other number of each thread's pair."""

    @inline(LAYOUT, returns=plgpu.ShapeDtypeStruct(SHAPE, jnp.float32, layout=LAYOUT))
    def exchange(block: Any) -> Any:
        f32, text = ir.F32Type.get(), "shfl.sync.bfly.b32 $0, $1, 1, 31, 0xffffffff;"
        other = asm(text, "=f,f", _only(block), result=f32, effects=True)
        return array([vector.broadcast(ir.VectorType.get((1,), f32), other)], SHAPE, LAYOUT)

    return exchange(block)


def _store(ref: Any, row: jax.Array, column: jax.Array, values: jax.Array) -> None:
    """Sets ``ref[row, column]`` where the row is not negative. A cache may have 2^31 numbers."""
    itemsize, width = jnp.dtype(ref.dtype).itemsize, ref.shape[1]

    @inline(REF, LAYOUT, LAYOUT, LAYOUT)
    def store(ref: Any, row: Any, column: Any, values: Any) -> None:
        text = """{
            .reg .pred there; .reg .b16 low;
            setp.ge.s32 there, $1, 0;
            cvt.rn.bf16.f32 low, $2;
            @there st.global.b16 [$0], low;
        }"""
        address = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(ref))
        for index, size in ((row, width * itemsize), (column, itemsize)):
            step = arith.constant(i64(), ir.IntegerAttr.get(i64(), size))
            offset = arith.muli(arith.extsi(i64(), _only(index)), step)
            address = arith.addi(address, offset)
        asm(text, "l,r,f,~{memory}", address, _only(row), _only(values), effects=True)

    store(ref, row, column, values)


def _only(values: Any) -> Any:
    """Returns the register of a thread's only number."""
    return llvm.extractelement(values.registers.item(), const(0))
