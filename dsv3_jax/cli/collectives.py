"""Times every exchange that can bring tokens to their experts and back, on this machine."""

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

_TOKENS = (8, 64, 512)  # per device: a small decode batch, a large one, and a prompt
_HIDDEN, _EXPERTS_PER_TOKEN = 7168, 8  # as in DeepSeek-V3
_HIDDEN_ON_CPU = 256  # simulated devices only show that it runs; their times mean nothing
_EXPERTS_PER_DEVICE = 8
_LAYERS, _REPEATS = 16, 5


def measure() -> dict[str, str]:
    """Returns the microseconds per layer of each exchange, and the fastest one, by tokens per
    device.

    The tokens are bfloat16, on a CPU float32. Experts are chosen at random and return their input.
    Float8 dispatch is timed too, but never proposed, because it changes results.
    """
    if jax.device_count() == 1:
        return {"exchange": "nothing to measure: one device"}
    hidden = _HIDDEN_ON_CPU if jax.default_backend() == "cpu" else _HIDDEN
    report = {}
    for tokens in _TOKENS:
        times: dict[tuple[str, bool], float] = {}
        for exchange, float8 in itertools.product(get_args(Exchange), (False, True)):
            try:
                times[exchange, float8] = _microseconds(exchange, float8, tokens, hidden)
            except NotImplementedError:
                continue  # the platform lacks it
        best, _ = min((key for key in times if not key[1]), key=times.__getitem__)
        words = (f"{name}{' in float8' * float8} {us:.0f}" for (name, float8), us in times.items())
        report[f"{tokens} x {hidden} a device"] = f"{', '.join(words)} us: take {best}"
    return report


def _microseconds(exchange: Any, float8: bool, tokens: int, hidden: int) -> float:
    """Returns the microseconds of one layer's exchange, of several layers in one program."""
    layout = make_layout("dp_attention_ep", exchange=exchange, float8_dispatch=float8)
    num_experts = _EXPERTS_PER_DEVICE * layout.num_shards("expert")

    def layers(x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(_: Any, x: jax.Array) -> jax.Array:
            y = mix_experts(
                x,
                experts,
                weights,
                lambda inputs, token_of_pair, _sizes: inputs[token_of_pair],
                num_experts=num_experts,
                exchange_axes=layout.exchange_axes,
                exchange=exchange,
                float8=float8,
            )
            return y.astype(x.dtype)

        return jax.lax.fori_loop(0, _LAYERS, layer, x)

    spec = layout.partition_spec(("batch",))
    run = jax.jit(layout.shard_map(layers, (spec, spec, spec), spec))
    num_tokens = tokens * layout.num_shards("batch")
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    keys = jax.random.split(jax.random.key(0), 2)
    shape = (_EXPERTS_PER_TOKEN,)
    choose = functools.partial(jax.random.choice, a=num_experts, shape=shape, replace=False)
    experts = jax.vmap(choose)(jax.random.split(keys[0], num_tokens))
    arguments = jax.device_put(
        (
            jax.random.normal(keys[1], (num_tokens, hidden), dtype),
            experts.astype(jnp.int32),
            jnp.full((num_tokens, _EXPERTS_PER_TOKEN), 1 / _EXPERTS_PER_TOKEN),
        ),
        layout.sharding(("batch",)),
    )
    return 1e6 * median_seconds(run, arguments) / _LAYERS


def median_seconds(run: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Returns the median time of several runs, after one that is not timed."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - began)
    return statistics.median(times)
