"""Every Hopper kernel compiles for sm_90a without a GPU, and without register spills.

The test reads ptxas' report on each kernel. It must have no spills except those in MOST_SPILLED,
and no warning that ptxas serializes wgmma. It needs JAX's CUDA plugin and ptxas. With nvdisasm too,
it counts the instructions of the main loops. A program that these compilers have compiled before,
according to the record, is only lowered (``known_programs.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention_inputs.reference import AttentionWeights
from pallas_kernels.decoder_layer.reference import Projection
from pallas_kernels.grouped_matmul.dense_plan import MANY_TOKENS_FLOAT8, choose_config
from pallas_kernels.grouped_matmul.few_tokens_plan import Config as FewTokens
from pallas_kernels.grouped_swiglu.mosaic_gpu import STAGING_BUFFERS
from pallas_kernels.route.reference import Rule
from tests.pallas_kernels.decoder_layer_cases import Layer, rule, shape_in_format
from tests.pallas_kernels.known_programs import (
    RECORD,
    installed_versions,
    known_programs,
    program_digest,
    ptxas_version,
)
from tests.support.machine_code import (
    digest,
    disassemble,
    listing_of,
    main_loops,
    nvdisasm,
    ptx_of,
    unfinished_loads,
)

MOST_SECONDS = 20  # CPU seconds to compile one kernel
# Bytes stored or loaded, by prefix of the kernel's name. If several queries do not fill a pair of
# tiles, mla_decode's score warpgroups keep the mask's operands. Over a float8 cache, two warpgroups
# have 128 accumulators and the scores of a block. With 384 experts and 16 choices, route has one
# register too few.
MOST_SPILLED = {
    "mla_decode_float8 ": 400,
    "mla_decode h64 sq3": 64,
    "route most tokens and choices": 4,
}
# Instructions per tensor core instruction of a main loop, relative to the record. ptxas schedules
# the same work differently from version to version.
MOST_INSTRUCTIONS = 1.03
# Kernels, by name, that use what they load from shared memory before they release it.
FINISHES_LOADS = re.compile("w4a8|(int8|int4|fp8) by bf16|^feed_forward")
FRAME = re.compile(r"stack frame, (\d+) bytes spill stores, (\d+) bytes")
# ptxas' warnings. C7519, that it inserted the start of a wgmma group, costs nothing.
SERIALIZED = re.compile(r"\(C75(?:0\d|1[0-8])\).*")
# These operations rank signed numbers. Some of Mosaic GPU's selects lose the sign, unlike the
# interpreter.
SIGNED = ("route", "top_k", "decoder_layer")
UNSIGNED = re.compile(r"\bmax\.u32\b")
FP8, BF16, F32, I32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32, jnp.int32
WIDTHS = {"gate_up": (4096, 7168), "down": (7168, 2048)}  # N, K of the experts in DeepSeek-V3

Struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compilation: a back-end's module, and the arguments of its function."""

    module: str
    arrays: dict[str, Any]
    """Shapes by argument; trees of them are allowed."""
    options: dict[str, Any]
    devices: int = 1
    """Devices along axis ``x``, over which the first dimension of every array is sharded."""
    function: str | None = None
    """The function's name, by default the operation's."""

    @property
    def op(self) -> str:
        return self.module.removeprefix("tests.").split(".")[1]


def decode(
    queries: int, heads: int, rows: int = 64, pages: int = 64, float8: bool = False, **options: Any
) -> Kernel:
    width, dtype = (656, jnp.uint8) if float8 else (576, BF16)
    return Kernel(
        "pallas_kernels.mla_decode.mosaic_gpu",
        {
            "q_latent": Struct((rows, queries, heads, 512), BF16),
            "q_rope": Struct((rows, queries, heads, 64), BF16),
            "pages": Struct((rows * pages, 64, width), dtype),
            "block_tables": Struct((rows, pages), I32),
            "lengths": Struct((rows,), I32),
        },
        {"scale": 192**-0.5, **options},
    )


def prefill(
    queries: int,
    keys: int,
    K: int = 192,
    V: int = 128,
    rows: int = 1,
    heads: int = 128,
) -> Kernel:
    return Kernel(
        "pallas_kernels.mla_prefill.mosaic_gpu",
        {
            "q": Struct((rows, queries, heads, K), BF16),
            "k": Struct((rows, keys, heads, K), BF16),
            "v": Struct((rows, keys, heads, V), BF16),
            "starts": Struct((rows,), I32),
            "lengths": Struct((rows,), I32),
        },
        {"scale": K**-0.5},
    )


def prefill_gradient(
    tokens: int, K: int = 192, V: int = 128, rows: int = 1, heads: int = 128, lengths: bool = False
) -> Kernel:
    arrays = {name: Struct((rows, tokens, heads, K), BF16) for name in "qk"}
    arrays |= {name: Struct((rows, tokens, heads, V), BF16) for name in ("v", "out", "d_out")}
    arrays["lse"] = Struct((rows, tokens, heads), F32)
    options: dict[str, Any] = {"starts": None, "d_lse": None, "scale": K**-0.5}
    if lengths:
        arrays["lengths"] = Struct((rows,), I32)
    else:
        options["lengths"] = None
    module = "pallas_kernels.mla_prefill.mosaic_gpu_gradient"
    return Kernel(module, arrays, options, function="gradients")


