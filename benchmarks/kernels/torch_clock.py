"""Stamps of :mod:`benchmarks.kernels.clock` in torch's streams and graphs."""

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_MOST = 1 << 16


@triton.jit
def _global_timer(words, count, most):
    place = tl.load(count)
    now = tl.inline_asm_elementwise(
        "mov.u32 $0, %globaltimer_lo;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(words + place % most, now)
    tl.store(count, place + 1)


class TorchStamps:
    """Stamps of the current stream, in the order in which they ran."""

    def __init__(self):
        self._words = torch.zeros(_MOST, device="cuda", dtype=torch.int32)
        self._count = torch.zeros(1, device="cuda", dtype=torch.int32)

    def stamp(self) -> None:
        _global_timer[(1,)](self._words, self._count, _MOST, num_warps=1)  # pyright: ignore[reportIndexIssue]

    def clear(self) -> None:
        self._count.zero_()

    def read(self) -> list[tuple[int, int]]:
        """Pairs of those since :meth:`clear`, which are fewer than 65,536."""
        words = self._words[: int(self._count.item())].cpu().numpy().astype(np.int64)
        return [(int(begin), int(end)) for begin, end in words.reshape(-1, 2)]
