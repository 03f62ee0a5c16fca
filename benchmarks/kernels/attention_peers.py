"""The peers of mla_decode and mla_prefill: FlashMLA and FlashAttention-3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import peer as libraries
from benchmarks.kernels.peer import (
    Inputs,
    Peer,
    Random,
    Tensor,
    float8_tokens,
    latent_of,
    softmax_of,
)
from benchmarks.kernels.shapes import (
    LATENT,
    PAGE,
    ROPE,
    Decode,
    Prefill,
    PrefillGradient,
    page_tables,
)
from benchmarks.kernels.sparse_peers import SCALE, flash_mla_over_float8

SPARSE_TOKENS = 128  # the sparse kernel takes multiples of this many indices


def make(case: Decode | Prefill, seed: int) -> Inputs:
    random = Random(seed)
    B, T, H = case.rows, case.queries, case.heads
    if isinstance(case, Prefill):
        return {
            "q": random.normal(B, T, H, case.K),
            "k": random.normal(B, case.keys, H, case.K),
            "v": random.normal(B, case.keys, H, case.V),
        }
    tables = torch.from_numpy(page_tables(case, seed)).cuda()
    pages = random.normal(int(tables.max()) + 1, PAGE, LATENT + ROPE)
    return {
        "q": random.normal(B, T, H, LATENT + ROPE),
        "pages": float8_tokens(pages) if case.dtype == "fp8" else pages,
        "tables": tables,
        "lengths": torch.tensor(case.lengths, device="cuda", dtype=torch.int32),
    }


def peers_of(case: Decode | Prefill, directory: Path) -> Iterator[tuple[str, Callable[[], Peer]]]:
    """Yields the names of a case's peers, with functions that build them or raise the reason."""
    if isinstance(case, PrefillGradient):
        return  # cuDNN's kernel is timed through JAX
    if isinstance(case, Prefill):
        yield "FlashAttention-3", lambda: _prefill_flash_attention(case, directory)
    elif case.dtype != "bf16":
        yield "FlashMLA sparse, of all tokens", lambda: _flash_mla_sparse(case, directory)
    else:
        yield "FlashMLA", lambda: _flash_mla(case, directory)
        yield "FlashAttention-3", lambda: _flash_attention(case, directory)


def _flash_mla(case: Decode, directory: Path) -> Peer:
    ops = libraries.flash_mla(directory)

    def run(x: Inputs, plan: tuple[Tensor | None, Tensor | None]):
        return ops.dense_decode_fwd(
            x["q"], x["pages"].unsqueeze(2), LATENT, x["lengths"], x["tables"],
            SCALE, True, *plan, None,
        )  # fmt: skip

    def prepare(x: Inputs) -> Any:
        *_, metadata, splits = run(x, (None, None))
        return x, (metadata, splits)

    return Peer("FlashMLA", prepare, lambda prepared: run(*prepared)[0])


def _flash_mla_sparse(case: Decode, directory: Path) -> Peer:
    """FlashMLA's sparse decode kernel, given the indices of all tokens.

    It is FlashMLA's only Hopper kernel for a float8 cache with more than one scale. 16 heads are
    padded to 64, as serving engines do.
    """
    if case.ragged:
        raise NotImplementedError("the sparse Hopper kernel takes sequences of equal length")
    padded_size = -(-case.cached // SPARSE_TOKENS) * SPARSE_TOKENS

    def prepare(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        token = torch.arange(padded_size, device="cuda")
        page = x["tables"].long()[:, (token // PAGE).clamp(max=x["tables"].shape[1] - 1)]
        indices = (page * PAGE + token % PAGE).int()[:, None].repeat(1, case.queries, 1)
        visible = (
            x["lengths"][:, None] - case.queries + 1 + torch.arange(case.queries, device="cuda")
        )
        indices = indices.masked_fill(token >= visible[..., None], -1).contiguous()
        return x["q"], x["pages"], indices

    name = "FlashMLA sparse, of all tokens"
    return flash_mla_over_float8(name, case.heads, prepare, directory)


def _flash_attention(case: Decode, directory: Path) -> Peer:
    """FlashAttention-3 with rope as queries and keys, and latents as values and as q_v."""
    ops = libraries.flash_attention_3(directory)
    B, T = case.rows, case.queries

    def prepare(x: Inputs) -> Any:
        starts = torch.arange(0, (B + 1) * T, T, device="cuda", dtype=torch.int32)
        latent, rope = (q.contiguous() for q in x["q"].flatten(0, 1).split([LATENT, ROPE], -1))
        plan = ops.get_scheduler_metadata(
            B, T, case.cached, case.heads, 1, ROPE, LATENT, torch.bfloat16, x["lengths"], starts,
            None, None, None, None, PAGE, 0, True, -1, -1, False, 0, None, 0,
        )  # fmt: skip
        return x, starts, latent, rope, plan

    def call(prepared: Any) -> Tensor:
        x, starts, latent, rope, plan = prepared
        value, key_ = x["pages"].unsqueeze(2).split([LATENT, ROPE], -1)
        return libraries.flash_attention(
            ops, rope, key_, value, latent, starts, None, x["lengths"], T, case.cached,
            x["tables"], SCALE, plan,
        )  # fmt: skip

    return Peer(
        "FlashAttention-3", prepare, call, lambda _, out: out.view(B, T, case.heads, LATENT)
    )


def _prefill_flash_attention(case: Prefill, directory: Path) -> Peer:
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


def sample(case: Decode | Prefill, x: Inputs, out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a part of the last sequence of a result, and the expected values in float32."""
    if isinstance(case, Prefill):
        queries = torch.linspace(0, case.queries - 1, 9, device="cuda").long()
        q, k, v = (x[name][-1].float() for name in "qkv")
        scores = torch.einsum("thk,shk->ths", q[queries], k) * case.K**-0.5
        weights = softmax_of(scores, case.keys - case.queries + queries)
        return out[-1, queries], torch.einsum("ths,shv->thv", weights, v)
    b, length = case.rows - 1, case.lengths[-1]
    page_numbers = x["tables"][b, : -(-length // PAGE)].long()
    cache = x["pages"][page_numbers].flatten(0, 1)[:length]
    cache = latent_of(cache) if case.dtype == "fp8" else cache.float()
    scores = torch.einsum("thc,sc->ths", x["q"][b].float(), cache) * SCALE
    last = length - case.queries + torch.arange(case.queries, device="cuda")
    return out[b], torch.einsum("ths,sc->thc", softmax_of(scores, last), cache[:, :LATENT])
