"""Time stamps of :mod:`benchmarks.kernels.clock` in torch streams and CUDA graphs."""

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_CAPACITY = 1 << 16


@triton.jit
def _global_timer(words, count, capacity):
    index = tl.load(count)
    now = tl.inline_asm_elementwise(
        "mov.u32 $0, %globaltimer_lo;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(words + index % capacity, now)
    tl.store(count, index + 1)


class TorchStamps:
    """Records time stamps on the current stream, in order of execution."""

    def __init__(self):
        self._words = torch.zeros(_CAPACITY, device="cuda", dtype=torch.int32)
        self._count = torch.zeros(1, device="cuda", dtype=torch.int32)

    def stamp(self) -> None:
        """Enqueues a stamp."""
        _global_timer[(1,)](self._words, self._count, _CAPACITY, num_warps=1)  # pyright: ignore[reportIndexIssue]

    def clear(self) -> None:
        """Discards all stamps."""
        self._count.zero_()

    def read(self) -> list[tuple[int, int]]:
        """Returns the stamps since :meth:`clear` as pairs. There are at most 65,536."""
        words = self._words[: int(self._count.item())].cpu().numpy().astype(np.int64)
        return [(int(begin), int(end)) for begin, end in words.reshape(-1, 2)]
