"""The peers of sparse attention's kernels: FlashMLA, DeepGEMM and torch.

FlashMLA's sparse kernel for a bfloat16 cache is the one that engines use for prefill. It takes
every query on its own, so that it can decode as well. DeepGEMM's kernels do not write the -inf of
hidden tokens, and torch.topk does not sort the indices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import peer as libraries
from benchmarks.kernels.peer import Inputs, Peer, Random, Tensor, float8_tokens, latent_of
from benchmarks.kernels.shapes import (
    FLOAT8_TOKEN,
    INDEX_COLUMNS,
    INDEX_HEADS,
    LATENT,
    PAGE,
    ROPE,
    Index,
    SparseAttention,
    SparseCase,
    TopK,
)

SCALE = 192**-0.5
SPARSE_HEADS = 64  # FlashMLA's sparse kernels take 64 or 128 heads; engines pad


def make(case: SparseCase, seed: int) -> Inputs:
    random = Random(seed)
    B = case.rows
    if isinstance(case, TopK):
        scores = torch.empty(B, case.columns, device="cuda").normal_(generator=random.generator)
        return {"scores": scores}
    T, per_row = case.queries, -(-case.cached // PAGE)
    order = torch.randperm(B * per_row, device="cuda", generator=random.generator).int()
    tables = order.view(B, per_row)
    if isinstance(case, Index):
        keys = random.normal(B * per_row, PAGE, INDEX_COLUMNS, dtype=torch.float8_e4m3fn)
        scales = random.uniform(B * per_row, PAGE, low=0.5, high=2)
        return {
            "q": random.normal(B, T, INDEX_HEADS, INDEX_COLUMNS, dtype=torch.float8_e4m3fn),
            "weights": random.normal(B, T, INDEX_HEADS).float(),
            "pages": keys,
            "scales": scales,
            "tables": tables,
            "lengths": torch.full((B,), case.cached, device="cuda", dtype=torch.int32),
        }
    visible = (case.cached - T + 1 + torch.arange(T, device="cuda"))[:, None]
    width = (visible // case.topk).clamp(min=1)
    within = torch.rand(B, T, case.topk, device="cuda", generator=random.generator) * width
    index = torch.arange(case.topk, device="cuda") * width + within.long().minimum(width - 1)
    page = tables.long().gather(1, (index // PAGE).clamp(max=per_row - 1).view(B, -1))
    slots = page.view(index.shape) * PAGE + index % PAGE
    tokens = random.normal(B * per_row * PAGE, LATENT + ROPE)
    return {
        "q": random.normal(B, T, case.heads, LATENT + ROPE),
        "tokens": float8_tokens(tokens) if case.dtype == "fp8" else tokens,
        "slots": slots.masked_fill(index >= visible, -1).int(),
    }


def peers_of(case: SparseCase, directory: Path) -> Iterator[tuple[str, Callable[[], Peer]]]:
    """Yields the names of a case's peers, with functions that build them or raise the reason."""
    if isinstance(case, SparseAttention) and case.dtype == "fp8":
        yield "FlashMLA sparse", functools.partial(_flash_mla_float8, case, directory)
    elif isinstance(case, SparseAttention):
        yield "FlashMLA sparse", functools.partial(_flash_mla, case, directory)
    elif isinstance(case, TopK):
        yield "torch.topk", functools.partial(_torch_topk, case)
    elif case.queries <= 2:
        yield "DeepGEMM paged", functools.partial(_deep_gemm_paged, case, directory)
    else:
        yield "DeepGEMM", functools.partial(_deep_gemm, case, directory)


def _flash_mla(case: SparseAttention, directory: Path) -> Peer:
    ops = libraries.flash_mla(directory)
    heads = max(case.heads, SPARSE_HEADS)

    def prepare(x: Inputs) -> Any:
        q = torch.nn.functional.pad(x["q"].flatten(0, 1), (0, 0, 0, heads - case.heads))
        return q, x["tokens"].unsqueeze(1), x["slots"].flatten(0, 1).unsqueeze(1).contiguous()

    def call(prepared: Any) -> Tensor:
        return ops.sparse_prefill_fwd(*prepared, SCALE, LATENT, None, None, None)[0]

    def convert(_: Any, out: Tensor) -> Tensor:
        return out.view(case.rows, case.queries, heads, LATENT)[:, :, : case.heads]

    return Peer("FlashMLA sparse", prepare, call, convert)


