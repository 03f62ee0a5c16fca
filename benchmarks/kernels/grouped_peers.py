"""The peers of grouped_matmul and of the matmuls in grouped_swiglu: DeepGEMM, Marlin and torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import peer as libraries
from benchmarks.kernels.peer import Inputs, Peer, Random, Tensor
from benchmarks.kernels.shapes import BLOCK, Gradient, Grouped

BITS = {"int8": 8, "int4": 4}
MARLIN_TILE = 16
_MARLIN_BLOCKS = 8, 16, 32, 48, 64  # rows per block; a block belongs to one group
MASKED_BYTES = 6e9  # limit on the padded rows of the masked layout


def make(case: Grouped, seed: int) -> Inputs:
    random = Random(seed)
    G, M, N, K = len(case.sizes), case.M, case.N, case.K
    if isinstance(case, Gradient):
        d_out = random.normal(M, N)
        if case.of == "rows":
            return {"d_out": d_out, "rhs": random.normal(G, N, K)}
        return {"d_out": d_out, "lhs": random.normal(M, K)}
    if case.dtype in BITS:
        padded_size = 2 ** (BITS[case.dtype] - 1) - 1
        rhs = torch.empty(G, N, K, device="cuda", dtype=torch.int8)
        for matrix in rhs:  # one at a time, because random numbers take more memory than the result
            matrix.random_(-padded_size, padded_size + 1, generator=random.generator)
        blocks = 1 if case.dtype == "int8" else K // BLOCK
        # Marlin takes bfloat16 scales; ours gets float32.
        return {
            "lhs": random.normal(M, K),
            "rhs": rhs,
            "rhs_scale": random.scale(G, N, blocks).bfloat16(),
        }
    dtype = torch.float8_e4m3fn if case.dtype == "fp8" else torch.bfloat16
    arrays = {"lhs": random.normal(M, K, dtype=dtype), "rhs": random.normal(G, N, K, dtype=dtype)}
    if case.dtype == "fp8":
        arrays["lhs_scale"] = random.scale(M, K // BLOCK)
        arrays["rhs_scale"] = random.scale(G, N // BLOCK, K // BLOCK)
    return arrays


def peers_of(case: Grouped, directory: Path) -> Iterator[tuple[str, Callable[[], Peer]]]:
    """Yields the names of a case's peers, with functions that build them or raise the reason."""
    if isinstance(case, Gradient):
        yield "torch._grouped_mm", lambda: _torch_grouped(case)
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


def _deep_gemm_contiguous(case: Grouped, directory: Path) -> Peer:
    """DeepGEMM with contiguous groups, each padded to a multiple of the tile's rows."""
    library = libraries.deep_gemm(directory)
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
    library = libraries.deep_gemm(directory)
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

    def prepare(x: Inputs) -> Any:
        if not isinstance(case, Gradient):
            return x["lhs"], x["rhs"].transpose(1, 2)
        return (x["d_out"], x["rhs"]) if case.of == "rows" else (x["d_out"].T, x["lhs"])

    return Peer(
        "torch._grouped_mm",
        prepare,
        lambda prepared: torch._grouped_mm(*prepared, offs=ends),  # pyright: ignore[reportPrivateImportUsage]
    )


def _marlin(case: Grouped, rows: int, name: str, directory: Path) -> Peer:
    """Marlin's grouped matmul of bfloat16 rows and packed integers, called as in vLLM."""
    op = libraries.marlin(directory).moe_wna16_marlin_gemm
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


def block_sizes(rows: int, groups: int) -> tuple[int, ...]:
    """Returns the block size that vLLM chooses, and the next smaller one."""
    fitting = [each for each in _MARLIN_BLOCKS if rows / groups / each < 0.9]
    chosen = fitting[0] if fitting else _MARLIN_BLOCKS[-1]
    return tuple(dict.fromkeys((_MARLIN_BLOCKS[max(0, _MARLIN_BLOCKS.index(chosen) - 1)], chosen)))


def sorted_rows(sizes: Sequence[int], block: int) -> tuple[list[int], list[int]]:
    """Returns row numbers in blocks of one group each, padded with an invalid row number, and
    each block's group."""
    rows, groups, first, invalid_row = [], [], 0, sum(sizes)
    for group, size in enumerate(sizes):
        blocks = -(-size // block)
        rows += [*range(first, first + size), *[invalid_row] * (blocks * block - size)]
        groups += [group] * blocks
        first += size
    return rows, groups


def pack_matrix(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs signed integers [N, K] into int32 [K / 16, N * 16 * bits / 32], as x + 2^(bits-1)."""
    N, K = values.shape
    unsigned = values.T.int() + 2 ** (bits - 1)
    tiles = unsigned.reshape(K // MARLIN_TILE, MARLIN_TILE, N // MARLIN_TILE, MARLIN_TILE).permute(
        0, 2, 1, 3
    )
    order = _order(bits).to(values.device)
    places = tiles.reshape(-1, len(order))[:, order].reshape(K // MARLIN_TILE, -1, 32 // bits)
    shifts = torch.arange(0, 32, bits, device=values.device, dtype=torch.int64)
    # Summed as int64, because the last value in a word may reach the sign bit.
    words = (places.long() << shifts).sum(-1)
    return (words - (words >= 2**31).long() * 2**32).int()


def permute_scale(scale: torch.Tensor) -> torch.Tensor:
    """Permutes scales [groups, blocks of K, N] into the order in which a warp reads them."""
    is_per_column = scale.shape[1] == 1
    order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    if not is_per_column:
        order = [i + 8 * j for i in range(8) for j in range(8)]
    return scale.reshape(-1, len(order))[:, order].reshape(scale.shape).contiguous()


@functools.cache
def _order(bits: int) -> torch.Tensor:
    """Returns the order in which mma's threads hold the numbers of four tiles of 16 x 16."""
    places = [
        16 * row + thread // 4 + 8 * half + 256 * tile
        for thread in range(32)
        for tile in range(4)
        for half in (0, 1)
        for row in (thread % 4 * 2 + k for k in (0, 1, 8, 9))
    ]
    interleaved = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}[bits]
    return torch.tensor(places).reshape(-1, len(interleaved))[:, interleaved].flatten()


def _unsigned_with_bias(bits: int) -> int:
    """Returns vLLM's id of the type x + 2^(bits - 1): no exponent, ``bits`` mantissa bits."""
    mantissa, bias, ieee = bits << 8, 2 ** (bits - 1) << 17, 1 << 50
    return mantissa | bias | ieee


def sample(case: Grouped, x: Inputs, out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns some rows of a result, and the expected values in float32."""
    if isinstance(case, Gradient):
        return _gradient_sample(case, x, out)
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


def _gradient_sample(case: Gradient, x: Inputs, out: Tensor) -> tuple[Tensor, Tensor]:
    got, want, end = [], [], 0
    for g, size in enumerate(case.sizes):
        own = slice(end, end + size)
        end += size
        if g % 7 or not size:
            continue
        d_out = x["d_out"][own].float()
        if case.of == "rows":
            got.append(out[own][-1])
            want.append(d_out[-1] @ x["rhs"][g].float())
        else:
            got.append(out[g, -1])
            want.append(d_out[:, -1] @ x["lhs"][own].float())
    return torch.stack(got), torch.stack(want)
