"""Shared parts of the Hopper kernels (Pallas Mosaic GPU). They are independent of any operation.

``launch`` checks the GPU, and launches kernels. ``lowered_once`` exports a kernel once for all
programs of a process. ``ir`` emits registers' values and instructions below Pallas, and ``lanes``
has arrays with one number per thread. ``warpgroup`` branches and synchronises threads, ``barriers``
warpgroups and TMA copies, ``ring`` a producer and its consumers, ``grid_barrier`` all CTAs of a
grid. ``tiles`` has the layouts, buffers and loads of tensor core operands, ``wgmma`` issues their
instructions, ``registers`` loads, sums and converts in inlined code, and ``online_softmax`` keeps a
running maximum. Each has a form for Pallas' interpreter, which has whole arrays and warpgroups but
no threads. An argument ``interpret`` has the interpreter's parameters, or is None on a GPU.
"""

from pallas_kernels.hopper.launch import H200_SMS, Index, Ref, multiprocessors, require_hopper

__all__ = ["H200_SMS", "Index", "Ref", "multiprocessors", "require_hopper"]
