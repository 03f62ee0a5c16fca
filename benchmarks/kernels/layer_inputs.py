"""Inputs, calls and expected results of feed_forward in the kernel benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.layer_shapes import BLOCK, FeedForward
from pallas_kernels.decoder_layer import mosaic_gpu, reference
from pallas_kernels.decoder_layer.reference import Matrices, Router
from pallas_kernels.hopper.grid_barrier import new_counter
from pallas_kernels.rms_norm.reference import rms_norm
from pallas_kernels.route.reference import Rule

EPS = 1e-6


def build(case: FeedForward, key: jax.Array) -> dict[str, Any]:
    """Returns the arguments, and a counter for the grid barrier. To be traced."""
    sizes, keys = case.sizes, iter(jax.random.split(key, 20))
    D, E = sizes.width, sizes.experts

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16) * jnp.bfloat16(scale)

    def matrices(F: int, *stack: int) -> Matrices:
        made, scales = [], []
        for n, k in ((F, D), (F, D), (D, F)):
            if case.dtype == "bf16":
                made.append(normal(*stack, n, k, scale=k**-0.5))
                continue
            made.append(normal(*stack, n, k).astype(jnp.float8_e4m3fn))
            blocks = *stack, -(-n // BLOCK), -(-k // BLOCK)
            uniform = jax.random.uniform(next(keys), blocks, jnp.float32, 0.5, 1.5)
            scales.append(uniform * k**-0.5)
        gate, up, down = made
        return Matrices(gate, up, down, tuple(scales))

    bias = normal(E, scale=0.1).astype(jnp.float32)
    return {
        "h": normal(case.tokens, D),
        "norm": 1 + normal(D, scale=0.1),
        "router": Router(normal(E, D, scale=D**-0.5), bias),
        "shared": matrices(sizes.shared * sizes.expert_ffn),
        "routed": matrices(sizes.expert_ffn, E),
        "counter": new_counter(),
    }


def options(case: FeedForward) -> dict[str, Any]:
    sizes = case.sizes
    groups = sizes.groups, sizes.topk_groups
    rule = Rule(sizes.chosen, *groups, "noaux_tc", "sigmoid", True, sizes.scaling)
    return {"rule": rule, "eps": EPS}


def call(case: FeedForward, implementation: str) -> Callable[..., tuple[jax.Array, None]]:
    """Returns a function of the arguments. Its kernel uses the counter that they have."""

    def run(arrays: dict[str, Any]) -> tuple[jax.Array, None]:
        given = {name: x for name, x in arrays.items() if name != "counter"}
        if implementation == "reference":
            return reference.feed_forward(**given, **options(case))[0], None
        counter = jax.new_ref(arrays["counter"])
        return mosaic_gpu.feed_forward(**given, **options(case), counter=counter)[0], None

    return run


def exact(case: FeedForward, arrays: dict[str, Any]) -> jax.Array:
    """Returns the result with float32 activations, see :func:`in_float32`."""
    given = {name: x for name, x in arrays.items() if name != "counter"}
    return in_float32(**given, **options(case))


def in_float32(
    h: jax.Array, norm: jax.Array, router: Router | None, shared: Matrices | None,
    routed: Matrices | None, *, rule: Rule | None, eps: float,
) -> jax.Array:  # fmt: skip
    """Returns feed_forward's result in float32.

    Only the normed tokens are rounded to h's dtype, because other inputs might change the choice of
    experts.
    """
    x = rms_norm(h, norm, eps=eps)
    chosen = None if router is None or rule is None else reference.choose(x, router, rule)
    return h + reference.mix(x.astype(jnp.float32), chosen, shared, routed)