def _flash_mla_float8(case: SparseAttention, directory: Path) -> Peer:
    def prepare(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        return x["q"], x["tokens"].view(-1, PAGE, FLOAT8_TOKEN), x["slots"]

    return flash_mla_over_float8("FlashMLA sparse", case.heads, prepare, directory)


def flash_mla_over_float8(
    name: str,
    heads: int,
    prepare: Callable[[Inputs], tuple[Tensor, Tensor, Tensor]],
    directory: Path,
) -> Peer:
    """FlashMLA's decode kernel for a float8 cache, without the plan that it makes once per step.

    Args:
      prepare: returns queries [B, T, H, 576], pages of bytes [P, 64, 656] and slots [B, T, K].
    """
    ops = libraries.flash_mla(directory)
    padded_heads = max(heads, SPARSE_HEADS)

    def run(prepared: Any, plan: tuple[Tensor | None, Tensor | None]) -> Any:
        q, pages, slots = prepared
        return ops.sparse_decode_fwd(
            q, pages, slots, None, None, *plan, None, None, None, LATENT, SCALE, None
        )

    def with_plan(x: Inputs) -> Any:
        q, pages, slots = prepare(x)
        q = torch.nn.functional.pad(q, (0, 0, 0, padded_heads - heads))
        prepared = q, pages.view(torch.float8_e4m3fn).unsqueeze(2), slots
        *_, metadata, splits = run(prepared, (None, None))
        return prepared, (metadata, splits)

    return Peer(
        name, with_plan, lambda prepared: run(*prepared)[0], lambda _, out: out[:, :, :heads]
    )


def _deep_gemm_paged(case: Index, directory: Path) -> Peer:
    library = libraries.deep_gemm(directory)

    def prepare(x: Inputs) -> Any:
        # A page has all its keys, then all their scales.
        parts = (x[name].flatten(1).view(torch.uint8) for name in ("pages", "scales"))
        cache = torch.cat(list(parts), 1).view(-1, PAGE, 1, INDEX_COLUMNS + 4)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        # This is the number of tokens that each query sees.
        ahead = torch.arange(1 - case.queries, 1, device="cuda", dtype=torch.int32)
        lengths = (x["lengths"][:, None] + ahead).contiguous()
        plan = library.get_paged_mqa_logits_metadata(lengths, PAGE, processors)
        return x["q"], cache, x["weights"].flatten(0, 1), lengths, x["tables"], plan

    def call(prepared: Any) -> Tensor:
        return library.fp8_paged_mqa_logits(*prepared, case.cached, clean_logits=False)

    return Peer(
        "DeepGEMM paged", prepare, call,
        lambda _, out: out[:, : case.cached].unflatten(0, (case.rows, -1)),
    )  # fmt: skip


def _deep_gemm(case: Index, directory: Path) -> Peer:
    """DeepGEMM's kernel for keys that are contiguous, as engines gather them for prefill."""
    if case.rows != 1:
        raise NotImplementedError("takes one sequence")
    library = libraries.deep_gemm(directory)
    T = case.queries
    ends = case.cached - T + 1 + torch.arange(T, device="cuda", dtype=torch.int32)

    def prepare(x: Inputs) -> Any:
        order = x["tables"][0].long()
        keys = x["pages"].view(torch.uint8)[order].view(torch.float8_e4m3fn)
        scales = x["scales"][order].flatten()
        return x["q"][0], (keys.flatten(0, 1), scales), x["weights"][0], torch.zeros_like(ends)

    def call(prepared: Any) -> Tensor:
        return library.fp8_mqa_logits(*prepared, ends, clean_logits=False)

    return Peer("DeepGEMM", prepare, call, lambda _, out: out[None, :, : case.cached])


def _torch_topk(case: TopK) -> Peer:
    return Peer(
        "torch.topk",
        lambda x: x["scores"],
        lambda scores: torch.topk(scores, case.k, sorted=False).indices,
        lambda _, out: out.sort(-1).values,
    )


def sample(case: SparseCase, x: Inputs, out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns some rows of a peer's result, and the expected values in float32."""
    if isinstance(case, TopK):
        want = torch.topk(x["scores"][-1].cpu(), case.k).indices.sort().values.cuda()
        same = (out[-1] == want).float()
        return same[None], torch.ones_like(same)[None]
    if isinstance(case, Index):
        order = x["tables"][-1].long()
        keys = x["pages"].view(torch.uint8)[order].view(torch.float8_e4m3fn).flatten(0, 1).float()
        products = torch.einsum("jd,sd->js", x["q"][-1, -1].float(), keys[: case.cached]).relu()
        want = (x["weights"][-1, -1] @ products) * x["scales"][order].flatten()[: case.cached]
        return out[-1, -1][None].float(), want[None]
    slots = x["slots"][-1, -1]
    tokens = x["tokens"][slots.clamp(min=0).long()]
    tokens = latent_of(tokens) if case.dtype == "fp8" else tokens.float()
    scores = (x["q"][-1, -1].float() @ tokens.T * SCALE).masked_fill(slots < 0, -torch.inf)
    return out[-1, -1], scores.softmax(-1) @ tokens[:, :LATENT]
