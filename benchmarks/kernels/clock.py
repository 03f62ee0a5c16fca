"""The clock of the kernel benchmark: the GPU's own, read before a program's first kernel and behind
its last.

A kernel of one block stores the low word of ``%globaltimer``, in nanoseconds. JAX has it from
Mosaic GPU (:mod:`benchmarks.kernels.jax_clock`), torch from Triton
(:mod:`benchmarks.kernels.torch_clock`); the instruction is the same, and both stand in the stream,
or the CUDA graph, of the kernels that they time. So what a program takes to reach the GPU, with
Python and a few hundred buffers, is in nobody's time, and no profiler lengthens a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NAME = "%globaltimer"
INSTRUCTION = f"mov.u32 $0, {NAME}_lo;"
KERNEL = "global_timer"
"""Name of the kernel in XLA's programs."""

_WRAPS_NS = 2**32

Stamps = Sequence[tuple[int, int]]
"""What the clock said at the beginning and at the end of programs that ran one after the other."""


def span_us(begin: int, end: int) -> float:
    """Microseconds between two stamps of one program, which takes less than 4.3 s."""
    return (end - begin) % _WRAPS_NS / 1e3


def mean_us(stamps: Stamps) -> float:
    """Mean microseconds of a program, without the pauses between programs."""
    return sum(span_us(*each) for each in stamps) / len(stamps)


def busy(stamps: Stamps) -> float:
    """How much of the time from the first program's beginning to the last one's end they took."""
    return len(stamps) * mean_us(stamps) / span_us(stamps[0][0], stamps[-1][1])


def resolution_ns(stamps: Stamps) -> int:
    """What all distances between stamps are multiples of: the clock's tick, or a multiple of it."""
    words = [word for each in stamps for word in each]
    return math.gcd(*((word - words[0]) % _WRAPS_NS for word in words))
