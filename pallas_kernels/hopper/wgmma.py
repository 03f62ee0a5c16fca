"""wgmma of float8 and bfloat16 operands in shared memory, with descriptors that cannot be hoisted.

``plgpu.wgmma`` computes a descriptor per instruction. In an unrolled loop, LLVM computes those of
all stages before the loop and keeps them in registers, which are too few. Here a descriptor is a
base plus a constant, added in the assembly that issues the instruction. The base is made uniform,
so that ptxas adds in uniform registers. And the first instruction of a product ignores the
accumulator, which ``plgpu.wgmma`` cannot do: nothing has to be zeroed.

The bfloat16 product reads transposed operands from panels of 64 columns, each a TMA copy of its own
that starts at any row. ``plgpu.wgmma`` takes tiles of eight rows, side by side across all columns.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.hopper.ir import (
    INT32,
    SCALAR,
    Registers,
    array,
    asm,
    asm_numbers,
    const,
    f32,
    float_pair,
    i32,
    i64,
    inline,
    numbers_of,
    scalar,
    shared_address,
    value_of,
    words_of,
)
from pallas_kernels.hopper.launch import Ref
from pallas_kernels.hopper.tiles import ROWS, WGMMA

_UNTILED = plgpu.RefType((plgpu.SwizzleTransform(128),))
_ATOM = 128  # bytes: a row of a swizzled tile, which is the K of one product
_K_BYTES = 32  # of one instruction
# Upper half of a descriptor: tiles of eight rows are 1,024 bytes apart, and swizzled by 128 bytes.
_LAYOUT = (1 << 30) | (1024 >> 4)
_PANEL = 64 * _ATOM  # bytes: 64 rows of 64 bfloat16 columns
_ROWS_BYTES = 16 * _ATOM  # 16 rows, the K of one instruction with transposed bfloat16 operands


def operand_base(ref: Ref, offset: jax.Array | int) -> jax.Array:
    """Returns the base of an operand's descriptors, an int32 that is uniform in a warp. ``ref`` has
    rows of 128 bytes, swizzled and not tiled; ``offset`` is a multiple of 1,024 bytes."""

    @inline(_UNTILED, SCALAR, returns=INT32)
    def base(ref: ir.Value, offset: Registers) -> Registers:
        address = arith.shrui(arith.addi(shared_address(ref), value_of(offset)), const(4))
        # The maximum over a warp is in a uniform register.
        text = "redux.sync.max.u32 $0, $1, 0xffffffff;"
        return scalar(asm(text, "=r,r", address, result=i32(), effects=True))

    return base(ref, jnp.asarray(offset, jnp.int32))


def start_product(
    a: jax.Array, b: jax.Array, a_offset: int, b_offset: int, previous: jax.Array
) -> jax.Array:
    """Starts ``A B^T`` over 128 columns of K, of float8_e4m3fn operands, at ``a_offset`` and
    ``b_offset`` bytes, multiples of 1,024, from their bases (:func:`operand_base`). Returns float32
    [64, columns] in the registers of ``previous``, which nothing may use afterwards;
    :func:`wait_for_product` must return it before any other use."""
    columns, count, registers = _registers_of(previous)
    text = ["{ .reg .b64 a, b; .reg .pred old;", "wgmma.fence.sync.aligned;"]
    for k in range(0, _ATOM, _K_BYTES):
        text += [
            f"add.s64 a, ${2 * count}, {(a_offset + k) // 16};",
            f"add.s64 b, ${2 * count + 1}, {(b_offset + k) // 16};",
            f"setp.ne.b32 old, {int(k > 0)}, 0;",
            f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3"
            f" {registers}, a, b, old, 1, 1;",
        ]
    text.append("wgmma.commit_group.sync.aligned; }")

    @inline(SCALAR, SCALAR, WGMMA, returns=_product_type(columns))
    def start(a: Registers, b: Registers, previous: Registers) -> Registers:
        return _issue(text, numbers_of(previous), "l,l", _descriptor(a), _descriptor(b))

    return start(a, b, previous)


def start_product_of_registers(a: jax.Array, b: jax.Array, previous: jax.Array) -> jax.Array:
    """Does :func:`start_product` with A in registers, which must stay there until the product is
    complete: see :func:`keep_live`. ``a`` has 16 words per thread, as bfloat16 [64, 64]. Four of
    them are the operand of one instruction, 32 columns: columns 4q to 4q + 3 of the thread's two
    rows, then 16 + 4q to 16 + 4q + 3, where q is the lane's index modulo 4."""
    columns, count, registers = _registers_of(previous)
    words, base = 2 * count, 2 * count + 16
    text = ["{ .reg .b64 b; .reg .pred old;", "wgmma.fence.sync.aligned;"]
    for n, k in enumerate(range(0, _ATOM, _K_BYTES)):
        operand = "{" + ",".join(f"${words + 4 * n + i}" for i in range(4)) + "}"
        text += [
            f"add.s64 b, ${base}, {k // 16};",
            f"setp.ne.b32 old, {int(k > 0)}, 0;",
            f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3"
            f" {registers}, {operand}, b, old, 1, 1;",
        ]
    text.append("wgmma.commit_group.sync.aligned; }")

    @inline(WGMMA, SCALAR, WGMMA, returns=_product_type(columns))
    def start(a: Registers, b: Registers, previous: Registers) -> Registers:
        a_words, numbers = words_of(a), numbers_of(previous)
        return _issue(text, numbers, "r," * 16 + "l", *a_words, _descriptor(b))

    return start(a, b, previous)


