"""Tests of what the TPU kernels share: the chips, and the bytes of their blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import target
from pallas_kernels.tpu import CHIPS, SMEM, require_tpu, require_vmem, tiled_bytes
from tests.pallas_kernels.tpu_topology import (
    compile_for,
    devices,
    every_chip,
    kernels,
    needs_libtpu,
)


@every_chip
def test_chips_are_as_jax_describes_them(chip):
    version = pltpu.ChipVersion(chip.removeprefix("tpu"))
    info, own = pltpu.get_tpu_info_for_chip(version, CHIPS[chip].cores), CHIPS[chip]
    assert (own.vmem, own.cores) == (info.vmem_capacity_bytes, info.num_cores)
    assert info.smem_capacity_bytes == SMEM
    assert own.float8 == info.is_matmul_supported(jnp.float8_e4m3fn, jnp.float8_e4m3fn)


def traced_for(kind: str, platform: str = "tpu"):
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "tpu7x")],
)
def test_the_chip_is_that_of_the_mesh(kind, name):
    with traced_for(kind):
        assert require_tpu() == CHIPS[name]


def test_other_devices_are_refused():
    with pytest.raises(NotImplementedError, match="runs on TPUs, this is cpu"):
        require_tpu()
    with traced_for("NVIDIA H200", "gpu"), pytest.raises(NotImplementedError, match="is gpu"):
        require_tpu()
    with traced_for("TPU v4"), pytest.raises(NotImplementedError, match=r"v6e.*this is a TPU v4"):
        require_tpu()
    assert require_tpu(interpret=True).name == "v5p"


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((8, 128), "float32", 8 * 128 * 4),
        ((9, 129), "float32", 16 * 256 * 4),
        ((9, 576), "bfloat16", 16 * 640 * 2),
        ((1, 100), "float8_e4m3fn", 32 * 128),
        ((3, 33, 128), "int8", 3 * 64 * 128),
        ((64, 128), "int4", 64 * 128 // 2),
        ((7,), "int32", 8 * 128 * 4),
    ],
)
def test_tiled_bytes(shape, dtype, expected):
    assert tiled_bytes(shape, dtype) == expected


def test_blocks_above_the_budget_are_refused_by_name():
    chip, mib = CHIPS["v5p"], 2**20
    require_vmem(chip, {"rows": 16 * mib, "matrix": 40 * mib})
    message = r"takes blocks of 56 MiB .* a v5p, got 56.5 \(rows 16.0, matrix 40.5\)$"
    with pytest.raises(NotImplementedError, match=message):
        require_vmem(chip, {"rows": 16 * mib, "matrix": 40 * mib + mib // 2})


def test_the_interpreter_finds_a_planted_race(capsys):
    """The tests of kernels rely on it. Here a copy is read before it is complete."""

    def kernel(x, out, scratch, semaphore):
        copy = pltpu.make_async_copy(x, scratch, semaphore)
        copy.start()
        out[...] = scratch[...]
        copy.wait()

    x = jnp.ones((8, 128))
    call = pl.pallas_call(
        kernel,
        out_shape=x,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait"),
    )
    try:  # jax 0.12 raises an error, older versions only print
        jax.block_until_ready(call(x))
        raced = "RACE DETECTED" in capsys.readouterr().out
    except jax.errors.JaxRuntimeError as error:
        raced = "race" in str(error).lower()
    capsys.readouterr()
    pltpu.reset_tpu_interpret_mode_state()
    assert raced


def fill(bytes_of_vmem: int):
    """Returns a kernel whose scratch has that many bytes."""

    def kernel(x, out, scratch):
        scratch[:8] = x[...]
        out[...] = scratch[:8]

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((bytes_of_vmem // 512, 128), jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=bytes_of_vmem),
    )


@pytest.mark.compiles
@needs_libtpu
@every_chip
def test_the_compiler_has_the_same_vmem(chip):
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    assert kernels(compile_for(chip, fill(CHIPS[chip].budget), x)) == 1
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"memory .size={CHIPS[chip].vmem}"):
        compile_for(chip, fill(CHIPS[chip].vmem + 2**20), x)


@pytest.mark.compiles
@needs_libtpu
@every_chip
def test_programs_are_traced_for_the_topology_s_devices(chip):
    seen = []

    def look(x):
        seen.append((target.platform(), require_tpu().name))
        return x

    compile_for(chip, look, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert seen == [("tpu", chip)]
    assert target.platform() == "cpu"
    assert target.device_kind() == jax.devices()[0].device_kind


@pytest.mark.compiles
@needs_libtpu
def test_a_pod_has_a_device_a_chip():
    assert np.shape(devices("v5p", "4x4x8")) == (128,)
