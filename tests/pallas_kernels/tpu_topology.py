"""Compiles programs for TPUs without the hardware, using libtpu on any Linux machine.

    pip install '.[tpu]'

installs the libtpu version of the installed jax.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.tpu import CHIPS

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: the extra tpu"
)
every_chip = pytest.mark.parametrize("chip", CHIPS)

_SMALLEST = {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1"}


@functools.cache
def devices(chip: str, shape: str = "") -> list[Any]:
    """Returns the devices of a slice of the given topology, such as ``4x4x8``."""
    # libtpu reads it when it is loaded. Otherwise it allows only one process per machine.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    name = f"{chip}:{shape or _SMALLEST[chip]}"
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices


def one_device(chip: str) -> Mesh:
    return Mesh(np.array(devices(chip)[:1]), ("device",))


def compile_for(chip: str, function: Callable[..., Any], *arrays: Any) -> jax.stages.Compiled:
    """Compiles ``function(*arrays)`` for one device, for which it is also traced.

    Args:
      arrays: ShapeDtypeStructs, or trees of them.
    """
    mesh, whole = one_device(chip), PartitionSpec()
    on_device = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, whole)),
        arrays,
    )
    return compiled(jax.jit(on_device).lower(*placed))


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles without the compilation cache, which cannot load programs without their device."""
    name = "jax_persistent_cache_min_compile_time_secs"
    previous = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        return lowered.compile()
    finally:
        jax.config.update(name, previous)


def kernels(program: jax.stages.Compiled) -> int:
    """Returns the number of Pallas kernel calls in the compiled program's text."""
    return program.as_text().count('custom_call_target="tpu_custom_call"')