def grouped(rows: int, groups: int, N: int, K: int, dtype: Any, **options: Any) -> Kernel:
    """grouped_matmul with ``rows`` rows per group, and float8 or bfloat16 operands."""
    M, blocks = rows * groups, -(-K // 128)
    arrays = {
        "lhs": Struct((M, K), dtype),
        "rhs": Struct((groups, N, K), dtype),
        "group_sizes": Struct((groups,), I32),
    }
    if dtype == FP8:
        arrays["lhs_scale"] = Struct((M, blocks), F32)
        arrays["rhs_scale"] = Struct((groups, -(-N // 128), blocks), F32)
    return Kernel("pallas_kernels.grouped_matmul.mosaic_gpu", arrays, options)


def matmul_gradient(of: str, N: int, K: int, pairs: int = 1) -> Kernel:
    """A gradient of grouped_matmul with 1,536 rows in each of 64 groups."""
    M, sizes = 64 * 1536, Struct((64,), I32)
    d_out, matrices = Struct((M, N), BF16), Struct((64, N, K), BF16)
    arrays: dict[str, Any] = {"d_out": d_out, "lhs": Struct((M, K), BF16), "group_sizes": sizes}
    if of == "rows":
        arrays = {"d_outs": (d_out,) * pairs, "matrices": (matrices,) * pairs, "group_sizes": sizes}
    module = "pallas_kernels.grouped_matmul.gradients"
    return Kernel(module, arrays, {}, function=f"{of}_gradient")


def swiglu(rows: int, groups: int, F: int, K: int, dtype: Any, **options: Any) -> Kernel:
    """grouped_swiglu with the arguments of ``grouped``."""
    arrays = dict(grouped(rows, groups, F, K, dtype).arrays)
    arrays["gate"] = arrays["up"] = arrays.pop("rhs")
    if dtype == FP8:
        arrays["gate_scale"] = arrays["up_scale"] = arrays.pop("rhs_scale")
    return Kernel("pallas_kernels.grouped_swiglu.mosaic_gpu", arrays, options)


def swiglu_under_gradient(rows: int, groups: int, F: int, K: int) -> Kernel:
    """grouped_swiglu of bfloat16 that stores both sums too, with the arguments of ``grouped``."""
    M, sizes = rows * groups, Struct((groups,), I32)
    matrices = (Struct((groups, F, K), BF16),) * 2
    arrays = {"lhs": Struct((M, K), BF16), "matrices": matrices, "group_sizes": sizes}
    config = choose_config(M, groups, F, K, False, 2)
    config = dataclasses.replace(config, staging_buffers=STAGING_BUFFERS)
    module = "pallas_kernels.grouped_matmul.dense"
    return Kernel(module, arrays, {"config": config}, function="swiglu_and_sums")


def few_tokens(rows: int, groups: int, N: int, K: int, form: str, **options: Any) -> Kernel:
    """grouped_matmul with ``rows`` bfloat16 rows per group and quantized matrices."""
    dtype, columns = {"int8": (jnp.int8, K), "int4": (jnp.uint8, K // 2), "fp8": (FP8, K)}[form]
    block = {"int8": (1, K), "int4": (1, 128), "fp8": (128, 128)}[form]
    return Kernel(
        "pallas_kernels.grouped_matmul.mosaic_gpu",
        {
            "lhs": Struct((rows * groups, K), BF16),
            "rhs": Struct((groups, N, columns), dtype),
            "group_sizes": Struct((groups,), I32),
            "rhs_scale": Struct((groups, -(-N // block[0]), -(-K // block[1])), F32),
        },
        {"block_shape": block, **options},
    )


def w4a8(rows: int, groups: int, N: int, K: int) -> Kernel:
    """grouped_matmul with ``rows`` float8 rows per group, and int4 matrices."""
    arrays = dict(few_tokens(rows, groups, N, K, "int4").arrays)
    arrays["lhs"] = Struct((rows * groups, K), FP8)
    arrays["lhs_scale"] = Struct((rows * groups, K // 128), F32)
    options = {"block_shape": (1, 128)}
    return Kernel("pallas_kernels.grouped_matmul.mosaic_gpu", arrays, options)


def few_tokens_swiglu(rows: int, groups: int, F: int, K: int, form: str) -> Kernel:
    """grouped_swiglu with the arguments of ``few_tokens``."""
    one_matrix = few_tokens(rows, groups, F, K, form)
    arrays = dict(one_matrix.arrays)
    arrays["gate"] = arrays["up"] = arrays.pop("rhs")
    arrays["gate_scale"] = arrays["up_scale"] = arrays.pop("rhs_scale")
    return Kernel("pallas_kernels.grouped_swiglu.mosaic_gpu", arrays, one_matrix.options)


def routed(tokens: int, experts: int, K: int, groups: int, topk_groups: int) -> Kernel:
    """DeepSeek-V3's routing, with padding among the tokens."""
    rule = Rule(K, groups, topk_groups, "noaux_tc", "sigmoid", normalize=True, scaling_factor=2.5)
    arrays = {
        "logits": Struct((tokens, experts), F32),
        "bias": Struct((experts,), F32),
        "valid": Struct((tokens,), jnp.bool_),
    }
    return Kernel("pallas_kernels.route.mosaic_gpu", arrays, {"rule": rule})


def sparse_decode(queries: int, heads: int, rows: int = 64, float8: bool = False) -> Kernel:
    """sparse_mla_decode of 2,048 tokens per query."""
    dense = decode(queries, heads, rows, float8=float8).arrays
    arrays = {name: x for name, x in dense.items() if name != "lengths"}
    arrays["indices"] = Struct((rows, queries, 2048), I32)
    return Kernel("pallas_kernels.sparse_mla_decode.mosaic_gpu", arrays, {"scale": 192**-0.5})


def sparse_prefill(queries: int, heads: int, keys: int) -> Kernel:
    """sparse_mla_prefill of one sequence with 2,048 tokens per query."""
    arrays = {
        "q_latent": Struct((1, queries, heads, 512), BF16),
        "q_rope": Struct((1, queries, heads, 64), BF16),
        "latents": Struct((1, keys, 576), BF16),
        "indices": Struct((1, queries, 2048), I32),
    }
    return Kernel(
        "pallas_kernels.sparse_mla_decode.mosaic_gpu",
        arrays,
        {"scale": 192**-0.5},
        function="sparse_mla_prefill",
    )


def index(
    queries: int, rows: int, pages: int, dtype: Any, heads: int = 64, **options: Any
) -> Kernel:
    """sparse_index of ``rows`` sequences with ``pages`` pages each."""
    arrays = {
        "q": Struct((rows, queries, heads, 128), dtype),
        "weights": Struct((rows, queries, heads), F32),
        "pages": Struct((rows * pages, 64, 128), dtype),
        "block_tables": Struct((rows, pages), I32),
        "lengths": Struct((rows,), I32),
    }
    if dtype == FP8:
        arrays["pages"] = Struct((rows * pages, 66, 128), jnp.uint8)
        options["page_size"] = 64
    return Kernel("pallas_kernels.sparse_index.mosaic_gpu", arrays, options)


def selection(rows: int, S: int, k: int = 2048, lengths: bool = False) -> Kernel:
    """Returns top_k for a batch of ``rows`` rows of S scores, with an array of lengths if asked."""
    arrays = {"scores": Struct((rows, S), F32)}
    if lengths:
        arrays["lengths"] = Struct((rows,), I32)
    return Kernel("pallas_kernels.top_k.mosaic_gpu", arrays, {"k": k})


def kernels() -> dict[str, Kernel]:
    """Returns all kernels that must compile. A new kernel or setting is a line here."""
    table = {
        f"mla_decode h{heads} sq{queries}": decode(queries, heads)
        for heads, queries in [(128, 1), (128, 2), (128, 4), (64, 1), (64, 2), (40, 1)]
    }
    table |= {
        f"mla_decode_few h{heads} sq{queries}": decode(queries, heads)
        for heads, queries in [(16, 1), (16, 2), (8, 1), (8, 3), (32, 1)]
    }
    # One long sequence.
    table["mla_decode_few one row"] = decode(1, 16, rows=1, pages=1024)
    table["mla_decode one row"] = decode(1, 128, rows=1, pages=1024)
    # A last tile that is not full, and three tiles.
    table |= {
        f"mla_decode h{heads} sq{queries}": decode(queries, heads)
        for heads, queries in [(16, 5), (64, 3)]
    }
    table |= {
        f"mla_decode_float8 h{heads} sq{queries}": decode(queries, heads, float8=True)
        for heads, queries in [(64, 1), (64, 3), (40, 1)]
    }
    table |= {
        f"mla_decode_float8_pairs h{heads} sq{queries}": decode(queries, heads, float8=True)
        for heads, queries in [(128, 1), (128, 2), (128, 4), (16, 5)]
    }
    table |= {
        f"mla_decode_scored h{heads} sq{queries}": decode(queries, heads, float8=True)
        for heads, queries in [(16, 1), (16, 2), (8, 1), (8, 3)]
    }
    # One tile, two tiles, a last tile that is not full, and queries that are split.
    table |= {
        f"sparse_mla_decode h{heads} sq{queries}": sparse_decode(queries, heads)
        for heads, queries in [(128, 1), (128, 2), (64, 1), (16, 5), (40, 1)]
    }
    table |= {
        f"sparse_mla_decode_float8 h{heads} sq{queries}": sparse_decode(queries, heads, float8=True)
        for heads, queries in [(128, 1), (16, 5)]
    }
    table["sparse_mla_decode one row"] = sparse_decode(1, 128, rows=1)
    for name, dtype in (("fp8", FP8), ("bf16", BF16)):
        for queries, rows, pages in [(1, 64, 512), (2, 64, 512), (5, 64, 64), (4096, 1, 512)]:
            shape = f"sparse_index {name} {rows}x{queries} of {pages} pages"
            table[shape] = index(queries, rows, pages, dtype)
    table["sparse_index fp8 64x4 of 512 pages"] = index(4, 64, 512, FP8)
    table["sparse_mla_prefill h128 4096"] = sparse_prefill(4096, 128, 32768)
    table |= {
        "top_k 64 rows of 32768": selection(64, 32768),
        "top_k one row of 163840": selection(1, 163840),
        "top_k k 2000": selection(8, 100_000, k=2000),
        "top_k lengths": selection(64, 32768, lengths=True),
    }
    for W in (129280, 163840):  # chunks of 256 columns, and of 512
        arrays = {
            "logits": Struct((2048, W), BF16),
            "targets": Struct((2048,), I32),
            "weights": Struct((2048,), F32),
        }
        table[f"cross_entropy {W}"] = Kernel("pallas_kernels.cross_entropy.mosaic_gpu", arrays, {})
    table |= {
        "mla_prefill 8192": prefill(8192, 8192),
        "mla_prefill 2048 over 8192": prefill(2048, 8192),
        "mla_prefill 128 wide": prefill(2048, 2048, K=128, V=128),
        "mla_prefill 64 wide": prefill(2048, 2048, K=64, V=64),
        "mla_prefill 8 rows h16": prefill(2048, 2048, rows=8, heads=16),
        "mla_prefill 8 rows": prefill(2048, 2048, rows=8),
        "mla_prefill gradient 4 rows h16": prefill_gradient(4096, rows=4, heads=16),
        "mla_prefill gradient 8192": prefill_gradient(8192),
        "mla_prefill gradient lengths": prefill_gradient(1000, rows=8, heads=16, lengths=True),
        "mla_prefill gradient 128 wide": prefill_gradient(2048, K=128, V=128),
    }
    for width, (N, K) in WIDTHS.items():
        for name, dtype in (("fp8", FP8), ("bf16", BF16)):
            for rows in (16, 4096):
                shape = f"grouped_matmul {name} {width} {rows} rows"
                table[shape] = grouped(rows, 8, N, K, dtype)
        for form in ("int8", "int4", "fp8"):
            for rows in (1, 4, 16, 64) if width == "gate_up" else (4,):
                shape = f"grouped_matmul {form} by bf16 {width} {rows} rows"
                table[shape] = few_tokens(rows, 8, N, K, form)
    for form in ("int8", "int4", "fp8"):
        for rows, groups in ((1, 8), (16, 8), (1, 1), (64, 1)):
            shape = f"grouped_swiglu {form} by bf16 {groups} groups {rows} rows"
            table[shape] = few_tokens_swiglu(rows, groups, 2048, 7168, form)
        # DeepSeek-V3's q_a_proj: split-K.
        for rows in (1, 64):
            table[f"grouped_matmul {form} by bf16 q_a_proj {rows} rows"] = few_tokens(
                rows, 1, 1536, 7168, form
            )
    # Columns that are permuted, and others that are not.
    for name, form, rows, config in FEW_TOKENS:
        shape = f"grouped_matmul {form} by bf16 {rows} rows, {name}"
        table[shape] = few_tokens(rows, 8, 4096, 7168, form, config=config)
    table |= {f"grouped_matmul w4a8 {rows} rows": w4a8(rows, 8, 4096, 7168) for rows in (64, 4096)}
    # One matrix: warpgroups share a tile.
    for form in ("int8", "int4", "fp8"):
        for rows in (1, 16, 64):
            table[f"grouped_matmul {form} by bf16 one matrix {rows} rows"] = few_tokens(
                rows, 1, 7168, 2048, form
            )
    for name, dtype in (("fp8", FP8), ("bf16", BF16)):
        for N in (128, 64, 576):
            table[f"grouped_matmul {name} {N} wide"] = grouped(256, 8, N, 1024, dtype)
            table[f"grouped_matmul {name} {N} wide, few rows"] = grouped(4, 8, N, 1024, dtype)
        for F, K in ((2048, 7168), (64, 1024)):
            for rows in (4, 4096):
                shape = f"grouped_swiglu {name} {F} wide, {rows} rows"
                table[shape] = swiglu(rows, 8, F, K, dtype)
    for N, K in WIDTHS.values():
        # K is not a multiple of four steps.
        shape = f"grouped_matmul fp8 {N}x{K} 4096 rows, rolled"
        table[shape] = grouped(4096, 8, N, K, FP8, config=MANY_TOKENS_FLOAT8[0])
    shape = "grouped_swiglu fp8 2048 wide, 4096 rows, rolled"
    table[shape] = swiglu(4096, 8, 2048, 7168, FP8, config=MANY_TOKENS_FLOAT8[0])
    N, K = WIDTHS["gate_up"]  # with too few rows for pairs of blocks
    table["grouped_matmul fp8 gate_up 1024 rows"] = grouped(1024, 8, N, K, FP8)
    table["grouped_swiglu fp8 2048 wide, 1024 rows"] = swiglu(1024, 8, N // 2, K, FP8)
    for N, K in ((2816, 2048), (2048, 1408)):  # tiles of 128 x 256, and of 256 x 128
        for of in ("rows", "matrices"):
            table[f"grouped_matmul {of} gradient {N}x{K}"] = matmul_gradient(of, N, K)
    for rows, groups, F, K in ((1536, 64, 1408, 2048), (4096, 8, 64, 1024), (4, 8, 2048, 2048)):
        shape = f"grouped_swiglu under gradient {F} wide, {rows} rows"
        table[shape] = swiglu_under_gradient(rows, groups, F, K)
    table["grouped_matmul rows gradient of two"] = matmul_gradient("rows", 1408, 2048, pairs=2)
    for D in (2048, 7168):
        row = {"x": Struct((1, D), BF16), "weight": Struct((D,), BF16)}
        table[f"rms_norm of {D}"] = Kernel("pallas_kernels.rms_norm.mosaic_gpu", row, {"eps": 1e-6})
    for D, dtype in ((2048, BF16), (7168, BF16), (7168, FP8)):
        rows = {"x": Struct((512, D), dtype), "rows": Struct((4096,), jnp.int32)}
        name = f"gather_rows of {D} {dtype.__name__}"
        table[name] = Kernel("pallas_kernels.gather_rows.mosaic_gpu", rows, {})
    table |= {
        "route 64 tokens": routed(64, 256, 8, 8, 4),
        "route one token": routed(1, 64, 6, 1, 1),
        "route 128 tokens": routed(128, 384, 8, 8, 4),
        "route 512 tokens": routed(512, 384, 8, 8, 4),
        "route 2304 tokens": routed(2304, 64, 6, 1, 1),
        "route most tokens": routed(16384, 384, 8, 8, 4),
        "route most tokens and choices": routed(16384, 384, 16, 8, 4),
        "route most choices": routed(64, 384, 16, 8, 4),
        "route groups of 20": routed(4, 160, 6, 8, 3),
        "route 16 experts": routed(2, 16, 4, 4, 2),
    }
    for devices in (2, 4):
        # 64 tokens of DeepSeek-V3, with their routing.
        rows = {
            "rows": Struct((devices * devices, 64, 7200), jnp.uint16),
            "counts": Struct((devices * devices,), I32),
        }
        table[f"token_exchange {devices} devices"] = Kernel(
            "pallas_kernels.token_exchange.mosaic_gpu", rows, {"axes": ("x",)}, devices
        )
    for checked in (False, True):
        words = "with words" if checked else "alone"
        options = {"programs": 132, "rounds": 1000, "checked": checked}
        arrays = {"counter": Struct((1,), I32)}
        table[f"grid_barrier {words}"] = Kernel(
            "tests.pallas_kernels.grid_barrier_kernel", arrays, options, function="grid_barrier"
        )
    table |= {f"feed_forward {name}": layer for name, layer in feed_forward_layers().items()}
    eps = {"eps": 1e-5, "latent_eps": 1e-6}
    for name, arrays in before_attention_layers().items():
        table[f"attention_inputs {name}"] = Kernel(
            "pallas_kernels.attention_inputs.mosaic_gpu", arrays, eps
        )
    return table


# Settings that are not the default: name, format of the matrices, and rows per group.
FEW_TOKENS = (
    ("in order", "int8", 16, FewTokens(4, (8, 16, 32), tokens_in_order=True)),
    ("permuted", "int8", 1, FewTokens(4, (8,), 4)),
)


def before_attention_layers() -> dict[str, dict[str, Any]]:
    """Returns the shapes of attention_inputs' arguments in Moonlight, DeepSeek-V3 and the demo."""
    moonlight, v3 = (2048, 0, 16), (7168, 1536, 128)
    layers = {"moonlight": before_attention(1, BF16, *moonlight)}
    for tokens in (1, 5):
        layers[f"demo {tokens} tokens"] = before_attention(
            tokens, BF16, 256, 128, 4, nope=64, rope=32, rank=128
        )
    for name, weights, tokens in (
        ("moonlight", "fp8", 1), ("v3", "fp8", 1), ("v3", "fp8", 4), ("moonlight", "int4", 1),
        ("moonlight", "int4", 8), ("moonlight", "int8", 1), ("v3", "int4", 1),
    ):  # fmt: skip
        dtype = FP8 if weights == "fp8" else weights
        sizes = moonlight if name == "moonlight" else v3
        layers[f"{name} {weights} {tokens} tokens"] = before_attention(tokens, dtype, *sizes)
    return layers


def before_attention(
    tokens: int, dtype: Any, width: int, q_rank: int, heads: int, *,
    nope: int = 128, rope: int = 64, rank: int = 512,
) -> dict[str, Any]:  # fmt: skip
    """Returns the shapes of attention_inputs' arguments, with 64 pages of 64 tokens."""
    weights = AttentionWeights(
        norm=Struct((width,), BF16),  # pyright: ignore
        q_proj=projection(heads * (nope + rope), q_rank or width, dtype),
        kv_a_proj=projection(rank + rope, width, dtype),
        kv_a_norm=Struct((rank,), BF16),  # pyright: ignore
        w_uk=Struct((heads, nope, rank), BF16),  # pyright: ignore
    )
    if q_rank:
        norm: Any = Struct((q_rank,), BF16)
        weights = weights._replace(q_a_proj=projection(q_rank, width, dtype), q_a_norm=norm)
    angles = Struct((tokens, rope // 2), F32)
    return {
        "x": Struct((tokens, width), BF16),
        "weights": weights,
        "cos": angles,
        "sin": angles,
        "pages": Struct((64, 64, rank + rope), BF16),
        "slots": Struct((tokens,), I32),
    }


def projection(rows: int, width: int, dtype: Any) -> Projection:
    weights = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    return Projection(*shape_in_format((rows, width), weights))


def feed_forward_layers() -> dict[str, Kernel]:
    """Returns the layers of Moonlight, DeepSeek-V3 and the demo, for few and for many tokens."""
    float8 = "float8_e4m3fn"
    o_proj = Layer(1, 2048, 2816, 1408, 64, rule(6), "bfloat16", "bfloat16", 2048)
    w_uv = dataclasses.replace(o_proj, heads=16, latent=512)
    v3 = Layer(1, 7168, 2048, 2048, 256, rule(8, 8, 4), "bfloat16", float8, 16384, 128, 512)
    layers = {
        "moonlight o_proj": o_proj,
        "moonlight w_uv": w_uv,
        "moonlight parts": dataclasses.replace(w_uv, split=(2,)),
        "moonlight 8 tokens parts": dataclasses.replace(w_uv, tokens=8, split=(2,) * 8),
    }
    for tokens in (1, 5):  # 16 experts, and heads of 64
        layers[f"demo {tokens} tokens"] = Layer(
            tokens, 256, 128, 128, 16, rule(4, 4, 2), "bfloat16", "bfloat16", attention=256,
            heads=4, latent=128,
        )  # fmt: skip
    for tokens in (1, 4):
        layers[f"v3 fp8 {tokens} tokens"] = dataclasses.replace(v3, tokens=tokens)
    for name, weights, tokens in (
        ("moonlight", "int4", 1), ("moonlight", "int4", 8), ("moonlight", "int8", 1),
        ("v3", "int4", 1),
    ):  # fmt: skip
        layer = w_uv if name == "moonlight" else v3
        layers[f"{name} {weights} {tokens} tokens"] = dataclasses.replace(
            layer, weights=weights, tokens=tokens, split=(2,) * tokens
        )
    layers["moonlight dense int4 1 tokens"] = Layer(
        1, 2048, 11264, 0, 0, None, "bfloat16", "int4", 2048, 16, 512, (2,)
    )
    return {
        name: Kernel(
            "pallas_kernels.decoder_layer.mosaic_gpu",
            layer.shapes(),
            layer.options,
            function="feed_forward",
        )
        for name, layer in layers.items()
    }


KERNELS = kernels()
# XLA's own fusions around a kernel are not looked at. Without a device it would compile each in
# several ways and choose none of them by its time.
XLA_OPTIONS = "--xla_gpu_autotune_level=0"
# Most kernels first: xdist's other processes then compile the rest meanwhile.
OPS = [op for op, _ in Counter(kernel.op for kernel in KERNELS.values()).most_common()]


# ---- the child process, which has no compilation cache and records ptxas' output -----------------


def compile_all(op: str, directory: Path) -> dict[str, dict[str, Any]]:
    """Returns ``{"program", "seconds", "report"}`` or ``{"error"}`` by kernel name.

    A program is the digest of the lowered program, a report the PTX and what ptxas prints. A kernel
    whose program is in the file ``known.json`` is not compiled: its result is what the file has.
    """
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    described = Path(__file__).with_name("h200.pbtxt").read_text()

    def split_over(devices: int) -> NamedSharding:
        shape = f"1x1x{devices}"
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name=shape, topology=shape, target_config=described
        )
        return NamedSharding(Mesh(np.array(topology.devices), ("x",)), PartitionSpec("x"))

    known = json.loads((directory / "known.json").read_text())
    results = {}
    # Printed rather than dumped: writing all of Mosaic GPU's dumps takes longer than compiling.
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    for number, (name, kernel) in enumerate(KERNELS.items()):
        if kernel.op == op:
            output = directory / f"{number}.txt"
            try:
                began = cpu_seconds()
                lowered = lower(kernel, split_over(kernel.devices))
                program = program_digest(lowered)
                before = known.get(name, {})
                if before.get("program") == program and (op not in SIGNED or "unsigned" in before):
                    results[name] = before
                    continue
                with stdout_to(output):
                    lowered.compile()
                seconds = cpu_seconds() - began
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
                continue
            report = output.read_text()
            results[name] = {"program": program, "seconds": seconds, "report": report}
            if op in SIGNED:
                results[name]["unsigned"] = len(UNSIGNED.findall(report))
    return results


@contextlib.contextmanager
def stdout_to(path: Path) -> Iterator[None]:
    """Redirects the process' standard output to a file, including that of compiled libraries."""
    libc, stdout = ctypes.CDLL(None), os.dup(1)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            libc.fflush(None)
            os.dup2(stdout, 1)
            os.close(stdout)


def lower(kernel: Kernel, sharding: Any) -> jax.stages.Lowered:
    function = backend(kernel)
    arrays = jax.tree.map(
        lambda x: Struct(x.shape, x.dtype, sharding=sharding), dict(kernel.arrays)
    )

    def run(arrays: dict[str, jax.Array]) -> Any:
        return function(**arrays, **kernel.options)

    if kernel.devices > 1:
        mesh, split = sharding.mesh, sharding.spec
        run = jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    return jax.jit(run).lower(arrays)


def cpu_seconds() -> float:
    """Returns CPU seconds of this process and its children, independent of other processes."""
    users = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in users)


def backend(kernel: Kernel) -> Callable[..., Any]:
    """Returns the back-end's function, with the check for a Hopper GPU disabled."""
    module = importlib.import_module(kernel.module)
    for name, other in list(sys.modules.items()):
        if name.startswith("pallas_kernels.") and hasattr(other, "require_hopper"):
            vars(other)["require_hopper"] = lambda interpret=None: None
    return getattr(module, kernel.function or kernel.op)


# ---- the tests -----------------------------------------------------------------------------------


def reason_to_skip() -> str | None:
    version = tuple(int(x) for x in jax.__version__.split(".")[:2])
    if version < (0, 11):
        return "needs jax 0.11"
    if not installed_versions("jax-cuda12-plugin", "jax-cuda13-plugin"):
        return "needs JAX's CUDA plugin: jax-cuda13-plugin and jax-cuda13-pjrt"
    wheels = installed_versions("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")
    if shutil.which("ptxas") is None and not wheels:
        return "needs ptxas: CUDA's, or the package nvidia-cuda-nvcc"
    return None


def compile_in_child(
    op: str, directory: Path, known: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Runs :func:`compile_all` in a process of its own.

    Args:
      known: results of programs that need not be compiled again, by kernel.
    """
    (directory / "known.json").write_text(json.dumps(known))
    without = {"XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"}
    run = subprocess.run(
        [sys.executable, __file__, op, str(directory)],
        env={name: value for name, value in os.environ.items() if name not in without}
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "XLA_FLAGS": XLA_OPTIONS,
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads((directory / "results.json").read_text())


# One test with two parts, so that the kernels are compiled once.
@pytest.mark.skipif(bool(reason_to_skip()), reason=str(reason_to_skip()))
@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("op", OPS)
def test_kernels(op, tmp_path, subtests):
    known = known_programs(json.loads(RECORD.read_text()), XLA_OPTIONS)
    compiled = compile_in_child(op, tmp_path, known)
    with subtests.test("no kernel spills registers"):
        faults = []
        for name, result in compiled.items():
            print(f"{name}: {result.get('seconds', 0):.1f} s")
            faults += [f"{name}: {fault}" for fault in faults_of(result, most_spilled(name))]
        assert not faults, "\n".join(faults)
    with subtests.test("main loops have the recorded number of instructions"):
        if nvdisasm() is None:
            pytest.skip("needs nvdisasm: the package nvidia-cuda-nvdisasm")
        faults = instruction_faults(compiled)
        assert not faults, "\n".join(faults)
    with subtests.test("scales have been loaded before their buffer is released"):
        if nvdisasm() is None:
            pytest.skip("needs nvdisasm: the package nvidia-cuda-nvdisasm")
        faults = load_faults(compiled)
        assert not faults, "\n".join(faults)


def instruction_faults(compiled: dict[str, dict[str, Any]]) -> list[str]:
    """Compares kernels with the record.

    ``python -m scripts.record_machine_code`` records the numbers of a changed kernel.
    """
    recorded, same_ptxas = record_and_whether_of_this_ptxas()
    faults = []
    for name, result in compiled.items():
        for entry, ptx in ptx_of(result.get("report", "")).items():
            before = recorded.get(name, {}).get(entry)
            if before is None:
                faults.append(f"{name}: expected a record of {entry}, got none")
            elif not (same_ptxas and before["ptx"] == digest(ptx)):
                loops = main_loops(disassemble(ptx))
                counts = [(loop.instructions, loop.tensor) for loop in loops]
                faults += [f"{name}: {fault}" for fault in loop_faults(before["loops"], counts)]
    return faults


def load_faults(compiled: dict[str, dict[str, Any]]) -> list[str]:
    """Returns loads that may be unfinished at an arrival, of kernels that wait for all loads.

    PTX that the record has, with the number of its loads, is not disassembled again.
    """
    recorded, same_ptxas = record_and_whether_of_this_ptxas()
    faults = []
    for name, result in compiled.items():
        if "spilled" in result and finishes_loads(name):
            faults += [
                f"{name}: expected a record that all loads of {entry} are finished"
                for entry, before in recorded[name].items()
                if before.get("unfinished_loads") != 0
            ]
        for entry, ptx in ptx_of(result.get("report", "")).items():
            before = recorded.get(name, {}).get(entry, {})
            is_known = same_ptxas and before.get("ptx") == digest(ptx)
            if finishes_loads(name) and not (is_known and before.get("unfinished_loads") == 0):
                faults += [
                    f"{name}: expected a use before an arrival at a barrier of {load}"
                    for load in unfinished_loads(listing_of(ptx))
                ]
    return faults


def finishes_loads(name: str) -> bool:
    """Returns whether a kernel, by its name, must finish its loads before an arrival."""
    return bool(FINISHES_LOADS.search(name))


def record_and_whether_of_this_ptxas() -> tuple[dict[str, Any], bool]:
    """Returns the recorded kernels, and whether the installed ptxas is the one that made them."""
    recorded = json.loads(RECORD.read_text())
    return recorded["kernels"], recorded["ptxas"] == ptxas_version()


def loop_faults(before: list[list[int]], after: list[tuple[int, int]]) -> list[str]:
    """Compares the main loops of a kernel, by instructions per tensor core instruction.

    Args:
      before: of each loop the instructions, conditional ones, and tensor core instructions.
      after: of each loop the instructions and tensor core instructions.
    """
    if len(before) != len(after):
        return [f"expected {len(before)} main loops, got {len(after)}"]
    return [
        f"expected {old}, got {new} instructions per {tensor} tensor core instructions"
        for (old, _, old_tensor), (new, tensor) in zip(before, after, strict=True)
        if new / tensor > MOST_INSTRUCTIONS * old / old_tensor
    ]


def test_a_longer_loop_is_a_fault():
    before = [[100, 20, 4], [300, 0, 8]]
    assert loop_faults(before, [(102, 4), (260, 8)]) == []
    assert loop_faults(before, [(198, 8), (300, 8)]) == []  # unrolled twice
    assert loop_faults(before, [(104, 4), (300, 8)]) == [
        "expected 100, got 104 instructions per 4 tensor core instructions"
    ]
    assert loop_faults(before, [(100, 4)]) == ["expected 2 main loops, got 1"]


PTX = "//\n// Generated by LLVM NVPTX Back-End\n//\n.visible .entry kernel()\n"
UNFINISHED = "        /*0010*/                   LDS R2, [R4] ;\n        /*0020*/  SYNCS.ARRIVE ;\n"


@pytest.mark.parametrize(
    ("row", "ptxas", "is_disassembled"),
    [
        ({"ptx": digest(PTX), "unfinished_loads": 0}, "13.0", False),
        ({"ptx": digest(PTX), "unfinished_loads": 1}, "13.0", True),
        ({"ptx": digest(PTX)}, "13.0", True),
        ({"ptx": "of other PTX", "unfinished_loads": 0}, "13.0", True),
        ({"ptx": digest(PTX), "unfinished_loads": 0}, "13.1", True),
    ],
)
def test_only_recorded_code_is_not_disassembled(row, ptxas, is_disassembled, tmp_path, monkeypatch):
    """Every other kernel that must finish its loads is looked at, and its fault reported."""
    record = tmp_path / "record.json"
    names = ["grouped_matmul w4a8 64 rows", "feed_forward v3", "route"]
    rows = {name: {"kernel": row} for name in names}
    record.write_text(json.dumps({"ptxas": "13.0", "kernels": rows}))
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "RECORD", record)
    monkeypatch.setattr(here, "ptxas_version", lambda: ptxas)
    monkeypatch.setattr(here, "listing_of", lambda ptx: UNFINISHED)
    faults = load_faults({name: {"report": PTX} for name in names})
    expected = names[:2] if is_disassembled else []
    assert [fault.partition(":")[0] for fault in faults] == expected


def most_spilled(name: str) -> int:
    """Returns the bytes that a kernel may store or load for lack of registers."""
    return next((n for start, n in MOST_SPILLED.items() if name.startswith(start)), 0)


def spilled(report: str) -> int:
    """Returns the most bytes of spill stores or loads in a report."""
    return max((int(n) for frame in FRAME.findall(report) for n in frame), default=0)


def faults_of(result: dict[str, Any], most_spilled: int = 0) -> list[str]:
    """Returns what a result of :func:`compile_all` should not have.

    A recorded result has the bytes of its spills instead of a report.
    """
    if "error" in result:
        return [result["error"]]
    faults = []
    if result.get("unsigned"):
        faults.append(f"{result['unsigned']} maxima of unsigned numbers")
    if "report" not in result:
        if result["spilled"] > most_spilled:
            faults.append(f"bytes of spill stores or loads: {result['spilled']}")
        return faults
    if result["seconds"] > MOST_SECONDS:
        faults.append(f"compiled for {result['seconds']:.0f} s, above {MOST_SECONDS}")
    frames = FRAME.findall(result["report"])
    if not frames:
        faults.append("ptxas reported nothing")
    if any(max(map(int, frame)) > most_spilled for frame in frames):
        faults.append(f"bytes of spill stores and loads: {frames}")
    if serialized := SERIALIZED.findall(result["report"]):
        faults.append(f"{len(serialized)} times {serialized[0]}")
    return faults


GOOD = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads (C7519) arrive is injected"


def test_a_good_report_has_no_faults():
    assert faults_of({"seconds": 19.0, "report": GOOD + GOOD}) == []
    assert faults_of({"program": "recorded", "spilled": 4, "unsigned": 0}, most_spilled=4) == []


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        ({"error": "ValueError: no"}, "ValueError: no"),
        ({"seconds": 21.0, "report": GOOD}, "for 21 s"),
        ({"seconds": 1.0, "report": "Compile time = 25 ms"}, "nothing"),
        ({"seconds": 1.0, "report": GOOD, "unsigned": 3}, "3 maxima"),
        (
            {"seconds": 1.0, "report": GOOD + GOOD.replace("0 bytes spill l", "8 bytes spill l")},
            "'8'",
        ),
        ({"seconds": 1.0, "report": f"(C7510) wgmma serialized {GOOD}"}, "C7510"),
        ({"program": "recorded", "spilled": 8}, "spill stores or loads: 8"),
        ({"program": "recorded", "spilled": 0, "unsigned": 3}, "3 maxima"),
    ],
)
def test_faults_are_seen(result, fault):
    assert any(fault in each for each in faults_of(result))


if __name__ == "__main__":
    results = compile_all(sys.argv[1], Path(sys.argv[2]))
    (Path(sys.argv[2]) / "results.json").write_text(json.dumps(results))
