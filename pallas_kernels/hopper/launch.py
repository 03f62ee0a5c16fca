"""The check for a Hopper GPU, its size, and the launch and overlap of kernels on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.target import compute_capability, device_kind, platform

H200_SMS = 132
"""Multiprocessors of an H100 or H200 (SXM). Programs that are compiled without a GPU assume it."""


LANE = plgpu.LoweringSemantics.Lane
"""Code for single lanes."""

Index = jax.Array | int
"""A number in a kernel: traced, or known when the kernel is traced."""

Ref = Any
"""A reference to memory in a kernel, or a window of one, for which Pallas has no public type."""


def require_hopper(interpret: Any = None) -> None:
    """Raises NotImplementedError unless the program is for a GPU of compute capability 9.0, see
    :mod:`pallas_kernels.target`, or the kernel runs in the interpreter."""
    if interpret is not None:
        return
    if platform() != "gpu":
        raise NotImplementedError(f"runs on Hopper GPUs, this is {platform()}")
    if (capability := compute_capability()) != "9.0":
        raise NotImplementedError(
            f"runs on Hopper GPUs (compute capability 9.0), this is a {device_kind()}"
            f" of {capability}"
        )


def multiprocessors() -> int:
    """Returns the number of multiprocessors of the default device, or H200_SMS if it is no GPU."""
    return getattr(jax.devices()[0], "core_count", None) or H200_SMS


def overlap_preceding_kernel(early: bool = True, *, interpret: Any = None) -> None:
    """Lets the following kernel launch, and waits for the preceding one's results. A kernel calls
    it once, before it reads global memory. What it does before, such as initialising barriers,
    overlaps with the end of the preceding kernel. It does nothing without ``early``, in the
    interpreter, and in jax 0.10, which has no such operation."""
    if early and interpret is None and hasattr(plgpu, "griddepcontrol_wait"):
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()


def grid_kernel(
    body: Callable[..., None], out_type: Any, scratch_types: Sequence[Any], *, warpgroups: int,
    grid: dict[str, int], cluster: dict[str, int] | None = None, interpret: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Returns ``body`` as a kernel without automatic barriers, whose thread axis is ``wg``.
    ``grid`` and ``cluster`` have the CTAs of each axis, ``options`` are of
    ``plgpu.CompilerParams``."""
    cluster = cluster or {}
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, **options),
        **({} if interpret is None else {"interpret": interpret}),
    )
