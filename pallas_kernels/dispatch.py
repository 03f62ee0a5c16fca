"""Selects the back-end of an operation.

``implementation=None`` tries the operation's back-ends in their order and uses the first that
accepts the arguments. A name selects that back-end or fails. A sequence of names is tried in its
own order. A back-end refuses arguments by raising NotImplementedError, and one that the caller
named is never replaced.

XLA cannot partition a Pallas kernel: if its arrays are sharded over a mesh, XLA gathers them first.
So if several devices are visible, ``None`` skips kernels, except inside ``shard_map``, where every
array is local to one device.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

Implementation = str | Sequence[str] | None

_KERNELS = ("mosaic_gpu", "mosaic_tpu")

_log = logging.getLogger("pallas_kernels")


def dispatch(
    op: str,
    backends: Mapping[str, Callable[..., Any]],
    implementation: Implementation,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls the back-end of ``op`` that ``implementation`` selects: a name, several in order of
    preference, or None for all of ``backends`` in their order. All take the same arguments. Raises
    ValueError for a name that is not among them, and NotImplementedError, with the reason of each,
    if no selected back-end takes the arguments."""
    refusals: list[str] = []
    if implementation is None:
        names = tuple(backends)
        if set(names) & set(_KERNELS) and (devices := _auto_devices()) > 1:
            names = tuple(name for name in names if name not in _KERNELS)
            refusals.append(
                f"kernels: XLA may shard the arrays over {devices} devices, but cannot partition a"
                " kernel; name one, call it in shard_map, or make only one device visible"
            )
    elif isinstance(implementation, str):
        names = (implementation,)
    else:
        names = tuple(implementation)
    unknown = [n for n in names if n not in backends]
    if unknown or (implementation is not None and not names):
        wrong = ", ".join(map(repr, unknown)) or "an empty sequence"
        raise ValueError(f"{op}: expected implementations among {', '.join(backends)}; got {wrong}")
    for name in names:
        try:
            result = backends[name](*args, **kwargs)
        except NotImplementedError as refusal:
            refusals.append(f"{name}: {refusal}")
            continue
        if refusals:
            _log_once(op, name, "; ".join(refusals))
        return result
    raise NotImplementedError(
        f"{op}: no implementation accepts these arguments ({'; '.join(refusals)})"
    )


def with_gradients_of(reference: Callable[..., Any], kernel: Callable[..., Any]) -> Any:
    """Makes a kernel differentiable. Its gradients are the reference's. Both take the same arrays
    as positional arguments, or None. Integers have no gradient."""

    @jax.custom_vjp
    def call(*inputs: Any) -> Any:
        return kernel(*inputs)

    def forward(*inputs: Any) -> Any:
        return kernel(*inputs), inputs

    def backward(inputs: Any, cotangents: Any) -> Any:
        return jax.vjp(reference, *inputs)[1](cotangents)

    call.defvjp(forward, backward)
    return call


def _auto_devices() -> int:
    """Returns the number of devices over which XLA may shard an array at this point. It is the size
    of the mesh in use, or the number of all devices. Inside shard_map it is 1."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_names:
        return jax.device_count()
    return 1 if set(mesh.manual_axes) == set(mesh.axis_names) else mesh.size


@functools.cache
def _log_once(op: str, chosen: str, refusals: str) -> None:
    _log.info("%s runs on %s (%s)", op, chosen, refusals)
