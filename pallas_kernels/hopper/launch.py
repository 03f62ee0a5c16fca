"""Programmatic dependent launch: a kernel starts while the preceding one still runs."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def overlap_preceding_kernel(early: bool = True, *, interpret: Any = None) -> None:
    """Lets the following kernel launch, and waits for the preceding one's results.

    A kernel calls it once, before it reads global memory. What it does before, such as initialising
    barriers, overlaps with the end of the preceding kernel.

    Args:
      early: False leaves both out. So do the interpreter and jax 0.10, which has no such operation.
    """
    if early and interpret is None and hasattr(plgpu, "griddepcontrol_wait"):
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
