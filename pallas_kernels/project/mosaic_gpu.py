"""project on Hopper GPUs, for one to eight tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.decoder_layer.reference import Projection
from pallas_kernels.decoder_layer.registers import SUMS_SHAPE
from pallas_kernels.decoder_layer.stream import CONSUMERS, MOST_TOKENS, ROWS, Operand, Stages
from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.project import kernel
from pallas_kernels.project.kernel import Plan

_STEP_BYTES = 1024  # of a matrix row per stage, which then has 16 KiB
_MOST_STAGES, _FEWEST_STAGES = 12, 3
_SHARED_MEMORY = 227 * 1024  # bytes per thread block
_RESERVED = 8 * 1024  # barriers, alignment of buffers, norms


def project(
    x: Float[Array, "M D"],
    norm: Float[Array, " D"],
    projections: Sequence[Projection],
    *,
    eps: float,
    programs: int | None = None,
    interpret: Any = None,
) -> list[Float[Array, "M _"]]:
    """Implements :func:`pallas_kernels.project`.

    Raises:
      NotImplementedError: no Hopper GPU; more than 8 tokens; activations or matrices that are not
        bfloat16, or float8 matrices with scales; a width that is not a multiple of 128; numbers of
        rows that are not multiples of 8; or too little shared memory.
    """
    require_hopper(interpret)
    programs = programs or (multiprocessors() if interpret is None else 2)
    plan = make_plan(x, projections, eps=eps, programs=programs, interpret=interpret)
    made: Any = kernel.project(x, norm, list(projections), plan=plan, interpret=interpret)
    return made


def make_plan(
    x: Float[Array, "M D"],
    projections: Sequence[Projection],
    *,
    eps: float,
    programs: int,
    interpret: Any = None,
) -> Plan:
    """Returns the plan for these arguments. It raises as :func:`project`."""
    tokens, width = x.shape
    if not 1 <= tokens <= MOST_TOKENS:
        raise NotImplementedError(f"takes 1 to {MOST_TOKENS} tokens, got {tokens}")
    allowed = {jnp.dtype(jnp.bfloat16)} | ({jnp.dtype(jnp.float32)} if interpret else set())
    if x.dtype not in allowed:
        raise NotImplementedError(f"takes bfloat16 activations, got {x.dtype}")
    if width % 128:
        raise NotImplementedError(f"takes widths of a multiple of 128, got {width}")
    for weight, scales in projections:
        is_float8 = weight.dtype == jnp.dtype(FLOAT8) and scales
        if weight.dtype != x.dtype and not is_float8:
            raise NotImplementedError(
                f"takes matrices of {x.dtype}, or float8_e4m3fn with scales, got {weight.dtype}"
            )
        if weight.shape[0] % ROWS:
            raise NotImplementedError(f"takes a multiple of {ROWS} rows, got {weight.shape[0]}")
    operands = [Operand.of(each.weight.dtype, width, True, _STEP_BYTES) for each in projections]
    # As in feed_forward: the tokens that a quarter of a warp reads are in different banks.
    padding = 16 if min(operand.dtype.itemsize for operand in operands) == 1 else 64
    stride = width + (padding - 2 * width) % 128 // 2
    stages = Stages.of(operands, 0, interpret)
    used = _RESERVED + 2 * tokens * stride
    used += 2 * CONSUMERS * 2 * 4 * SUMS_SHAPE[0] * SUMS_SHAPE[1]
    count = min((_SHARED_MEMORY - used) // stages.stage_bytes, _MOST_STAGES)
    if count < _FEWEST_STAGES:
        raise NotImplementedError(
            f"takes {_FEWEST_STAGES} ring stages of {stages.stage_bytes} bytes in addition to"
            f" {used} bytes for {tokens} tokens, got room for {count}"
        )
    rows = tuple(each.weight.shape[0] for each in projections)
    stages = Stages.of(operands, count, interpret)
    dtype = jnp.dtype(x.dtype)
    return Plan(tokens, width, stride, tuple(operands), rows, eps, dtype, programs, stages)
