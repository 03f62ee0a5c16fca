"""grouped_matmul and the operations built on it compile for TPUs, at DeepSeek-V3's sizes.

Each program must contain the kernel and no copy of the matrices. libtpu compiles without a TPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import grouped_matmul, grouped_swiglu, quantized_matmul, swiglu
from tests.pallas_kernels.tpu_topology import (
    compile_for,
    compiled,
    devices,
    every_chip,
    kernels,
    needs_libtpu,
)

pytestmark = [needs_libtpu, pytest.mark.compiles]

BF16, F32, FLOAT8, INT8, INT4 = "bfloat16", "float32", "float8_e4m3fn", "int8", "uint8"
GATE, DOWN = (2048, 7168), (7168, 2048)  # N, K of an expert's matrices in DeepSeek-V3
Struct = jax.ShapeDtypeStruct


def blocks(form: str, K: int) -> tuple[int, int]:
    """Returns the scale blocks of DeepSeek's checkpoints and of dsv3 convert."""
    return {FLOAT8: (128, 128), INT8: (1, K), INT4: (1, 128)}.get(form, (1, 1))


def matrices(form: str, *shape: int) -> tuple[Struct, Struct | None]:
    """Returns the shapes of matrices and of their scales."""
    *batch, N, K = shape
    stored = Struct((*batch, N, K // 2 if form == INT4 else K), form)
    if form in (BF16, F32):
        return stored, None
    rows, columns = blocks(form, K)
    return stored, Struct((*batch, -(-N // rows), -(-K // columns)), F32)


def compile_grouped_matmul(
    chip: str, form: str, G: int, M: int, N: int, K: int
) -> jax.stages.Compiled:
    rhs, scale = matrices(form, G, N, K)
    lhs = Struct((M, K), F32 if form == F32 else BF16)

    def run(lhs, rhs, sizes, scale):
        return grouped_matmul(lhs, rhs, sizes, None, scale, block_shape=blocks(form, K))

    return compile_for(chip, run, lhs, rhs, Struct((G,), jnp.int32), scale)


def check(program: jax.stages.Compiled, expected: int, rows: int = 0) -> None:
    """Asserts the number of kernels, and that temporaries are no larger than expected.

    Args:
      rows: bytes of temporaries that hold rows. Visits and scales may take another 8 MiB.
    """
    assert kernels(program) == expected
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary <= rows + 8 * 2**20, temporary


@every_chip
def test_a_decode_step(chip):
    check(compile_grouped_matmul(chip, FLOAT8, 256, 512, *GATE), 1)


@pytest.mark.slow
@pytest.mark.parametrize("form", [BF16, FLOAT8, INT8])
@every_chip
def test_experts(chip, form):
    for groups, rows, (N, K) in ((32, 4096 * 8, GATE), (256, 512, DOWN)):
        check(compile_grouped_matmul(chip, form, groups, rows, N, K), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "rows", "matrix"),
    [("v5p", 4096 * 8, GATE), *((chip, 512, DOWN) for chip in ("v5e", "v6e", "tpu7x"))],
)
def test_int4(chip, rows, matrix):
    """Temporaries are the rows with their columns sorted, and the halves that are concatenated."""
    check(compile_grouped_matmul(chip, INT4, 32, rows, *matrix), 1, 4 * rows * matrix[1])


@pytest.mark.slow
@pytest.mark.parametrize(("form", "groups", "rows"), [(FLOAT8, 2, 8), (F32, 2, 8), (F32, 8, 4096)])
def test_few_groups(form, groups, rows):
    check(compile_grouped_matmul("v5p", form, groups, rows, *GATE), 1)


@every_chip
def test_a_matrix_of_float8(chip):
    """kv_a_proj_with_mqa is not a multiple of the scale blocks."""
    check(compile_quantized_matmul(chip, FLOAT8, 8, 576, 7168), 1)


@pytest.mark.slow
@every_chip
def test_matrices(chip):
    check(compile_quantized_matmul(chip, FLOAT8, 64, 7168, 18432), 1)


@pytest.mark.slow
def test_a_matrix_by_a_chunk_of_prefill():
    check(compile_quantized_matmul("v5p", FLOAT8, 4096, 18432, 7168), 1)


def test_int8_with_one_scale_per_row_is_left_to_xla():
    check(compile_quantized_matmul("v5p", INT8, 64, 18432, 7168), 0)


def compile_quantized_matmul(
    chip: str, form: str, rows: int, N: int, K: int
) -> jax.stages.Compiled:
    run = functools.partial(quantized_matmul, block_shape=blocks(form, K))
    return compile_for(chip, run, Struct((rows, K), BF16), *matrices(form, N, K))


@pytest.mark.slow
def test_experts_swiglu():
    """Two kernels, and SwiGLU by XLA."""
    stored, scale = matrices(FLOAT8, 32, *GATE)

    def run(lhs, sizes, gate, up, gate_scale, up_scale):
        return grouped_swiglu(lhs, gate, up, sizes, None, gate_scale, up_scale)

    lhs, sizes = Struct((256, GATE[1]), BF16), Struct((32,), jnp.int32)
    program = compile_for("v5p", run, lhs, sizes, stored, stored, scale, scale)
    check(program, 2, 256 * 3 * 4 * GATE[0])


@pytest.mark.slow
def test_swiglu_of_one_matrix():
    stored, scale = matrices(FLOAT8, *GATE)
    x = Struct((256, GATE[1]), BF16)
    program = compile_for("v5p", swiglu, x, stored, stored, scale, scale)
    check(program, 2, 256 * 3 * 4 * GATE[0])


def test_on_every_device_of_a_pod():
    """DeepSeek-V3's 256 experts on 128 chips, two on each."""
    mesh = Mesh(np.array(devices("v5p", "4x4x8")), ("expert",))
    split = PartitionSpec("expert")
    rhs, scale = matrices(FLOAT8, 256, *GATE)
    arguments = Struct((128 * 64, GATE[1]), BF16), rhs, Struct((256,), jnp.int32), scale

    def run(lhs, rhs, sizes, scale):
        return grouped_matmul(lhs, rhs, sizes, None, scale)

    on_devices = jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    placed = [Struct(x.shape, x.dtype, sharding=NamedSharding(mesh, split)) for x in arguments]
    program = compiled(jax.jit(on_devices).lower(*placed))
    check(program, 1)
    assert "grouped_matmul" in program.as_text()
    bytes_per_device = sum(x.size * x.dtype.itemsize for x in arguments) // 128
    assert program.memory_analysis().argument_size_in_bytes == pytest.approx(
        bytes_per_device, rel=0.01
    )


@pytest.mark.parametrize(("N", "K"), [(120, 256), (256, 200)])
def test_other_sizes_are_left_to_xla_s_ragged_dot(N, K):
    program = compile_grouped_matmul("v5p", BF16, 8, 4096, N, K)
    assert "ragged-dot" in program.as_text()
