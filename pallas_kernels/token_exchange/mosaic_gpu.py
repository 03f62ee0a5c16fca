"""token_exchange between Hopper GPUs: each GPU stores its rows in its peers' memory over NVLink."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.hopper import Index, Ref, multiprocessors, require_hopper
from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    Registers,
    asm,
    const,
    global_address,
    i32,
    i64,
    value_of,
)
from pallas_kernels.hopper.tiles import load_with_layout
from pallas_kernels.hopper.warpgroup import when

_THREADS = 128
_STORE = 16  # bytes per store instruction of a thread


def token_exchange(
    rows: Shaped[Array, "n C W"], counts: Int32[Array, " n"], *, axes: tuple[str, ...]
) -> tuple[Shaped[Array, "n C W"], Int32[Array, " n"]]:
    """Implements :func:`pallas_kernels.token_exchange`. Raises NotImplementedError for no Hopper
    GPU, several processes, a row size that is not a multiple of 16 bytes, or C rows of fewer than
    2,048 bytes."""
    require_hopper()
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"takes devices of one process, got {jax.process_count()} processes"
        )
    n, C, W = rows.shape
    if W * rows.dtype.itemsize % _STORE or C * W * rows.dtype.itemsize < _THREADS * _STORE:
        raise NotImplementedError(
            f"takes rows of a multiple of {_STORE} bytes, {_THREADS * _STORE} bytes or more per"
            f" device, got {C} rows of {W} {rows.dtype}"
        )
    received, received_counts = _exchange(rows.reshape(n, C * W), counts, W, axes)
    return received.reshape(n, C, W), received_counts


def plan(devices: int, size: int) -> tuple[int, int]:
    """Returns the CTAs per destination, whose buffer has ``size`` bytes, and the 16-byte stores
    that a thread has in flight."""
    ctas = max(1, multiprocessors() // devices)
    return ctas, max(s for s in (1, 2, 4) if s == 1 or s * _THREADS * _STORE * ctas <= size)


def _exchange(
    rows: Shaped[Array, "n CW"], counts: Int32[Array, " n"], row_size: int, axes: tuple[str, ...]
) -> Any:
    """Runs the kernel on rows flattened to [n, C * W].

    Each CTA copies to one destination, then signals its semaphore. A device's first CTA waits for
    the signals of all CTAs that send to it, so the kernel, and whatever XLA runs after it,
    completes only when all rows have arrived.

    Unless CompilerParams disables it, XLA synchronises all devices before the kernel starts. So the
    buffers that peers write to are no longer in use, and the semaphore is zero."""
    n, size = rows.shape
    mesh = jax.sharding.get_abstract_mesh()
    vector_size = _STORE // rows.dtype.itemsize
    ctas, stores = plan(n, size * rows.dtype.itemsize)
    chunk = stores * _THREADS * vector_size
    layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=vector_size)
    per_destination = np.int32(ctas)

    def token_exchange(rows_g: Ref, counts_g: Ref, received_g: Ref, received_counts_g: Ref) -> None:
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        cta = lax.axis_index("cta")
        slice_index = lax.rem(cta, per_destination)
        me = _row_major({axis: lax.axis_index(axis) for axis in axes}, axes, mesh)
        # Each device begins with itself, then the next one, to spread the load over the links.
        destination = lax.rem(lax.div(cta, per_destination) + me, jnp.int32(n))
        peer = _logical(destination, axes, mesh)
        count = counts_g[destination]

        def copy(step: jax.Array, carry: None) -> None:
            # The last chunk is shifted to end at the buffer's end, and may overlap its predecessor.
            start = lax.min(
                (slice_index + step * per_destination) * jnp.int32(chunk), jnp.int32(size - chunk)
            )
            window = pl.ds(pl.multiple_of(start, vector_size), chunk)
            values = load_with_layout(rows_g.at[destination, window], layout)
            store = plgpu.inline_mgpu(arg_types=(REF, SCALAR, layout))(_store)
            store(received_g.at[me, window], peer, values)

        chunks = lax.div(count * jnp.int32(row_size) + jnp.int32(chunk - 1), jnp.int32(chunk))
        steps = chunks - slice_index + per_destination - jnp.int32(1)
        lax.fori_loop(0, lax.div(steps, per_destination), copy, None)

        @when(slice_index == 0)
        def _() -> None:
            logical = pl.DeviceIdType.LOGICAL
            plgpu.remote_ref(received_counts_g, peer, logical)[me] = count

        pl.semaphore_signal(arrived, device_id=peer, device_id_type=pl.DeviceIdType.LOGICAL)
        when(cta == 0)(lambda: pl.semaphore_wait(arrived, n * ctas))

    return plgpu.kernel(
        token_exchange,
        out_type=(
            jax.ShapeDtypeStruct((n, size), rows.dtype),
            jax.ShapeDtypeStruct((n,), jnp.int32),
        ),
        grid=(n * ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(rows, counts)


def _store(context: Any, target: ir.Value, peer: Registers, values: Registers) -> None:
    """Stores a chunk at ``target`` on the device ``peer``, 16 bytes at a time: Mosaic GPU does not
    know the alignment of remote addresses, and would store single elements."""
    base = global_address(context.to_remote(target, value_of(peer)))
    thread = arith.extui(i64(), mgpu.utils.thread_idx())
    words = ir.VectorType.get((4,), i32())
    for number, register in enumerate(values.registers.flat):
        offset = arith.muli(thread, const(_STORE, 64))
        address = arith.addi(base, arith.addi(offset, const(number * _THREADS * _STORE, 64)))
        words_of_store = vector.bitcast(words, register)
        store_words = [llvm.extractelement(words_of_store, const(i)) for i in range(4)]
        void = ir.Type.parse("!llvm.void")
        store = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
        asm(store, "l,r,r,r,r,~{memory}", address, *store_words, result=void, effects=True)


def _row_major(coordinates: dict[str, Any], axes: tuple[str, ...], mesh: Any) -> Any:
    """Returns the row-major index along ``axes`` of the device at these coordinates."""
    index = jnp.int32(0)
    for axis in axes:
        index = index * jnp.int32(mesh.shape[axis]) + coordinates[axis]
    return index


def _logical(index: Index, axes: tuple[str, ...], mesh: Any) -> Any:
    """Returns the logical mesh index of the peer with index ``index`` along ``axes``, and this
    device's coordinates along the other axes."""
    coordinates = {axis: lax.axis_index(axis) for axis in mesh.axis_names if axis not in axes}
    for axis in reversed(axes):
        coordinates[axis] = lax.rem(index, jnp.int32(mesh.shape[axis]))
        index = lax.div(index, jnp.int32(mesh.shape[axis]))
    return _row_major(coordinates, mesh.axis_names, mesh)
