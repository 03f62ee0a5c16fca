"""Microseconds per phase of the kernel for a whole decoder layer, on Moonlight's MoE layers.

    python -m scripts.bench_whole_layer --weights int4 fp8 --ahead 1 0 \\
        --out benchmarks/results/whole_layer_phases_h200.json

Layers of random weights run one after the other in one program, with many such programs in flight.
A phase is the time between two of the kernel's own clock stamps, a mean over programs and layers.
``attention`` is also given for the programs that have a part of it, and for the last of these.
``layer_us`` is the time from one layer's end to the next one's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.decode import models
from dsv3_jax.layers import around_attention
from dsv3_jax.layers.paged_cache import LayerCache
from dsv3_jax.layers.rope import rotation_at
from pallas_kernels.decoder_layer.plan import packs
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.hopper.grid_barrier import new_counter
from pallas_kernels.whole_layer import kernel, mosaic_gpu
from pallas_kernels.whole_layer.api import BACKENDS
from pallas_kernels.whole_layer.plan import EVENTS, Config, Plan
from pallas_kernels.whole_layer.reference import Cached
from scripts.bench_feed_forward import random_layers

MODEL = "moonlight-16b"
LAUNCHES = 40  # programs in flight before clocks are read


class TimedLayers:
    """A program of several layers, which returns the clocks of each."""

    def __init__(self, graph: Any, ahead: int):
        self.graph, self.ahead = graph, ahead
        self.plan: Plan | None = None
        self.clocks: list[Any] = []

    def __call__(self, x: Any, states: Any, pages: Any, table: Any, start: Any) -> Any:
        """Returns the output, and both arrays of clocks that the kernel returns, by layer."""
        counter, self.clocks = jax.new_ref(new_counter()), []
        rotation = rotation_at(models.config(MODEL), start[:, None])
        valid = jnp.ones((1, 1), bool)
        for state, own in zip(states, pages, strict=True):
            layer = nnx.merge(self.graph, state)
            cache = LayerCache({"latent": own}, table, start, valid)
            x, _, _ = around_attention.layer_in_kernel(
                layer, x, rotation, [cache], ["absorbed"], valid, counter
            )
        return x, jax.tree.map(lambda *each: jnp.stack(each), *self.clocks)

    def whole_layer(
        self, x: Any, before: Any, after: Any, cos: Any, sin: Any, cached: Any, *, counter: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Takes the place of the kernel's back-end."""
        dtypes = before.kv_a_proj.weight.dtype, after.o_proj.weight.dtype
        packed = packs(len(x), x.dtype, *dtypes)
        config = Config(multiprocessors(), packed, ahead=self.ahead, timed=True)
        plan = mosaic_gpu.make_plan(x, before, after, cos, cached, **options, config=config)
        cached = Cached(cached.pages, *(each.astype(jnp.int32) for each in cached[1:]))
        arrays = x, before, after, cos, sin, cached, counter
        made, clocks = kernel.whole_layer(*arrays, plan=plan, interpret=None)
        self.plan = plan
        self.clocks.append(clocks)
        return made


def measure(graph: Any, states: Sequence[Any], ahead: int, cached: int) -> dict[str, Any]:
    """Returns the microseconds of each phase."""
    layers, pages = TimedLayers(graph, ahead), cached // 64 + 1
    BACKENDS["mosaic_gpu"] = layers.whole_layer
    keys = jax.random.split(jax.random.key(0), len(states) + 1)
    latents = [jax.random.normal(key, (pages, 64, 576), jnp.bfloat16) for key in keys[1:]]
    width = models.config(MODEL).hidden_size
    x = jax.random.normal(keys[0], (1, 1, width), jnp.bfloat16)
    table, start = jnp.arange(pages, dtype=jnp.int32)[None], jnp.asarray([cached], jnp.int32)
    arrays = x, states, latents, table, start
    program = jax.jit(layers).lower(*arrays).compile()
    out, clocks = [program(*arrays) for _ in range(LAUNCHES)][-1]
    if layers.plan is None or not bool(jnp.isfinite(out.astype(jnp.float32)).all()):
        raise ValueError("expected finite results of the kernel")
    parts = int(layers.plan.attention.split(start[0])[2])
    own, after = (np.asarray(each).astype(np.uint32) for each in clocks)
    return phases(layers.plan, own, after, parts)


def phases(plan: Plan, own: np.ndarray, after: np.ndarray, parts: int) -> dict[str, Any]:
    """Returns the mean microseconds up to each event since the one before.

    Args:
      own: clocks [layers, programs, events] at EVENTS.
      after: the same after attention, at the events of that plan, and nanoseconds at both ends.
      parts: parts of the cached tokens.
    """
    events = plan.after.events
    first = np.diff(own, axis=-1).astype(np.int32)
    later = np.diff(after[..., : len(events)], axis=-1).astype(np.int32)
    ns = (after[..., -2:] - after[0, 0, -2]).astype(np.int32)  # since some start
    mhz = float(later.sum(axis=-1).mean() / (ns[..., 1] - ns[..., 0]).mean() * 1e3)
    attention = first[:, : plan.attention.groups * parts, EVENTS.index("attention") - 1]
    row: dict[str, Any] = {
        "stages": plan.after.stages.count,
        "clock_mhz": round(mhz),
        "layer_us": round(float(np.diff(ns[..., 1].max(axis=1)).mean()) / 1e3, 2),
        "kernel_us": round(float((first.sum(-1) + later.sum(-1)).mean()) / mhz, 2),
        "attention_us": round(float(attention.mean()) / mhz, 2),
        "last_attention_us": round(float(attention.max(axis=1).mean()) / mhz, 2),
    }
    names = (*EVENTS[1:], *events[1:])
    cycles = np.concatenate([first, later], axis=-1).mean(axis=(0, 1))
    named = zip(names, cycles, strict=True)
    return row | {"phases": {name: round(float(n) / mhz, 2) for name, n in named}}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", nargs="+", default=["int4"], choices=models.WEIGHTS)
    parser.add_argument("--ahead", nargs="+", type=int, default=[1], help="Config.ahead")
    parser.add_argument("--cached", type=int, default=1023, help="tokens cached before")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    for weights in arguments.weights:
        graph, states = random_layers(models.config(MODEL), weights)
        for ahead in arguments.ahead:
            row = measure(graph, states, ahead, arguments.cached)
            results[f"{weights}, ahead {ahead}"] = row
            print(weights, ahead, json.dumps(row), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
