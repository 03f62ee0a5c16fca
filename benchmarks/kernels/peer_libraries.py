"""The libraries of peer kernels, from the archive of :mod:`benchmarks.kernels.pack_peers`."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Tensor = torch.Tensor


@functools.cache
def flash_mla(directory: Path) -> Any:
    torch.ops.load_library(str(directory / "flash_mla.so"))
    return torch.ops._flashmla_C


@functools.cache
def flash_attention_3(directory: Path) -> Any:
    torch.ops.load_library(str(directory / "flash_attention_3.so"))
    return torch.ops._vllm_fa3_C


@functools.cache
def marlin(directory: Path) -> Any:
    torch.ops.load_library(str(directory / "moe.so"))
    return torch.ops._moe_C


@functools.cache
def deep_gemm(directory: Path) -> ModuleType:
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(directory / "jit"))
    for row_index in Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.1*"):
        ctypes.CDLL(str(row_index), mode=ctypes.RTLD_GLOBAL)  # torch loads its copy later, or never
    sys.path.insert(0, str(directory))
    return importlib.import_module("deep_gemm")


def jit_compiler(environment: Mapping[str, str]) -> str:
    """Returns the compiler that DeepGEMM's just-in-time compilation uses, by its own rule."""
    if environment.get("DG_JIT_USE_NVRTC", "0") != "0":
        return "nvrtc"
    return environment.get("DG_JIT_NVCC_COMPILER") or "nvcc"


def flash_attention(
    ops, q, k, v, q_v, starts_q, starts_k, lengths, T, S, tables, scale, plan
) -> Tensor:
    """Calls FlashAttention-3, whose operator takes everything by position."""
    out, *_ = ops.fwd(
        q, k, v, None, None, q_v, None, starts_q, starts_k, None, None, lengths, T, S, tables,
        None, None, None, None, None, None, None, None, scale, True, -1, -1, 0.0, True, plan,
        0, None, 0, None, 1, 0, None,
    )  # fmt: skip
    return out
