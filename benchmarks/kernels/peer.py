"""A kernel to compare with, the libraries that have such kernels, and what the checks share."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.kernels.shapes import LATENT, ROPE

Tensor = torch.Tensor
Inputs = dict[str, Any]
LATENT_BLOCK = 128  # latent columns of a float8 cache that share a scale


@dataclasses.dataclass(frozen=True)
class Peer:
    """A kernel to compare with."""

    name: str
    prepare: Callable[[Inputs], Any]
    """Converts a case's inputs to the peer's arguments. Not timed."""
    call: Callable[[Any], Tensor]
    """Runs the kernel on the prepared arguments."""
    rows: Callable[[Any, Tensor], Tensor] = lambda prepared, out: out
    """Converts the output to the layout of this repository's op."""


class Random:
    """Random inputs, generated on the GPU."""

    def __init__(self, seed: int):
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        return x.normal_(generator=self.generator).to(dtype)

    def scale(self, *shape: int) -> Tensor:
        """Returns scales of quantized blocks."""
        return self.uniform(*shape, low=0.5, high=2.0) / 64

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        x = torch.empty(shape, device="cuda")
        return x.uniform_(low, high, generator=self.generator)


def softmax_of(scores: Tensor, last: Tensor) -> Tensor:
    """Softmax of scores [..., T, H, S] over the keys up to position ``last`` of each query."""
    s = torch.arange(scores.shape[-1], device="cuda")
    return scores.masked_fill(s > last[..., None, None], -torch.inf).softmax(-1)


def float8_tokens(pages: Tensor) -> Tensor:
    """Quantizes to [..., 656] bytes: float8 latent, float32 group scales, bfloat16 rope."""
    latent = pages[..., :LATENT].float().unflatten(-1, (-1, LATENT_BLOCK))
    scale = latent.abs().amax(-1, keepdim=True) / 448
    values = (latent / scale).to(torch.float8_e4m3fn).flatten(-2)
    parts = values, scale.squeeze(-1), pages[..., LATENT:].contiguous()
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def latent_of(tokens: Tensor) -> Tensor:
    """Dequantizes the result of :func:`float8_tokens` to float32 [..., 576]."""
    values, scale, rope = tokens.split([LATENT, 16, 2 * ROPE], -1)
    scale = scale.contiguous().view(torch.float32).repeat_interleave(LATENT_BLOCK, -1)
    latent = values.contiguous().view(torch.float8_e4m3fn).float() * scale
    return torch.cat([latent, rope.contiguous().view(torch.bfloat16).float()], -1)


# ---- libraries, from the archive of benchmarks.kernels.pack_peers --------------------------------


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
