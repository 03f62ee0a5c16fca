"""Keeps a product's left operand in its registers until the tensor cores have read it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.mosaic_ir import asm, i32, inline

_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


def hold(factors: jax.Array, acc: jax.Array, p: jax.Array) -> jax.Array:
    """``factors`` unchanged, in such a way that P's registers are in use until ``acc`` is known.

    A product in flight reads P from registers. If nothing else does, ptxas may give them to the
    softmax of the next block: at best it waits for the product first, and versions before 13.3
    are known to forget that. So the bits of P are combined after the wait, into a sign that is
    never set, for P >= 0.
    """
    shape = plgpu.ShapeDtypeStruct(factors.shape, jnp.float32, layout=_ROW)

    @inline(_ROW, _WGMMA, _WGMMA, returns=shape)
    def held(factors: Any, acc: Any, p: Any) -> Any:
        def bits(register: Any) -> Any:
            """The first 32 bits of a register."""
            kind = register.type
            if isinstance(kind, ir.VectorType):
                words = kind.shape[0] * utils.bitwidth(kind.element_type) // 32
                register = vector.bitcast(ir.VectorType.get((words,), i32()), register)
                return vector.extract(register, [], ir.DenseI64ArrayAttr.get([0]))
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

    return held(factors, acc, p)
