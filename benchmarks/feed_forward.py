"""The second half of decoder layers: in one kernel, and as the model's own operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from benchmarks.kernels.layer_inputs import in_float32
from dsv3_jax.layers.second_half import arguments
from pallas_kernels.decoder_layer import kernel, mosaic_gpu
from pallas_kernels.decoder_layer.plan import Config
from pallas_kernels.hopper.grid_barrier import new_counter

Half = Callable[[Float[Array, "M D"], Any, Any], Float[Array, "M D"]]
"""The second half of a layer: function of the residual, the layer's state, and a Ref."""


def plain(graph: Any) -> Half:
    """Returns the model's own operations."""

    def half(h: Float[Array, "M D"], state: Any, counter: Any) -> Float[Array, "M D"]:
        del counter
        layer = nnx.merge(graph, state)
        out = layer.mlp(layer.post_attention_layernorm(h[None]), None)[0][0]
        return (h.astype(jnp.float32) + out.astype(jnp.float32)).astype(h.dtype)

    return half


def one_kernel(graph: Any, config: Config) -> Half:
    """Returns the persistent kernel."""

    def half(h: Float[Array, "M D"], state: Any, counter: Any) -> Float[Array, "M D"]:
        arrays, options = arguments(nnx.merge(graph, state))
        run = mosaic_gpu.feed_forward
        return run(h, **arrays, **options, config=config, counter=counter)[0]

    return half


def exact(graph: Any) -> Half:
    """Returns the reference with float32 activations, for checks."""

    def half(h: Float[Array, "M D"], state: Any, counter: Any) -> Float[Array, "M D"]:
        del counter
        arrays, options = arguments(nnx.merge(graph, state))
        with jax.default_matmul_precision("highest"):
            return in_float32(h, **arrays, **options)

    return half


def chain(half: Half, laps: int) -> Callable[[Float[Array, "M D"], Sequence[Any]], Any]:
    """Returns a program that runs layers one after the other, ``laps`` times."""

    def run(h: Float[Array, "M D"], states: Sequence[Any]) -> Float[Array, "M D"]:
        counter, x = jax.new_ref(new_counter()), h
        for state in [*states] * laps:
            x = half(x, state, counter)
        return x

    return run


@functools.partial(jax.jit, static_argnames=("graph", "config"))
def clocks(h: Float[Array, "M D"], state: Any, graph: Any, config: Config) -> jax.Array:
    """Returns each program's clock cycles at the plan's events, [programs, events]."""
    arrays, _ = arguments(nnx.merge(graph, state))
    plan = plan_of(h, state, graph, config)
    parts = arrays["norm"], arrays["router"], arrays["shared"], arrays["routed"]
    counter = jax.new_ref(new_counter())
    return kernel.feed_forward(h, None, None, *parts, counter, plan=plan, interpret=None)[2]


def plan_of(h: Any, state: Any, graph: Any, config: Config) -> Any:
    """Returns the kernel's plan for a layer."""
    arrays, options = arguments(nnx.merge(graph, state))
    parts = arrays["router"], arrays["shared"], arrays["routed"]
    return mosaic_gpu.make_plan(h, *parts, **options, config=config)
