"""The peers of mla_prefill: FlashAttention-3 and torch's own kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import peer_libraries as libraries
from benchmarks.kernels.peer import Inputs, Peer, Random, Tensor, softmax_of
from benchmarks.kernels.shapes import Prefill


def make(case: Prefill, seed: int) -> Inputs:
    random = Random(seed)
    B, T, S, H = case.rows, case.queries, case.keys, case.heads
    return {
        "q": random.normal(B, T, H, case.K),
        "k": random.normal(B, S, H, case.K),
        "v": random.normal(B, S, H, case.V),
    }


def peers_of(case: Prefill, directory: Path) -> Iterator[tuple[str, Callable[[], Peer]]]:
    """Yields the names of a case's peers, with functions that build them or raise the reason."""
    yield "FlashAttention-3", lambda: _flash_attention(case, directory)
    yield "FlashAttention-3, cu_seqlens", lambda: _flash_attention_varlen(case, directory)
    for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
        name = f"torch SDPA {backend.split('_')[0].lower()}"
        yield name, functools.partial(_sdpa, case, backend, name)


def _flash_attention(case: Prefill, directory: Path) -> Peer:
    """FlashAttention-3 for sequences of equal length."""
    ops = libraries.flash_attention_3(directory)

    def call(x: Inputs) -> Tensor:
        return libraries.flash_attention(
            ops, x["q"], x["k"], x["v"], None, None, None, None, None, None, None,
            case.K**-0.5, None,
        )  # fmt: skip

    return Peer("FlashAttention-3", lambda x: x, call)


def _flash_attention_varlen(case: Prefill, directory: Path) -> Peer:
    """FlashAttention-3 for packed sequences."""
    ops = libraries.flash_attention_3(directory)
    B, T, S = case.rows, case.queries, case.keys

    def prepare(x: Inputs) -> Any:
        starts_q, starts_k = (
            torch.arange(0, (B + 1) * n, n, device="cuda", dtype=torch.int32) for n in (T, S)
        )
        return {name: a.flatten(0, 1) for name, a in x.items()}, starts_q, starts_k

    def call(prepared: Any) -> Tensor:
        x, starts_q, starts_k = prepared
        return libraries.flash_attention(
            ops, x["q"], x["k"], x["v"], None, starts_q, starts_k, None, T, S, None,
            case.K**-0.5, None,
        )  # fmt: skip

    name = "FlashAttention-3, cu_seqlens"
    return Peer(name, prepare, call, lambda _, out: out.view(B, T, case.heads, case.V))


def _sdpa(case: Prefill, backend: str, name: str) -> Peer:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    square = case.queries == case.keys
    mask = None if square else causal_lower_right(case.queries, case.keys)

    def call(x: Inputs) -> Tensor:
        q, k, v = (x[n].transpose(1, 2) for n in "qkv")
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=square, scale=case.K**-0.5
            )

    return Peer(name, lambda x: x, call, lambda _, out: out.transpose(1, 2))


def sample(case: Prefill, x: Inputs, out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns some rows of a result, and the expected values in float32."""
    queries = torch.linspace(0, case.queries - 1, 9, device="cuda").long()
    q, k, v = (x[name][-1].float() for name in "qkv")
    scores = torch.einsum("thk,shk->ths", q[queries], k) * case.K**-0.5
    weights = softmax_of(scores, case.keys - case.queries + queries)
    return out[-1, queries], torch.einsum("ths,shv->thv", weights, v)
