"""Where the Hopper kernels are tested: on such a GPU, or interpreted with race detection.

On one, with JAX for its CUDA, the same tests run the kernels themselves:

    JAX_PLATFORMS=cuda pytest -k 'not Reference and not Cpu' \\
        tests/pallas_kernels/test_{*hopper,few_rows,grouped_swiglu,mla_decode_float8}.py
    JAX_PLATFORMS=cuda pytest -k 'kernel' \\
        tests/pallas_kernels/test_{route,rms_norm,quantized_matmul,swiglu}.py

Slow cases run there too; interpreted they cost seconds each, and ``make test-all`` with Python 3.12
runs them.
"""

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

ON_GPU = jax.default_backend() == "gpu"
INTERPRETER = not ON_GPU and jax.__version_info__ >= (0, 11)
INTERPRET = plgpu.InterpretGPUParams(detect_races=True) if INTERPRETER else None

kernel_runs = pytest.mark.skipif(
    not ON_GPU and not INTERPRETER,
    reason="no Hopper GPU here, and the interpreter in its place needs jax 0.11",
)
off_gpu = pytest.mark.skipif(ON_GPU, reason="of machines without a GPU")
on_gpu = pytest.mark.skipif(not ON_GPU, reason="no Hopper GPU here")
on_gpus = pytest.mark.skipif(
    not ON_GPU or jax.device_count() == 1, reason="no two Hopper GPUs here"
)