def add_bfloat16_product(
    a: jax.Array, b: jax.Array, sums: jax.Array, *, transposed_a: bool, depth: int
) -> jax.Array:
    """Starts ``sums + A B``, float32 [64, columns], of bfloat16 operands at their bases: A [64,
    depth], or with ``transposed_a`` its transpose, and B [depth, columns] as panels of 64 columns
    and 64 rows. ``depth`` is a multiple of 16, at most 64. The result takes the registers of
    ``sums``; only the next product may use it before :func:`wait_for_product` returns it."""
    columns, count, registers = _registers_of(sums)
    a_bytes = _ROWS_BYTES if transposed_a else _K_BYTES
    text = [
        "{ .reg .b64 a, b; .reg .pred add;",
        "setp.ne.b32 add, 1, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(depth // 16):
        text += [
            f"add.s64 a, ${2 * count}, {step * a_bytes // 16};",
            f"add.s64 b, ${2 * count + 1}, {step * _ROWS_BYTES // 16};",
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
            f" {registers}, a, b, add, 1, 1, {int(transposed_a)}, 1;",
        ]
    text.append("wgmma.commit_group.sync.aligned; }")

    @inline(SCALAR, SCALAR, WGMMA, returns=_product_type(columns))
    def start(a: Registers, b: Registers, sums: Registers) -> Registers:
        numbers = numbers_of(sums)
        return _issue(text, numbers, "l,l", _descriptor(a, _PANEL), _descriptor(b, _PANEL))

    return start(a, b, sums)


def start_bfloat16_product(
    a: jax.Array, b: jax.Array, *, width: int, columns: int, a_rows: int, b_rows: int
) -> jax.Array:
    """Starts ``A B^T``, float32 [64, columns], of bfloat16 A [64, width] and B [columns, width] at
    their bases. Both are panels of 64 columns, with ``a_rows`` and ``b_rows`` rows. Nothing may use
    the result before :func:`wait_for_product` returns it."""
    count = columns // 2
    registers = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    text = ["{ .reg .b64 a, b; .reg .pred old;", "wgmma.fence.sync.aligned;"]
    for k in range(0, 2 * width, _K_BYTES):
        panel, inside = divmod(k, _ATOM)
        text += [
            f"add.s64 a, ${count}, {(panel * a_rows * _ATOM + inside) // 16};",
            f"add.s64 b, ${count + 1}, {(panel * b_rows * _ATOM + inside) // 16};",
            f"setp.ne.b32 old, {int(k > 0)}, 0;",
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
            f" {registers}, a, b, old, 1, 1, 0, 0;",
        ]
    text.append("wgmma.commit_group.sync.aligned; }")

    @inline(SCALAR, SCALAR, returns=_product_type(columns))
    def start(a: Registers, b: Registers) -> Registers:
        kinds = ",".join([*["=f"] * count, "l,l"])
        descriptors = _descriptor(a), _descriptor(b)
        return _product(asm_numbers("\n".join(text), kinds, *descriptors, kind=f32(), count=count))

    return start(a, b)


def add_registers_product(a: jax.Array, b: jax.Array, sums: jax.Array, *, b_rows: int) -> jax.Array:
    """Starts ``sums + A B``, float32 [64, columns], of A, bfloat16 [64, depth] in registers, which
    must stay there until the product is complete (:func:`keep_live`), and B [depth, columns] at its
    base: panels of 64 columns and ``b_rows`` rows. The result takes the registers of ``sums``; only
    the next product may use it before :func:`wait_for_product` returns it."""
    columns, count, registers = _registers_of(sums)
    steps = a.shape[1] // 16
    words, base = 2 * count, 2 * count + 4 * steps
    text = ["{ .reg .b64 b; .reg .pred add;", "setp.ne.b32 add, 1, 0;", "wgmma.fence.sync.aligned;"]
    for step in range(steps):
        operand = "{" + ",".join(f"${words + 4 * step + i}" for i in range(4)) + "}"
        text += [
            f"add.s64 b, ${base}, {step * _ROWS_BYTES // 16};",
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
            f" {registers}, {operand}, b, add, 1, 1, 1;",
        ]
    text.append("wgmma.commit_group.sync.aligned; }")

    @inline(WGMMA, SCALAR, WGMMA, returns=_product_type(columns))
    def start(a: Registers, b: Registers, sums: Registers) -> Registers:
        operands = *words_of(a), _descriptor(b, b_rows * _ATOM)
        return _issue(text, numbers_of(sums), "r," * (4 * steps) + "l", *operands)

    return start(a, b, sums)


def wait_for_product(product: jax.Array, later: int = 0) -> jax.Array:
    """Waits for a product, and returns its result. ``later`` products that were started after it
    may still be running."""
    text = [f"wgmma.wait_group.sync.aligned {later};"]

    @inline(WGMMA, returns=_product_type(product.shape[1]))
    def wait(product: Registers) -> Registers:
        return _issue(text, numbers_of(product), "")

    return wait(product)


def _descriptor(base: Registers, panel: int = 0) -> ir.Value:
    """Returns the i64 descriptor of an operand that starts at its base. The panels of a transposed
    operand are ``panel`` bytes apart."""
    bits = (_LAYOUT << 32) | (panel >> 4 << 16)
    layout = const(bits, 64)
    return arith.ori(arith.extui(i64(), value_of(base)), layout)


def _product_type(columns: int) -> Any:
    return plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=WGMMA)


