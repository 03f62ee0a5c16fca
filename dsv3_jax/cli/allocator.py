"""JAX's memory allocator on GPUs, as the commands need it.

By default JAX reserves three quarters of a GPU's memory at its first use of the GPU, and never
takes more. That is too little for a model that fills the device: with 96 GB of weights on a GPU of
150 GB, a prefill of long prompts fails while a quarter of the memory is unused. Commands that run a
model therefore reserve almost all of it, in one piece: memory that grows piece by piece has no room
for the largest arrays of a training step. The other commands reserve nothing, so that they can run
next to a server.

JAX reads these settings from environment variables alone, when it first uses the GPU. A variable
that the user has set stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SHARE = 0.95
"""Share of the memory that JAX may use. The rest is for CUDA's context and graphs, and for the
buffers of libraries such as NCCL."""

_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Two names of one variable. JAX refuses to have both."""
_RESERVES = "XLA_PYTHON_CLIENT_PREALLOCATE"
_KIND = "XLA_PYTHON_CLIENT_ALLOCATOR"
_WITHOUT_MODEL = ("bench", "convert", "doctor", "export", "plan", "verify")
"""Commands that put no model on a device, or only part of one at a time."""


def configure(command: str) -> None:
    """Sets what a command needs. Must be called before JAX uses a device."""
    os.environ.update(settings(command, os.environ))


def settings(command: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to set for a command, without those that the user has set."""
    chosen: dict[str, str] = {}
    if not any(environment.get(name) for name in _SHARES):
        chosen[_SHARES[0]] = str(SHARE)
    if command in _WITHOUT_MODEL and not environment.get(_RESERVES):
        chosen[_RESERVES] = "false"
    return chosen


def describe(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what the commands do for ``dsv3 doctor``, given the user's environment, before
    :func:`configure`."""
    given = [name for name in (*_SHARES, _RESERVES, _KIND) if environment.get(name)]
    reserved = f"reserve {SHARE:.0%} of a GPU's memory when they start"
    described = {
        "generate, eval, serve, chat, train": reserved,
        "other commands": "reserve no memory of a GPU",
    }
    if given:
        shown = ", ".join(f"{name}={environment[name]}" for name in given)
        described["set by the environment instead"] = shown
    return described
