"""Shared parts of the Hopper kernels (Pallas Mosaic GPU). They are independent of any operation.

``device`` checks the GPU. ``ir`` emits registers' values and instructions below Pallas.
``warpgroup`` synchronises the threads of a warpgroup, ``barriers`` warpgroups and TMA copies,
``grid_barrier`` all programs of a grid, ``ring`` a producer and its consumers. ``copies`` describes
TMA copies, ``loads`` other loads from global memory, ``tiles`` the layouts and buffers of tensor
core operands, ``wgmma`` issues their instructions, and ``keep`` keeps their registers live.
``registers`` loads words and sums over a warp's lanes, ``unpack`` converts weights to bfloat16.
``branch`` executes code conditionally, ``math`` has approximations, ``launch`` starts a kernel.
``lowered_once`` exports a kernel once for all programs of a process.
Each has a form for Pallas' interpreter, which has whole arrays and warpgroups but no threads.
"""

from pallas_kernels.hopper.device import H200_SMS, multiprocessors, require_hopper

__all__ = ["H200_SMS", "multiprocessors", "require_hopper"]
