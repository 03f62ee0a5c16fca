"""Packs integer matrices, scales and row order for vLLM's grouped Marlin kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

BITS = {"int8": 8, "int4": 4}
TILE = 16
_BLOCKS = 8, 16, 32, 48, 64  # rows per block; a block belongs to one group


def block_sizes(rows: int, groups: int) -> tuple[int, ...]:
    """Returns the block size that vLLM chooses, and the next smaller one."""
    fitting = [each for each in _BLOCKS if rows / groups / each < 0.9]
    chosen = fitting[0] if fitting else _BLOCKS[-1]
    return tuple(dict.fromkeys((_BLOCKS[max(0, _BLOCKS.index(chosen) - 1)], chosen)))


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
    tiles = unsigned.reshape(K // TILE, TILE, N // TILE, TILE).permute(0, 2, 1, 3)
    order = _order(bits).to(values.device)
    places = tiles.reshape(-1, len(order))[:, order].reshape(K // TILE, -1, 32 // bits)
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
