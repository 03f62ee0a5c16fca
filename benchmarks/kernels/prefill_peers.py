"""The peer of mla_prefill: FlashAttention-3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import peer as libraries
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


def _flash_attention(case: Prefill, directory: Path) -> Peer:
    """FlashAttention-3 for packed sequences, the only form that vLLM's build takes."""
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

    return Peer(
        "FlashAttention-3", prepare, call, lambda _, out: out.view(B, T, case.heads, case.V)
    )


def sample(case: Prefill, x: Inputs, out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns some rows of a result, and the expected values in float32."""
    queries = torch.linspace(0, case.queries - 1, 9, device="cuda").long()
    q, k, v = (x[name][-1].float() for name in "qkv")
    scores = torch.einsum("thk,shk->ths", q[queries], k) * case.K**-0.5
    weights = softmax_of(scores, case.keys - case.queries + queries)
    return out[-1, queries], torch.einsum("ths,shv->thv", weights, v)
