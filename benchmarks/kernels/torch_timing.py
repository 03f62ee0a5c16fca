"""Times of torch calls in a CUDA graph, by the GPU's clock. Needs Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from benchmarks.kernels import clock
from benchmarks.kernels.shapes import WARM_S, WINDOW_S, WINDOWS

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


class Timed:
    """A CUDA graph of ``laps`` rounds of ``calls``, between two stamps."""

    def __init__(self, calls: list[Callable[[], Any]], laps: int):
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
          "us": by the GPU's clock;
          "busy": the least share of a window in which a graph ran.
        """
        self._replay(1)
        once = self._replay(2) / 2
        replays = max(2, int(WINDOW_S * 1e3 / once) + 1)
        for _ in range(max(1, int(warm_s * 1e3 / once))):
            self._graph.replay()
        self._stamps.clear()
        for _ in range(WINDOWS * replays):
            self._graph.replay()
        torch.cuda.synchronize()
        stamps = self._stamps.read()
        windows = [stamps[i : i + replays] for i in range(0, len(stamps), replays)]
        return {
            "us": [clock.mean_us(each) / self._count for each in windows],
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
