"""Selects whether tests of Hopper kernels run on a GPU or in the interpreter.

The interpreter detects races. With a Hopper GPU and JAX for CUDA, the same tests run on the GPU:

    JAX_PLATFORMS=cuda pytest -k 'not Reference and not Cpu' \\
        tests/pallas_kernels/test_{*hopper,few_tokens,grouped_swiglu,mla_decode_float8}.py
    JAX_PLATFORMS=cuda pytest -k 'kernel' \\
        tests/pallas_kernels/test_{route,rms_norm,quantized_matmul,swiglu}.py
    JAX_PLATFORMS=cuda pytest tests/pallas_kernels/test_{ragged_inputs,token_exchange}.py

Slow cases run there too. Interpreted, they take seconds each; ``make test-all`` with Python 3.12
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
    reason="no Hopper GPU, and the interpreter needs jax 0.11",
)
off_gpu = pytest.mark.skipif(ON_GPU, reason="only for machines without a GPU")
on_gpu = pytest.mark.skipif(not ON_GPU, reason="no Hopper GPU")
on_gpus = pytest.mark.skipif(
    not ON_GPU or jax.device_count() == 1, reason="fewer than two Hopper GPUs"
)
