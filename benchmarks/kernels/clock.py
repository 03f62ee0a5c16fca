"""The clock of the kernel benchmark: the GPU's own, read before a program's first kernel and after
its last.

A one-block kernel stores the low word of ``%globaltimer``, in nanoseconds. JAX programs contain it
as a Mosaic GPU kernel (:mod:`benchmarks.kernels.jax_timing`), torch programs as a Triton kernel
(:mod:`benchmarks.kernels.torch_timing`). The instruction is the same, and both are in the stream or
CUDA graph of the kernels that they time. So no time includes the launch of a program by Python, and
no profiler slows the kernels down.
"""

from __future__ import annotations

from collections.abc import Sequence

NAME = "%globaltimer"
INSTRUCTION = f"mov.u32 $0, {NAME}_lo;"
KERNEL = "global_timer"
"""Name of the clock kernel in XLA programs."""

_WRAPS_NS = 2**32

Stamps = Sequence[tuple[int, int]]
"""Clock values (begin, end) of programs that ran one after the other."""


def span_us(begin: int, end: int) -> float:
    """Returns the microseconds between two stamps of one program, which takes less than 4.3 s."""
    return (end - begin) % _WRAPS_NS / 1e3


def mean_us(stamps: Stamps) -> float:
    """Returns the mean microseconds per program, without the pauses between programs."""
    return sum(span_us(*each) for each in stamps) / len(stamps)


def busy(stamps: Stamps) -> float:
    """Returns the share of the total time during which some program ran."""
    return len(stamps) * mean_us(stamps) / span_us(stamps[0][0], stamps[-1][1])
