"""Lowers a kernel once per process instead of once for every program that contains it.

Tracing a kernel and lowering it to Mosaic GPU takes Python up to a second. ``jax.jit`` shares both
between the layers of one program only: a serving engine has twenty or more programs, most of them
contain the same kernels, and each program would lower them again. Here a kernel is exported once
with ``jax.export``, and every program calls the exported module. XLA inlines the call, so the
compiled programs differ in the names of operations alone.

It is for kernels without refs among their arguments, and without axes of a mesh: neither can be
exported. So ``feed_forward``, ``attention_inputs`` and ``token_exchange`` do without. The kernel
may be called inside ``shard_map``, where it has the shapes of one device.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import jax
from jax import export

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Exports:
    """The exported modules of one kernel, by what they depend on, until the process ends. One takes
    some ten kilobytes, much less than any compiled program that contains it."""

    def __init__(self, function: Callable[..., Any], platform: str):
        self._function = function
        self._platform = platform
        self._lock = threading.Lock()
        self._variants: dict[Hashable, _Variant] = {}

    def caller(self, settings: dict[str, Hashable], arrays: dict[str, Any]) -> Callable[..., Any]:
        """Returns a function of the arrays' leaves that calls their module."""
        plain = self.of_leaves(settings, jax.tree.structure(arrays))
        return _transformable(self.module(settings, arrays).call, plain)

    def module(self, settings: dict[str, Hashable], arrays: dict[str, Any]) -> export.Exported:
        """Returns the module for these static arguments, and for arrays of these types. Threads
        that ask for it at the same time wait for the one that makes it."""
        leaves, structure = jax.tree.flatten(arrays)
        types = tuple(_type_of(leaf) for leaf in leaves)
        key = tuple(settings.items()), structure, types
        with self._lock:
            variant = self._variants.get(key)
            if variant is None:
                variant = self._variants[key] = _Variant(
                    jax.jit(self.of_leaves(settings, structure), keep_unused=True)
                )
        with variant.lock:
            shapes = [jax.ShapeDtypeStruct(s, d, weak_type=weak) for s, d, weak in types]
            # JAX's own cache of traces knows everything else that the trace depends on.
            jaxpr = variant.jitted.trace(*shapes).jaxpr
            if id(jaxpr) not in variant.modules:
                made = export.export(variant.jitted, platforms=(self._platform,))(*shapes)
                variant.modules[id(jaxpr)] = jaxpr, made
            return variant.modules[id(jaxpr)][1]

    def of_leaves(self, settings: dict[str, Hashable], structure: Any) -> Callable[..., Any]:
        """Returns the kernel as a function of the arrays' leaves."""

        def run(*leaves: jax.Array) -> Any:
            return self._function(**jax.tree.unflatten(structure, leaves), **settings)

        run.__name__ = self._function.__name__  # in the names of a program's operations
        return run


class _Variant:
    """The modules of one signature. There are several if options of JAX change, or the axes of the
    ``shard_map`` around the kernel."""

    def __init__(self, jitted: Any):
        self.jitted = jitted
        self.lock = threading.Lock()
        # By the identity of a jaxpr, which is kept so that no other one gets it.
        self.modules: dict[int, tuple[Any, export.Exported]] = {}


def _type_of(leaf: Any) -> tuple[tuple[int, ...], Any, bool]:
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, aval.weak_type


def _transformable(call: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``call``. JAX cannot transform an exported module: ``jax.vmap`` and ``jax.jvp``
    transform ``plain`` instead, and fail where it does."""
    batchable = jax.custom_batching.custom_vmap(call)

    @batchable.def_vmap
    def batch(axis_size: int, is_batched: list[bool], *leaves: jax.Array) -> tuple[Any, Any]:
        axes = [0 if batched else None for batched in is_batched]
        results = jax.vmap(plain, in_axes=axes, axis_size=axis_size)(*leaves)
        return results, jax.tree.map(lambda _: True, results)

    differentiable = jax.custom_jvp(batchable)
    differentiable.defjvp(functools.partial(jax.jvp, plain))
    return differentiable


def lowered_once(
    *static: str, platform: str = "cuda"
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compiles the decorated function as ``jax.jit`` does, but lowers it once per process, for
    ``platform`` only. ``static`` names its static arguments; all others are trees of arrays. If the
    static argument ``interpret`` is not None, the kernel runs in Pallas' interpreter, without an
    export."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)
        exports = Exports(function, platform)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            arrays = dict(given.arguments)
            settings = {name: arrays.pop(name) for name in static}
            if settings.get("interpret") is not None:
                return function(*args, **kwargs)
            return exports.caller(settings, arrays)(*jax.tree.leaves(arrays))

        return jax.jit(call, static_argnames=static)

    return decorate
