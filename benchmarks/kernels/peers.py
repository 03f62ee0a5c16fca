"""The torch child process of the kernel benchmark: runs the peers' kernels.

Each peer is loaded separately, from the archive of :mod:`benchmarks.kernels.pack_peers` or from
torch. If it cannot be loaded or returns wrong results, the report records the reason. Times are of
CUDA graph replays over rotated inputs, measured by the stamps of :mod:`benchmarks.kernels.clock` at
the beginning and end of each graph. They exclude what a peer computes once per step (FlashMLA's
scheduler metadata, Marlin's order of rows) and the conversion of inputs to the peer's layout
(DeepGEMM's scales, Marlin's matrices, padded groups).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.kernels import clock, sparse_peers
from benchmarks.kernels.layer_shapes import FeedForward
from benchmarks.kernels.marlin import (
    BITS,
    block_sizes,
    pack_matrix,
    permute_scale,
    sorted_rows,
)
from benchmarks.kernels.shapes import (
    BLOCK,
    LATENT,
    PAGE,
    ROPE,
    WARM_S,
    WINDOW_S,
    WINDOWS,
    Case,
    Decode,
    Grouped,
    Prefill,
    SparseCase,
    Swiglu,
    decoded,
    guessed_us,
    page_tables,
    rotation,
)
from benchmarks.kernels.torch_cache import float8_tokens, latent_of
from benchmarks.kernels.workers import Reply, reason, serve

Tensor = torch.Tensor
Inputs = dict[str, Any]
TOLERANCE = 4 * 2.0**-8  # relative to a row's norm; twice ours, because peers may round once more
MASKED_BYTES = 6e9  # limit on the padded rows of the masked layout


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


# ---- loading -------------------------------------------------------------------------------------


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


# ---- inputs --------------------------------------------------------------------------------------


def make(case: Case, seed: int) -> Inputs:
    if isinstance(case, SparseCase):
        return sparse_peers.make(case, seed)
    assert not isinstance(case, FeedForward)
    random = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=random)
        return x.to(dtype)

    def scale(*shape: int) -> Tensor:
        x = torch.empty(shape, device="cuda").uniform_(0.5, 2.0, generator=random)
        return x / 64

    if isinstance(case, Decode):
        B, T, H = case.rows, case.queries, case.heads
        tables = torch.from_numpy(page_tables(case, seed)).cuda()
        pages = normal(int(tables.max()) + 1, PAGE, LATENT + ROPE)
        return {
            "q": normal(B, T, H, LATENT + ROPE),
            "pages": float8_tokens(pages) if case.dtype == "fp8" else pages,
            "tables": tables,
            "lengths": torch.tensor(case.lengths, device="cuda", dtype=torch.int32),
        }
    if isinstance(case, Grouped) and case.dtype in BITS:
        G, M, N, K = len(case.sizes), case.M, case.N, case.K
        padded_size = 2 ** (BITS[case.dtype] - 1) - 1
        rhs = torch.empty(G, N, K, device="cuda", dtype=torch.int8)
        for matrix in rhs:  # one at a time, because random numbers take more memory than the result
            matrix.random_(-padded_size, padded_size + 1, generator=random)
        blocks = 1 if case.dtype == "int8" else K // BLOCK
        # Marlin takes bfloat16 scales; ours gets float32.
        return {"lhs": normal(M, K), "rhs": rhs, "rhs_scale": scale(G, N, blocks).bfloat16()}
    if isinstance(case, Grouped):
        G, M, N, K = len(case.sizes), case.M, case.N, case.K
        dtype = torch.float8_e4m3fn if case.dtype == "fp8" else torch.bfloat16
        arrays = {"lhs": normal(M, K, dtype=dtype), "rhs": normal(G, N, K, dtype=dtype)}
        if case.dtype == "fp8":
            arrays["lhs_scale"] = scale(M, K // BLOCK)
            arrays["rhs_scale"] = scale(G, N // BLOCK, K // BLOCK)
        return arrays
    B, T, S, H = case.rows, case.queries, case.keys, case.heads
    return {
        "q": normal(B, T, H, case.K),
        "k": normal(B, S, H, case.K),
        "v": normal(B, S, H, case.V),
    }


# ---- the peers of each op ------------------------------------------------------------------------


def peers_of(case: Case, directory: Path) -> Iterator[tuple[str, Callable[[], Peer]]]:
    """Yields the names of a case's peers, with functions that build them or raise the reason."""
    if isinstance(case, SparseCase):
        for name, parts in sparse_peers.peers_of(case, functools.partial(_load, directory)):
            yield name, functools.partial(_sparse, name, parts)
    elif isinstance(case, FeedForward):
        return  # no other library has it as one operation
    elif isinstance(case, Swiglu):
        for name, build in peers_of(case.product, directory):
            yield f"{name}, both products without SiLU", build
    elif isinstance(case, Decode) and case.dtype != "bf16":
        yield "FlashMLA sparse, of all tokens", lambda: _flash_mla_sparse(case, directory)
    elif isinstance(case, Decode):
        yield "FlashMLA", lambda: _flash_mla(case, directory)
        yield "FlashAttention-3", lambda: _flash_attention_decode(case, directory)
    elif isinstance(case, Prefill):
        yield "FlashAttention-3", lambda: _flash_attention(case, directory)
        yield "FlashAttention-3, cu_seqlens", lambda: _flash_attention_varlen(case, directory)
        for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
            name = f"torch SDPA {backend.split('_')[0].lower()}"
            yield name, functools.partial(_sdpa, case, backend, name)
    elif case.dtype in ("bf16", "fp8"):
        if case.layout != "masked":
            yield "DeepGEMM contiguous", lambda: _deep_gemm_contiguous(case, directory)
        if case.layout != "contiguous":
            yield "DeepGEMM masked", lambda: _deep_gemm_masked(case, directory)
        if case.dtype == "bf16":
            yield "torch._grouped_mm", lambda: _torch_grouped(case)
    elif case.dtype in BITS:
        for rows in block_sizes(case.M, len(case.sizes)):
            name = f"Marlin, blocks of {rows} rows"
            yield name, functools.partial(_marlin, case, rows, name, directory)


