"""Keeps the register operand of a wgmma live until the tensor cores have read it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.hopper.ir import asm, i32, inline, item
from pallas_kernels.hopper.tiles import ROW, WGMMA


def keep_live(factors: jax.Array, acc: jax.Array, p: jax.Array) -> jax.Array:
    """Returns ``factors`` unchanged, but makes them depend on P's registers and on ``acc``.

    A wgmma in flight reads P from registers. If nothing else uses these registers, ptxas may assign
    them to the softmax of the next block. At best it then waits for the wgmma first, and versions
    before 13.3 are known to omit the wait. So after the wait for ``acc`` the bits of P are combined
    into a sign bit, which is never set because P >= 0, and which is merged into ``factors``.
    """
    shape = plgpu.ShapeDtypeStruct(factors.shape, jnp.float32, layout=ROW)

    @inline(ROW, WGMMA, WGMMA, returns=shape)
    def merge_sign(factors: Any, acc: Any, p: Any) -> Any:
        def bits(register: Any) -> Any:
            """Returns the first 32 bits of a register."""
            type_ = register.type
            if isinstance(type_, ir.VectorType):
                words = type_.shape[0] * utils.bitwidth(type_.element_type) // 32
                register = vector.bitcast(ir.VectorType.get((words,), i32()), register)
                return item(register, 0)
            return arith.bitcast(i32(), register)

        words = [bits(r) for r in p.registers.flat]
        chains = [words[i : i + 8] for i in range(0, len(words), 8)]
        starts = [bits(r) for r in acc.registers.flat[: len(chains)]]
        inputs = [word for chain in chains for word in chain] + starts
        lines, names = [], []
        for i in range(len(chains)):
            name = f"t{i}"
            for j in range(0, 8, 2):
                third, table = (f"${len(words) + i + 1}", "0xA8") if j == 0 else (name, "0xFE")
                a, b = f"${i * 8 + j + 1}", f"${i * 8 + j + 2}"
                lines.append(f"lop3.b32 {name}, {a}, {b}, {third}, {table};")
            names.append(name)
        for name in names[1:]:
            lines.append(f"or.b32 t0, t0, {name};")
        registers = "".join(f".reg .b32 {name}; " for name in names)
        text = f"{{ {registers}{' '.join(lines)} and.b32 $0, t0, 0x80008000; }}"
        constraints = "=r" + ",r" * len(inputs)
        sign = asm(text, constraints, *inputs, result=i32(), effects=True)
        new = factors.copy()
        for index, register in np.ndenumerate(factors.registers):
            combined = arith.ori(bits(register), sign)
            if isinstance(register.type, ir.VectorType):
                combined = vector.broadcast(ir.VectorType.get((1,), i32()), combined)
                new.registers[index] = vector.bitcast(register.type, combined)
            else:
                new.registers[index] = arith.bitcast(register.type, combined)
        return new

    return merge_sign(factors, acc, p)
