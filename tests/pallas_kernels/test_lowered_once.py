"""A kernel takes Python about a second to lower: the layers of a model must share that."""

import importlib
import sys

import jax
import pytest

from tests.pallas_kernels.test_hopper_compile import KERNELS


@pytest.mark.parametrize(
    "name",
    [
        "mla_decode h128 sq1",
        "mla_decode_float8 h128 sq1",
        "mla_prefill 8192",
        "grouped_matmul bf16 gate_up 16 rows",
        "grouped_matmul fp8 by bf16 gate_up 4 rows",
        "grouped_swiglu bf16 2048 wide, 4 rows",
        "route 64 tokens",
    ],
)
def test_two_layers_lower_a_kernel_once(name, monkeypatch):
    kernel = KERNELS[name]
    function = getattr(importlib.import_module(kernel.module), kernel.op)
    fakes = {"require_hopper": lambda interpret=None: None, "multiprocessors": lambda: 132}
    for path, module in list(sys.modules.items()):
        for fake in fakes:
            if path.startswith("pallas_kernels.") and hasattr(module, fake):
                monkeypatch.setattr(module, fake, fakes[fake])

    def layers(count):
        def run(arrays):
            return [function(**arrays, **kernel.options) for _ in range(count)]

        return jax.jit(run).trace(kernel.arrays).lower(lowering_platforms=("cuda",)).as_text()

    kernels = layers(1).count("custom_call @mosaic_gpu")
    assert kernels >= 1
    assert layers(2).count("custom_call @mosaic_gpu") == kernels