def _load(directory: Path, library: str) -> Any:
    return {"flash_mla": flash_mla, "deep_gemm": deep_gemm}[library](directory)


def _sparse(name: str, parts: Callable[[], sparse_peers.Parts]) -> Peer:
    prepare, call, rows = parts()
    return Peer(name, prepare, call, rows)


def _softmax_scale(case: Decode | Prefill) -> float:
    return 192**-0.5 if isinstance(case, Decode) else case.K**-0.5


def _flash_mla(case: Decode, directory: Path) -> Peer:
    ops = flash_mla(directory)

    def run(x: Inputs, plan: tuple[Tensor | None, Tensor | None]):
        return ops.dense_decode_fwd(
            x["q"], x["pages"].unsqueeze(2), LATENT, x["lengths"], x["tables"],
            _softmax_scale(case), True, *plan, None,
        )  # fmt: skip

    def prepare(x: Inputs) -> Any:
        *_, metadata, splits = run(x, (None, None))
        return x, (metadata, splits)

    return Peer("FlashMLA", prepare, lambda prepared: run(*prepared)[0])


SPARSE_HEADS = 64  # the sparse kernel takes 64 or 128 heads
SPARSE_TOKENS = 128  # the sparse kernel takes multiples of this many indices


def _flash_mla_sparse(case: Decode, directory: Path) -> Peer:
    """FlashMLA's sparse decode kernel, given the indices of all tokens.

    It is FlashMLA's only Hopper kernel for a float8 cache with more than one scale. 16 heads are
    padded to 64, as serving engines do.
    """
    if case.ragged:
        raise NotImplementedError("the sparse Hopper kernel takes sequences of equal length")
    ops = flash_mla(directory)
    H = max(case.heads, SPARSE_HEADS)
    padded_size = -(-case.cached // SPARSE_TOKENS) * SPARSE_TOKENS

    def run(prepared: Any, plan: tuple[Tensor | None, Tensor | None]):
        q, pages, indices = prepared
        return ops.sparse_decode_fwd(
            q, pages, indices, None, None, *plan, None, None, None, LATENT,
            _softmax_scale(case), None,
        )  # fmt: skip

    def prepare(x: Inputs) -> Any:
        q = torch.nn.functional.pad(x["q"], (0, 0, 0, H - case.heads))
        token = torch.arange(padded_size, device="cuda")
        page = x["tables"].long()[:, (token // PAGE).clamp(max=x["tables"].shape[1] - 1)]
        indices = (page * PAGE + token % PAGE).int()[:, None].repeat(1, case.queries, 1)
        visible = (
            x["lengths"][:, None] - case.queries + 1 + torch.arange(case.queries, device="cuda")
        )
        indices = indices.masked_fill(token >= visible[..., None], -1).contiguous()
        pages = x["pages"].view(torch.float8_e4m3fn).unsqueeze(2)
        prepared = q, pages, indices
        *_, metadata, splits = run(prepared, (None, None))
        return prepared, (metadata, splits)

    return Peer(
        "FlashMLA sparse, of all tokens", prepare, lambda prepared: run(*prepared)[0],
        lambda _, out: out[:, :, : case.heads],
    )  # fmt: skip


def _flash_attention_decode(case: Decode, directory: Path) -> Peer:
    """FlashAttention-3 with rope as queries and keys, and latents as values and as q_v."""
    ops = flash_attention_3(directory)
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
        return _fa3(
            ops, rope, key_, value, latent, starts, None, x["lengths"], T, case.cached,
            x["tables"], _softmax_scale(case), plan,
        )  # fmt: skip

    return Peer(
        "FlashAttention-3", prepare, call, lambda _, out: out.view(B, T, case.heads, LATENT)
    )


def _fa3(ops, q, k, v, q_v, starts_q, starts_k, lengths, T, S, tables, scale, plan) -> Tensor:
    out, *_ = ops.fwd(
        q, k, v, None, None, q_v, None, starts_q, starts_k, None, None, lengths, T, S, tables,
        None, None, None, None, None, None, None, None, scale, True, -1, -1, 0.0, True, plan,
        0, None, 0, None, 1, 0, None,
    )  # fmt: skip
    return out


def _flash_attention(case: Prefill, directory: Path) -> Peer:
    """FlashAttention-3 for sequences of equal length."""
    ops = flash_attention_3(directory)

    def call(x: Inputs) -> Tensor:
        return _fa3(
            ops, x["q"], x["k"], x["v"], None, None, None, None, None, None, None,
            _softmax_scale(case), None,
        )  # fmt: skip

    return Peer("FlashAttention-3", lambda x: x, call)


def _flash_attention_varlen(case: Prefill, directory: Path) -> Peer:
    """FlashAttention-3 for packed sequences."""
    ops = flash_attention_3(directory)
    B, T, S = case.rows, case.queries, case.keys

    def prepare(x: Inputs) -> Any:
        starts_q, starts_k = (
            torch.arange(0, (B + 1) * n, n, device="cuda", dtype=torch.int32) for n in (T, S)
        )
        return {name: a.flatten(0, 1) for name, a in x.items()}, starts_q, starts_k

    def call(prepared: Any) -> Tensor:
        x, starts_q, starts_k = prepared
        return _fa3(
            ops, x["q"], x["k"], x["v"], None, starts_q, starts_k, None, T, S, None,
            _softmax_scale(case), None,
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
                q, k, v, attn_mask=mask, is_causal=square, scale=_softmax_scale(case)
            )

    return Peer(name, lambda x: x, call, lambda _, out: out.transpose(1, 2))


def _deep_gemm_contiguous(case: Grouped, directory: Path) -> Peer:
    """DeepGEMM with contiguous groups, each padded to a multiple of the tile's rows."""
    library = deep_gemm(directory)
    align = library.get_mk_alignment_for_contiguous_layout()
    row_indices, groups, row = [], [], 0
    for g, size in enumerate(case.sizes):
        padded = -(-size // align) * align
        row_indices.append(torch.arange(row, row + size))
        groups += [g] * size + [-1] * (padded - size)
        row += padded
    row_index = torch.cat(row_indices).cuda()
    indices = torch.tensor(groups, dtype=torch.int32, device="cuda")

    def prepare(x: Inputs) -> Any:
        lhs = _scatter(x["lhs"], row_index, (row, case.K))
        out = torch.empty(row, case.N, device="cuda", dtype=torch.bfloat16)
        if case.dtype == "bf16":
            return lhs, x["rhs"], out
        scale = _scatter(x["lhs_scale"], row_index, (row, case.K // BLOCK))
        scale = library.get_mn_major_tma_aligned_tensor(scale)
        return (lhs, scale), (x["rhs"], x["rhs_scale"]), out

    def call(prepared: Any) -> Tensor:
        if case.dtype == "bf16":
            library.m_grouped_bf16_gemm_nt_contiguous(*prepared, indices)
        else:
            library.m_grouped_fp8_gemm_nt_contiguous(*prepared, indices, disable_ue8m0_cast=True)
        return prepared[2]

    return Peer("DeepGEMM contiguous", prepare, call, lambda _, out: out[row_index])


def _deep_gemm_masked(case: Grouped, directory: Path) -> Peer:
    """DeepGEMM with all groups padded to the size of the largest one, and masked."""
    library = deep_gemm(directory)
    G, padded_size = len(case.sizes), -(-max(case.sizes) // BLOCK) * BLOCK
    if G * padded_size * case.K * 2 > MASKED_BYTES:
        raise NotImplementedError(f"{G} groups of {padded_size} rows do not fit")
    row_index = torch.cat(
        [torch.arange(g * padded_size, g * padded_size + m) for g, m in enumerate(case.sizes)]
    )
    row_index = row_index.cuda()
    masked = torch.tensor(case.sizes, dtype=torch.int32, device="cuda")
    expected = max(1, -(-case.M // G))

    def prepare(x: Inputs) -> Any:
        lhs = _scatter(x["lhs"], row_index, (G * padded_size, case.K)).view(G, padded_size, case.K)
        out = torch.empty(G, padded_size, case.N, device="cuda", dtype=torch.bfloat16)
        if case.dtype == "bf16":
            return lhs, x["rhs"], out
        scale = _scatter(x["lhs_scale"], row_index, (G * padded_size, case.K // BLOCK))
        scale = library.get_mn_major_tma_aligned_tensor(scale.view(G, padded_size, -1))
        return (lhs, scale), (x["rhs"], x["rhs_scale"]), out

    def call(prepared: Any) -> Tensor:
        if case.dtype == "bf16":
            library.m_grouped_bf16_gemm_nt_masked(*prepared, masked, expected)
        else:
            library.m_grouped_fp8_gemm_nt_masked(
                *prepared, masked, expected, disable_ue8m0_cast=True
            )
        return prepared[2]

    return Peer("DeepGEMM masked", prepare, call, lambda _, out: out.flatten(0, 1)[row_index])


def _scatter(rows: Tensor, row_index: Tensor, shape: tuple[int, int]) -> Tensor:
    out = torch.zeros(shape, device="cuda", dtype=rows.dtype)
    bits = (
        torch.uint8 if rows.dtype == torch.float8_e4m3fn else rows.dtype
    )  # torch has no scatter for float8
    out.view(bits)[row_index] = rows.view(bits)
    return out


def _torch_grouped(case: Grouped) -> Peer:
    ends = torch.tensor(case.sizes, device="cuda").cumsum(0).int()
    return Peer(
        "torch._grouped_mm",
        lambda x: (x["lhs"], x["rhs"].transpose(1, 2)),
        lambda prepared: torch._grouped_mm(*prepared, offs=ends),  # pyright: ignore[reportPrivateImportUsage]
    )


def _marlin(case: Grouped, rows: int, name: str, directory: Path) -> Peer:
    """Marlin's grouped matmul of bfloat16 rows and packed integers, called as in vLLM."""
    op = marlin(directory).moe_wna16_marlin_gemm
    bits, G = BITS[case.dtype], len(case.sizes)
    row_ids, groups = (
        torch.tensor(x, dtype=torch.int32, device="cuda") for x in sorted_rows(case.sizes, rows)
    )
    count = torch.tensor([len(row_ids)], dtype=torch.int32, device="cuda")
    ones = torch.ones(case.M, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def prepare(x: Inputs) -> Any:
        matrices = torch.stack([pack_matrix(x["rhs"][g], bits) for g in range(G)])
        scales = permute_scale(x["rhs_scale"].transpose(1, 2))
        workspace = torch.zeros(4 * processors, dtype=torch.int32, device="cuda")
        out = torch.empty(case.M, case.N, device="cuda", dtype=torch.bfloat16)
        return x["lhs"], out, matrices, scales, workspace

    def call(prepared: Any) -> Tensor:
        lhs, out, matrices, scales, workspace = prepared
        return op(
            lhs, out, matrices, None, scales, None, None, None, None, None, workspace, row_ids,
            groups, count, ones, rows, 1, False, _unsigned_with_bias(bits), case.M, case.N,
            case.K, True, False, True, False, -1, -1, -1,
        )  # fmt: skip

    return Peer(name, prepare, call)


def _unsigned_with_bias(bits: int) -> int:
    """Returns vLLM's id of the type x + 2^(bits - 1): no exponent, ``bits`` mantissa bits."""
    mantissa, bias, ieee = bits << 8, 2 ** (bits - 1) << 17, 1 << 50
    return mantissa | bias | ieee


# ---- checks --------------------------------------------------------------------------------------


def wrong(case: Case, x: Inputs, out: Tensor) -> str | None:
    """Returns None if sampled rows of ``out`` agree with float32, else a message."""
    if isinstance(case, SparseCase):
        got, want = sparse_peers.sample(case, x, out)
    else:
        assert not isinstance(case, FeedForward)
        sample = {Decode: _sample_decode, Grouped: _sample_grouped, Prefill: _sample_prefill}
        got, want = sample[type(case)](case, x, out)
    error = ((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
    return None if error <= TOLERANCE else f"wrong: relative error {error:.3g}"


def _softmax_of(scores: Tensor, first: Tensor) -> Tensor:
    """Softmax of scores [..., T, H, S] over the keys up to position ``first`` of each query."""
    s = torch.arange(scores.shape[-1], device="cuda")
    return scores.masked_fill(s > first[..., None, None], -torch.inf).softmax(-1)


def _sample_decode(case: Decode, x: Inputs, out: Tensor) -> tuple[Tensor, Tensor]:
    b, length = case.rows - 1, case.lengths[-1]
    page_numbers = x["tables"][b, : -(-length // PAGE)].long()
    cache = x["pages"][page_numbers].flatten(0, 1)[:length]
    cache = latent_of(cache) if case.dtype == "fp8" else cache.float()
    scores = torch.einsum("thc,sc->ths", x["q"][b].float(), cache) * _softmax_scale(case)
    last = length - case.queries + torch.arange(case.queries, device="cuda")
    return out[b], torch.einsum("ths,sc->thc", _softmax_of(scores, last), cache[:, :LATENT])


def _sample_grouped(case: Grouped, x: Inputs, out: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.linspace(0, case.M - 1, 13).long().unique()
    ends = torch.tensor(case.sizes).cumsum(0)
    want = []
    for row, g in zip(
        rows.tolist(), torch.searchsorted(ends, rows, right=True).tolist(), strict=True
    ):
        left, right = x["lhs"][row].float(), x["rhs"][g].float()
        if case.dtype == "fp8":
            left = left * x["lhs_scale"][row].repeat_interleave(BLOCK)
            scale = x["rhs_scale"][g].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            right = right * scale
        elif case.dtype in BITS:
            scale = x["rhs_scale"][g].float()
            right = right * scale.repeat_interleave(case.K // scale.shape[-1], 1)
        want.append((right * left).sum(-1))
    return out[rows.cuda()], torch.stack(want)


def _sample_prefill(case: Prefill, x: Inputs, out: Tensor) -> tuple[Tensor, Tensor]:
    queries = torch.linspace(0, case.queries - 1, 9, device="cuda").long()
    q, k, v = (x[name][-1].float() for name in "qkv")
    scores = torch.einsum("thk,shk->ths", q[queries], k) * _softmax_scale(case)
    weights = _softmax_of(scores, case.keys - case.queries + queries)
    return out[-1, queries], torch.einsum("ths,shv->thv", weights, v)


# ---- timing --------------------------------------------------------------------------------------


class Timed:
    """A CUDA graph of ``laps`` rounds of ``calls``, between two stamps."""

    def __init__(self, calls: list[Callable[[], Any]], laps: int):
        # Imported here, because Triton is installed only where torch has a GPU.
        from benchmarks.kernels.torch_clock import TorchStamps

        # Keep the calls, because a graph does not keep the tensors alive that it reads.
        self._calls, self._count, self._stamps = calls, laps * len(calls), TorchStamps()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._stamps.stamp()
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._stamps.stamp()
            for _ in range(laps):
                for call in calls:
                    call()
            self._stamps.stamp()

    def windows(self, warm_s: float = WARM_S) -> dict[str, Any]:
        """Times a call in windows of many replays, without pauses, after a warm-up of ``warm_s``.

        Returns:
          "us": by the GPU's clock; "event_us": by CUDA events around a window's replays;
          "busy": the least share of a window in which a graph ran.
        """
        self._replay(1)
        once = self._replay(2) / 2
        replays = max(2, int(WINDOW_S * 1e3 / once) + 1)
        for _ in range(max(1, int(warm_s * 1e3 / once))):
            self._graph.replay()
        self._stamps.clear()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(WINDOWS + 1)]
        events[0].record()
        for event in events[1:]:
            for _ in range(replays):
                self._graph.replay()
            event.record()
        torch.cuda.synchronize()
        stamps = self._stamps.read()
        windows = [stamps[i : i + replays] for i in range(0, len(stamps), replays)]
        between = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        return {
            "us": [clock.mean_us(each) / self._count for each in windows],
            "event_us": [1e3 * ms / replays / self._count for ms in between],
            "busy": min(map(clock.busy, windows)),
        }

    def _replay(self, replays: int) -> float:
        """Returns the milliseconds that ``replays`` replays take."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            self._graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


# ---- requests ------------------------------------------------------------------------------------


class Session:
    """Handles the requests of the parent process."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._graphs: dict[str, Timed] = {}

    def start(self) -> Reply:
        versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
        try:
            deep_gemm(self._directory)
            versions["deep_gemm_jit"] = jit_compiler(os.environ)
        except Exception as error:
            versions["deep_gemm_jit"] = reason(error)
        return {"versions": versions, "gpu": torch.cuda.get_device_name(), "clock": clock.NAME}

    def prepare(self, case: dict[str, Any]) -> Reply:
        """Prepares a case's peers; returns {"peers": {peer: {} or {"error": reason}}}."""
        self.release()
        return {"peers": self._prepare(decoded(case))}

    def _prepare(self, case: Case) -> Reply:
        sets, laps = rotation(case, guessed_us(case))
        available = list(peers_of(case, self._directory))
        case = case.product if isinstance(case, Swiglu) else case
        arrays: list[Inputs] = []
        replies: Reply = {}
        for name, build in available:
            try:
                peer = build()
                arrays = arrays or [make(case, seed) for seed in range(sets)]
                replies[name] = self._capture(case, name, peer, arrays, laps)
            except Exception as error:
                replies[name] = {"error": reason(error)}
            torch.cuda.synchronize()
        return replies

    def _capture(self, case: Case, name: str, peer: Peer, arrays: list[Inputs], laps: int) -> Reply:
        prepared = [peer.prepare(x) for x in arrays]
        out = peer.rows(prepared[0], peer.call(prepared[0]))
        if fault := wrong(case, arrays[0], out):
            return {"error": fault}
        del out
        self._graphs[name] = Timed([functools.partial(peer.call, p) for p in prepared], laps)
        return {}

    def time(self, names: list[str], warm_s: float) -> Reply:
        """Times prepared peers; returns {peer: result of :meth:`Timed.windows`}."""
        return {name: self._graphs[name].windows(warm_s) for name in names}

    def release(self) -> Reply:
        self._graphs.clear()
        torch.cuda.empty_cache()
        return {}

    def warm(self, cases: list[dict[str, Any]]) -> Reply:
        """Lets DeepGEMM, and the driver for Marlin, fill their persistent kernel caches."""
        for case in map(decoded, cases):
            case = case.product if isinstance(case, Swiglu) else case
            for peer, build in peers_of(case, self._directory):
                if peer.startswith(("DeepGEMM", "Marlin")):
                    try:
                        made = build()
                        made.call(made.prepare(make(case, 0)))
                        torch.cuda.synchronize()
                    except Exception as error:
                        print(case.shape, peer, reason(error), flush=True)
            torch.cuda.empty_cache()
        return {}

    def ceilings(self) -> Reply:
        """Measures matmul throughput, copy bandwidth and read bandwidth."""
        ceilings: Reply = {}

        def note(name: str, scale: float, build: Callable[[], list[Callable[[], Any]]]) -> None:
            try:
                us = statistics.median(Timed(build(), 1).windows()["us"])
                ceilings[name] = scale / (us * 1e-6)
            except Exception as error:
                ceilings[name.rsplit("_", 1)[0]] = reason(error)
            torch.cuda.empty_cache()

        n = 8192
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        note("torch_bf16_tflops", 2 * n**3 / 1e12, lambda: [lambda: a @ b.T])
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")

        def scaled():
            return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                a8, b8.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        note("torch_fp8_tflops", 2 * n**3 / 1e12, lambda: [scaled])
        x, y = (torch.randn(2**30, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        note("torch_copy_gbs", 2 * x.nbytes / 1e9, lambda: [lambda: y.copy_(x)])
        wide = x.view(torch.float32).nan_to_num_()
        note("torch_read_sum_gbs", x.nbytes / 1e9, lambda: [wide.sum])
        return ceilings


def main() -> None:
    session = Session(Path(sys.argv[1]))
    serve({
        "start": session.start, "prepare": session.prepare, "time": session.time,
        "release": session.release, "warm": session.warm, "ceilings": session.ceilings,
    })  # fmt: skip


if __name__ == "__main__":
    main()