def _registers_of(product: jax.Array) -> tuple[int, int, str]:
    """Returns a product's columns, its registers per thread, and their names as an operand."""
    columns = product.shape[1]
    return columns, columns // 2, "{" + ",".join(f"${i}" for i in range(columns // 2)) + "}"


def _issue(
    text: list[str], numbers: list[ir.Value], constraints: str, *operands: ir.Value
) -> Registers:
    """Emits instructions that overwrite a product's numbers, and returns the new product."""
    count, operands = len(numbers), (*numbers, *operands)
    kinds = [*["=f"] * count, *map(str, range(count)), *([constraints] if constraints else [])]
    return _product(
        asm_numbers("\n".join(text), ",".join(kinds), *operands, kind=f32(), count=count)
    )


def _product(numbers: list[ir.Value]) -> Registers:
    """Makes a product of a thread's numbers."""
    pairs = [float_pair(*numbers[i : i + 2]) for i in range(0, len(numbers), 2)]
    return array(pairs, (ROWS, 2 * len(numbers)), WGMMA)


def keep_live(*operands: jax.Array) -> None:
    """Keeps the operands, bfloat16 or float32, in their registers up to this point, by stores that
    are never executed, but that ptxas cannot prove dead. wgmma uses registers in groups of four,
    and so do the stores. What computes an operand is not moved past this point either."""

    @inline(*(plgpu.Layout.WGMMA for _ in operands)).on(*operands)
    def _(*operands):
        words = []
        for operand in operands:
            if operand.mlir_dtype == f32():
                words += [arith.bitcast(i32(), number) for number in numbers_of(operand)]
            else:
                words += words_of(operand)
        fours = range(0, len(words), 4)
        stores = [f"st.global.v4.b32 [a], {{${i}, ${i + 1}, ${i + 2}, ${i + 3}}};" for i in fours]
        text = [
            "{ .reg .b32 z; .reg .pred p; .reg .b64 a;",
            "mov.u32 z, %nctaid.z;",  # the grid has one block along z, so the branch is taken
            "setp.ne.u32 p, z, 77;",
            "@p bra.uni HELD;",
            "mov.b64 a, 0;",
            *stores,
            "HELD: }",
        ]
        asm("\n".join(text), ",".join(["r"] * len(words)), *words, effects=True)
