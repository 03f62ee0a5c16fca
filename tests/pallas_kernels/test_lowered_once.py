"""A kernel takes Python about a second to lower: layers and programs must share that."""

import importlib
import re
import sys

import jax
import pytest
from jax import export

from pallas_kernels.hopper import lowered_once
from tests.pallas_kernels.test_hopper_compile import KERNELS

KERNELS_OF = {
    "mla_decode h128 sq1": 2,
    "mla_decode_few h16 sq1": 2,
    "mla_decode_float8_pairs h128 sq1": 2,
    "mla_prefill 8192": 1,
    "grouped_matmul bf16 gate_up 16 rows": 1,
    "grouped_matmul fp8 by bf16 gate_up 4 rows": 1,
    "grouped_matmul w4a8 64 rows": 1,
    "grouped_swiglu bf16 2048 wide, 4 rows": 1,
    "route 64 tokens": 1,
    "rms_norm of 2048": 1,
    "gather_rows of 2048 bfloat16": 1,
    "sparse_mla_decode h128 sq1": 1,
    "top_k lengths": 1,
}
CALL = re.compile(r"stablehlo.custom_call @mosaic_gpu.*")


@pytest.fixture(params=KERNELS_OF)
def text_of(request, monkeypatch):
    """Returns a function: the text of a program with N calls of the operation."""
    kernel = KERNELS[request.param]
    function = getattr(importlib.import_module(kernel.module), kernel.op)
    fakes = {"require_hopper": lambda interpret=None: None, "multiprocessors": lambda: 132}
    for path, module in list(sys.modules.items()):
        for fake in fakes:
            if path.startswith("pallas_kernels.") and hasattr(module, fake):
                monkeypatch.setattr(module, fake, fakes[fake])

    def text(layers):
        def run(arrays):
            return [function(**arrays, **kernel.options) for _ in range(layers)]

        return jax.jit(run).trace(kernel.arrays).lower(lowering_platforms=("cuda",)).as_text()

    text.kernels = KERNELS_OF[request.param]
    return text


def test_layers_and_programs_lower_a_kernel_once(text_of, monkeypatch):
    two_layers = text_of(2)
    assert two_layers.count("custom_call @mosaic_gpu") == text_of.kernels
    assert two_layers.count("func.func private @call_exported_") == text_of.kernels

    def refuse(*args, **kwargs):
        raise AssertionError("a kernel is exported again")

    monkeypatch.setattr(export, "export", refuse)
    for layers in (1, 3):
        assert text_of(layers).count("custom_call @mosaic_gpu") == text_of.kernels


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="jax 0.10 exports an older version of Mosaic's code"
)
def test_the_exported_kernel_is_the_same(text_of, monkeypatch):
    exported = calls(text_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(lowered_once.Exports, "caller", plain_caller)
        jax.clear_caches()
        plain = text_of(1)
    jax.clear_caches()
    assert "call_exported" not in plain
    assert len(exported) == text_of.kernels
    assert exported == calls(plain)


def calls(text):
    """Returns each kernel's code, name, layouts and aliases, without the names of its operands."""
    kernels = [
        re.sub(r"%\w+(:\d+)?|backend_config = \"\", ", "", line) for line in CALL.findall(text)
    ]
    return sorted(kernels)


def plain_caller(exports, settings, arrays):
    return exports.of_leaves(settings, jax.tree.structure(arrays))
