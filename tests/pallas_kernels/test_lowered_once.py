"""A kernel takes Python about a second to lower: the layers of a model must share that."""

import importlib
import sys

import jax
import pytest

from tests.pallas_kernels.test_hopper_compile import KERNELS


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("mla_decode h128 sq1", 2),
        ("mla_decode_float8 h128 sq1", 2),
        ("mla_prefill 8192", 1),
        ("grouped_matmul bf16 gate_up 16 rows", 1),
        ("grouped_matmul fp8 by bf16 gate_up 4 rows", 1),
        ("grouped_swiglu bf16 2048 wide, 4 rows", 1),
        ("route 64 tokens", 1),
    ],
)
def test_two_layers_lower_a_kernel_once(name, kernels, monkeypatch):
    kernel = KERNELS[name]
    function = getattr(importlib.import_module(kernel.module), kernel.op)
    fakes = {"require_hopper": lambda interpret=None: None, "multiprocessors": lambda: 132}
    for path, module in list(sys.modules.items()):
        for fake in fakes:
            if path.startswith("pallas_kernels.") and hasattr(module, fake):
                monkeypatch.setattr(module, fake, fakes[fake])

    def layers(arrays):
        return [function(**arrays, **kernel.options) for _ in range(2)]

    text = jax.jit(layers).trace(kernel.arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels
