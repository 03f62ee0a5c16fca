"""The one rule that picks a back-end for an operation.

``implementation=None`` tries an op's back-ends in their order and takes the first that accepts the
arguments; a name takes that back-end or fails; a sequence of names is tried in its own order. A
back-end refuses by raising NotImplementedError, so one that the caller named is never replaced
silently.

A Pallas kernel is one call to XLA, which cannot divide it: given arrays spread over a mesh, it
gathers them first. So where several devices are visible, ``None`` passes over kernels, except
inside ``shard_map``, where every array lies on one device.
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
    """Calls the back-end of ``op`` that ``implementation`` selects.

    Args:
      op: the operation's name, for messages.
      backends: name -> function, in the order that ``None`` tries; all take the same arguments.
      implementation: ``None``, a name, or a sequence of names.

    Raises:
      ValueError: a name is not among ``backends``.
      NotImplementedError: no selected back-end takes the arguments; says why for each.
    """
    refusals: list[str] = []
    if implementation is None:
        names = tuple(backends)
        if set(names) & set(_KERNELS) and (devices := _spread_over()) > 1:
            names = tuple(name for name in names if name not in _KERNELS)
            refusals.append(
                f"kernels: XLA may spread the arrays over {devices} devices, which a"
                " kernel does not survive; name one, call it in shard_map, or hide the others"
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
            _say_once(op, name, "; ".join(refusals))
        return result
    raise NotImplementedError(
        f"{op}: no implementation takes these arguments ({'; '.join(refusals)})"
    )


def _spread_over() -> int:
    """Devices among which XLA decides here where the parts of an array lie: of the mesh in use, or
    all there are; 1 inside shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_names:
        return jax.device_count()
    return 1 if set(mesh.manual_axes) == set(mesh.axis_names) else mesh.size


@functools.cache
def _say_once(op: str, chosen: str, refusals: str) -> None:
    _log.info("%s runs on %s (%s)", op, chosen, refusals)
