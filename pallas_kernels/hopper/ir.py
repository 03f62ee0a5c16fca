"""Registers and instructions below Pallas, for functions inlined with ``plgpu.inline_mgpu``.

Such a function is code of a single thread. A scalar or array argument is the registers of that
thread which hold it, in the order that its layout defines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

SCALAR = plgpu.Layout.WG_SPLAT(())  # layout of a scalar, which every thread has

Registers = mgpu.FragmentedArray  # a thread's registers of a scalar or an array
INT32 = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)  # type of a result
REF = plgpu.RefType()  # type of a reference to memory, without transforms


class Inline:
    """A decorator, see :func:`inline`."""

    def __init__(self, arguments: Sequence[Any], returns: Any):
        self._inlined = plgpu.inline_mgpu(arg_types=arguments, return_type=returns)

    def __call__(self, function: Callable[..., Any]) -> Any:
        return self._inlined(lambda _, *args: function(*args))

    def on(self, *values: Any) -> Callable[[Callable[..., None]], None]:
        """Returns a decorator that calls the function at once, as ``pl.when`` does."""
        return lambda function: self(function)(*values)


def inline(*arguments: Any, returns: Any = None) -> Inline:
    """Decorates a function as plgpu.inline_mgpu does, but without the launch context argument.
    ``arguments`` are types or layouts, ``returns`` is a type or a tuple of types."""
    return Inline(arguments, returns)


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    return ir.F32Type.get()


def const(number: int, bits: int = 32) -> ir.Value:
    kind = ir.IntegerType.get_signless(bits)
    return arith.constant(kind, ir.IntegerAttr.get(kind, number))


def float_const(number: float) -> ir.Value:
    return arith.constant(f32(), ir.FloatAttr.get(f32(), number))


def value_of(scalar: Registers) -> ir.Value:
    """Returns the register of a scalar."""
    return scalar.registers.flat[0]


def asm(
    text: str, constraints: str, *args: ir.Value, result: Any = None, effects: bool = False
) -> Any:
    """Emits inline PTX, with operands $0, $1, ... of LLVM's ``constraints``, and returns its result
    of an MLIR type or None. With ``effects`` the compiler must neither move nor remove it."""
    return llvm.inline_asm(
        result, list(args), text, constraints, asm_dialect=0, has_side_effects=effects
    )


def asm_numbers(
    text: str, constraints: str, *args: ir.Value, kind: ir.Type, count: int, effects: bool = True
) -> list[Any]:
    """Does :func:`asm` with ``count`` results of one type."""
    struct = llvm.StructType.get_literal([kind] * count)
    struct = asm(text, constraints, *args, result=struct, effects=effects)
    return [llvm.extractvalue(kind, struct, [i]) for i in range(count)]


def instruction(text: str, *args: ir.Value) -> None:
    """Emits inline PTX without a result, which is also a compiler fence for memory."""
    constraints = ",".join(["r"] * len(args) + ["~{memory}"])
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(args), text, constraints, has_side_effects=True)


def warp_and_lane() -> tuple[ir.Value, ir.Value]:
    """Returns the index of the thread's warp in its warpgroup, and of its lane in the warp."""
    thread = mgpu.utils.thread_idx()
    return arith.andi(arith.shrui(thread, const(5)), const(3)), arith.andi(thread, const(31))


def warp_prefix_sum(total: ir.Value) -> ir.Value:
    """Returns the sum of an integer of each lane of the warp up to this one."""
    for step in (1, 2, 4, 8, 16):
        text = f"""{{
            .reg .pred there;
            .reg .b32 other;
            shfl.sync.up.b32 other|there, $1, {step}, 0, 0xffffffff;
            mov.b32 $0, $1;
            @there add.s32 $0, $1, other;
        }}"""
        # Early clobber: $0 is written before $1 is read for the last time.
        total = asm(text, "=&r,r", total, result=i32(), effects=True)
    return total


def wgmma_row() -> ir.Value:
    """Returns the first of the thread's two rows of a wgmma tile. The second is 8 further on."""
    warp, lane = warp_and_lane()
    return arith.addi(arith.muli(warp, const(16)), arith.shrui(lane, const(2)))


def array(
    registers: Sequence[ir.Value],
    shape: tuple[int, ...],
    layout: Any,
    is_signed: bool | None = None,
) -> Registers:
    """Makes an array of a thread's registers, which are in the layout's order."""
    layout = layout.to_mgpu()
    flat = np.empty(len(registers), dtype=object)
    flat[:] = registers
    return mgpu.FragmentedArray(
        _registers=flat.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=is_signed
    )


def shared_address(ref: ir.Value) -> ir.Value:
    """Returns the i32 address of an array in shared memory."""
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))


def global_address(ref: ir.Value) -> ir.Value:
    """Returns the i64 address of an array in global memory."""
    return llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(ref))


def element(pointer: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """Returns a pointer to an element of that type, from one to the first element."""
    return mgpu.utils.getelementptr(pointer, [index], kind)


def item(register: ir.Value, i: int) -> ir.Value:
    """Returns element ``i`` of a register that is a vector."""
    position = ir.DenseI64ArrayAttr.get([i])
    return vector.extract(register, dynamic_position=[], static_position=position)


def numbers_of(values: Registers) -> list[ir.Value]:
    """Returns a thread's numbers, in the order of its registers."""
    return [
        item(register, i)
        for register in values.registers.flat
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def words_of(values: Registers) -> list[ir.Value]:
    """Returns a thread's registers of 32 bits as integers."""
    return [llvm.bitcast(i32(), register) for register in values.registers.flat]


def single(number: ir.Value) -> ir.Value:
    """Returns a register that is a vector of one number."""
    return vector.broadcast(ir.VectorType.get((1,), number.type), number)


def float_pair(first: ir.Value, second: ir.Value) -> ir.Value:
    return vector.from_elements(ir.VectorType.get((2,), f32()), [first, second])


def scalar(register: ir.Value) -> Registers:
    """Makes an int32 scalar of a register that is equal in all threads."""
    return mgpu.FragmentedArray.splat(register, (), SCALAR.to_mgpu(), is_signed=True)
