"""How long this machine takes to bring tokens to their experts and back, by each exchange."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp

from sharding import Exchange, make_layout, mix_experts

_TOKENS = (8, 64, 512)  # a device: decoding few and many requests, and a prompt
_HIDDEN, _CHOSEN = 7168, 8  # of DeepSeek-V3
_HIDDEN_ON_CPU = 256  # simulated devices say nothing of real ones: to see that it runs
_EXPERTS_A_DEVICE = 8
_LAYERS, _WINDOWS = 16, 5


def measure() -> dict[str, str]:
    """Microseconds a layer, by tokens a device, and the exchange to take.

    Tokens in bfloat16 (on a CPU float32), experts chosen at random that do nothing, layers one
    after the other. Float8 rounds, so that taking it is not for a measurement to say.
    """
    if jax.device_count() == 1:
        return {"exchange": "nothing to measure: one device"}
    hidden = _HIDDEN_ON_CPU if jax.default_backend() == "cpu" else _HIDDEN
    found = {}
    for tokens in _TOKENS:
        took: dict[tuple[str, bool], float] = {}
        for exchange, float8 in itertools.product(get_args(Exchange), (False, True)):
            try:
                took[exchange, float8] = _microseconds(exchange, float8, tokens, hidden)
            except NotImplementedError:
                continue  # the platform lacks it
        best, _ = min((key for key in took if not key[1]), key=took.__getitem__)
        times = (f"{name}{' in float8' * float8} {us:.0f}" for (name, float8), us in took.items())
        found[f"{tokens} x {hidden} a device"] = f"{', '.join(times)} us: take {best}"
    return found


def _microseconds(exchange: Any, float8: bool, tokens: int, hidden: int) -> float:
    layout = make_layout("dp_attention_ep", exchange=exchange, float8_dispatch=float8)
    experts_in_all = _EXPERTS_A_DEVICE * layout.num_shards("expert")

    def layers(x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(_: Any, x: jax.Array) -> jax.Array:
            y = mix_experts(
                x,
                experts,
                weights,
                lambda rows, which, _sizes: rows[which],
                num_experts=experts_in_all,
                exchange_axes=layout.exchange_axes,
                exchange=exchange,
                float8=float8,
            )
            return y.astype(x.dtype)

        return jax.lax.fori_loop(0, _LAYERS, layer, x)

    rows = layout.partition_spec(("batch",))
    run = jax.jit(layout.shard_map(layers, (rows, rows, rows), rows))
    rows_in_all = tokens * layout.num_shards("batch")
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    keys = jax.random.split(jax.random.key(0), 2)
    choose = functools.partial(jax.random.choice, a=experts_in_all, shape=(_CHOSEN,), replace=False)
    experts = jax.vmap(choose)(jax.random.split(keys[0], rows_in_all))
    arguments = jax.device_put(
        (
            jax.random.normal(keys[1], (rows_in_all, hidden), dtype),
            experts.astype(jnp.int32),
            jnp.full((rows_in_all, _CHOSEN), 1 / _CHOSEN),
        ),
        layout.sharding(("batch",)),
    )
    return 1e6 * median_seconds(run, arguments) / _LAYERS


def median_seconds(run: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Of runs behind one that is not timed."""
    jax.block_until_ready(run(*arguments))
    windows = []
    for _ in range(_WINDOWS):
        began = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        windows.append(time.perf_counter() - began)
    return statistics.median(windows)
