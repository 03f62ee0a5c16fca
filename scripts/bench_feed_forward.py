"""Checks and times the second half of a decoder layer in one kernel, on one Hopper GPU.

    python -m scripts.bench_feed_forward [--models moonlight-16b v3-slice] [--tokens 1 2 4 8]
        [--weights bf16 fp8 int8 int4] [--o-proj without with] [--launches 1000000]
        [--time-limit 540] [--out benchmarks/results/feed_forward_h200.json]

Layers with experts, of published widths with random weights, run one after the other without
attention: by the persistent kernel of ``pallas_kernels.feed_forward`` in each of its settings, and
by the model's own operations (``plain``). ``us`` is the time per layer, from programs of many
layers with several in flight. ``read_gbs`` is this GPU's bandwidth, and ``roof_us`` the time in
which it reads the weights of the router, the shared and the chosen experts. ``phases`` are
microseconds between the kernel's own clock stamps, means over programs and layers. ``kernel_us`` is
from the first program's start to the last one's end, ``gap_us`` from there to the next kernel's
start, ``clock_mhz`` the clock in the kernel.

``--o-proj with`` includes the projection of attention's output, and its sum with the residual.

Before anything is timed, results are compared with float32 references, and ``--repeats`` equal
calls must give equal bits. ``error`` is the largest relative error of a token. Wrong results are
reported (``wrong``), and not timed. After the first case, ``--launches`` launches of one token in
the last setting show that none hangs. After ``--time-limit`` seconds no further case starts;
``not_run`` lists those, what the kernel refuses, and what comes after a kernel that trapped. Run
one kind of weights per process to lose no others by a trap.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import feed_forward
from benchmarks.decode import floor, models
from benchmarks.decode.machine import description
from benchmarks.kernels.checks import TOLERANCE, rows_error
from dsv3_jax.config import ModelConfig
from dsv3_jax.engine.device.programs import GPU_OPTIONS
from dsv3_jax.files import atomic_write
from dsv3_jax.layers.block import DecoderLayer
from pallas_kernels.decoder_layer.plan import Config
from pallas_kernels.hopper import multiprocessors, require_hopper

LAYERS = 4  # different layers of a program, so that the L2 cache holds the weights of none
CALLS = 16  # layers of a timed program: XLA may compile the kernel again for each
WINDOWS, WINDOW_S = 5, 0.1
LAUNCHES = 50  # programs in flight before clocks are read
INTEGERS = "int8", "int4"
# Bytes per weight, with int4's scales; those of whole rows or of blocks hardly count.
BYTES = {"bf16": 2, "fp8": 1, "int8": 1, "int4": 0.5 + 4 / 128}
SETTINGS: dict[str, Any] = {"packed": {"packed": True}, "unpacked": {}}


def random_layers(config: ModelConfig, weights: str) -> tuple[Any, list[Any]]:
    """Returns the graph and the states of layers with random weights."""
    kwargs: Any = {"dtype": jnp.bfloat16, "quantization": models.WEIGHTS[weights]}
    shapes = nnx.eval_shape(lambda: DecoderLayer(config, dense=False, rngs=nnx.Rngs(0), **kwargs))
    layer = models.random_model(shapes)
    graph, state = nnx.split(layer)
    # A layer's experts in another order are other experts.
    shift = jax.jit(lambda x, n: jnp.roll(x, n, axis=0), static_argnums=1)
    states = [state]
    for n in range(1, LAYERS):
        states.append(jax.tree.map(lambda x, n=n: shift(x, 8 * n), state))
    return graph, states


def seconds(program: Callable[..., Any], *arguments: Any) -> list[float]:
    """Returns the seconds per call of a compiled program in each window, with many in flight."""
    jax.block_until_ready(program(*arguments))
    began = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    count = max(2, int(WINDOW_S / (time.perf_counter() - began)))
    windows = []
    for _ in range(WINDOWS):
        began = time.perf_counter()
        jax.block_until_ready([program(*arguments) for _ in range(count)])
        windows.append((time.perf_counter() - began) / count)
    return windows


def compile_all(programs: dict[str, tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    """Compiles programs for their arguments at the same time."""
    lowered = {name: jitted.lower(*arguments) for name, (jitted, arguments) in programs.items()}
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda each: each.compile(), lowered.values())
        return dict(zip(lowered, compiled, strict=True))


def timed(program: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """Returns the microseconds per layer of a program of CALLS layers, and their spread."""
    windows = seconds(program, *arguments)
    us = statistics.median(windows) / CALLS * 1e6
    spread = (max(windows) - min(windows)) / statistics.median(windows)
    return {"us": round(us, 2), "spread": round(spread, 3)}


def check(
    run: Callable[..., Any], h: Any, heads: Any, states: list[Any], wanted: list[Any], repeats: int
) -> dict[str, Any]:
    """Returns the largest error of the layers' results, and what is wrong with them."""
    result: dict[str, Any] = {"error": 0.0}
    for state, want in zip(states, wanted, strict=True):
        first = run(h, heads, [state])
        # Residuals agree anyway: compare what the layer has added.
        error = float(rows_error(first.astype(jnp.float32) - h, want - h))
        result["error"] = max(result["error"], round(error, 5))
        if error > 2 * TOLERANCE:
            result["wrong"] = f"relative error {error:.3g}, above {2 * TOLERANCE:.3g}"
        elif any(not np.array_equal(first, run(h, heads, [state])) for _ in range(repeats)):
            result["wrong"] = f"{repeats} equal calls gave different bits"
    return result


def phases(
    run: Callable[..., Any], events: Sequence[str], h: Any, heads: Any, states: list[Any]
) -> dict[str, Any]:
    """Returns the mean microseconds of the programs up to each event since the one before, of a
    kernel from its first program's start to its last one's end, and from there to the next start.
    """
    # Others are in flight, so that clocks and caches are those of the timed programs.
    launched = [run(h, heads, states) for _ in range(LAUNCHES)]
    stamps = np.asarray(launched[-1]).astype(np.uint32)
    cycles = np.diff(stamps[..., : len(events)], axis=-1).mean(axis=(0, 1))
    ns = (stamps[..., -2:] - stamps[0, 0, -2]).astype(np.int32)  # since some start
    mhz = cycles.sum() / (ns[..., 1] - ns[..., 0]).mean() * 1e3
    starts, ends = ns[..., 0].min(axis=1), ns[..., 1].max(axis=1)
    named = zip(events[1:], cycles, strict=True)
    return {
        "kernel_us": round(float((ends - starts).mean()) / 1e3, 2),
        "gap_us": round(float((starts[1:] - ends[:-1]).mean()) / 1e3, 2),
        "clock_mhz": round(float(mhz)),
        "phases": {name: round(float(n / mhz), 2) for name, n in named},
    }


def settings_for(names: Sequence[str], weights: str) -> list[str]:
    """Returns the settings with which the kernel takes such weights, apart from sizes."""
    refused = "packed" if weights == "bf16" else "unpacked" if weights in INTEGERS else None
    return [name for name in names if name != refused]


def weight_bytes(config: ModelConfig, weights: str, tokens: int, attention: int) -> int:
    """Returns the bytes that the kernel reads: every pair of a token and an expert counts."""
    D, F = config.hidden_size, config.moe_intermediate_size
    experts = config.n_shared_experts + tokens * config.num_experts_per_tok
    matrices = 3 * D * F * experts + D * attention
    return round(matrices * BYTES[weights]) + 2 * D * config.n_routed_experts


def measure(
    name: str,
    weights: str,
    tokens: int,
    o_proj: str,
    layers: tuple[Any, list[Any]],
    settings: Any,
    gbs: float,
) -> dict[str, Any]:
    """Checks and times one case."""
    config, (graph, states) = models.config(name), layers
    h = jax.random.normal(jax.random.key(tokens), (tokens, config.hidden_size), jnp.bfloat16)
    row: dict[str, Any] = {"model": name, "weights": weights, "tokens": tokens, "o_proj": o_proj}
    heads, attention = None, 0
    if o_proj == "with":
        attention = config.num_attention_heads * config.v_head_dim
        heads = jax.random.normal(jax.random.key(0), (tokens, attention), jnp.bfloat16)
    row["roof_us"] = round(weight_bytes(config, weights, tokens, attention) / gbs / 1e3, 2)
    programs: dict[str, Any] = {}

    def add(name: str, half: feed_forward.Half) -> None:
        check, time = feed_forward.chain(half, 1), feed_forward.chain(half, CALLS // LAYERS)
        programs[f"check {name}"] = jax.jit(check), (h, heads, states[:1])
        programs[f"time {name}"] = (
            jax.jit(time, compiler_options=GPU_OPTIONS),
            (h, heads, states),
        )

    exact = feed_forward.chain(feed_forward.exact(graph), 1)
    programs["exact"] = jax.jit(exact), (h, heads, states[:1])
    add("plain", feed_forward.plain(graph))
    events = ()
    names = settings_for(settings.settings, weights)
    for name in names:
        setting = Config(multiprocessors(), **SETTINGS[name])
        add(name, feed_forward.one_kernel(graph, setting))
        setting = dataclasses.replace(setting, timed=True)
        events = feed_forward.plan_of(h, heads, states[0], graph, setting).events
        stamps = jax.jit(functools.partial(feed_forward.stamps, graph=graph, config=setting))
        programs[f"stamps {name}"] = stamps, (h, heads, states)
    compiled = compile_all(programs)
    wanted = [compiled["exact"](h, heads, [state]) for state in states]
    for name in (*names, "plain"):
        row[name] = check(compiled[f"check {name}"], h, heads, states, wanted, settings.repeats)
        if "wrong" not in row[name]:
            row[name] |= timed(compiled[f"time {name}"], h, heads, states)
        if "wrong" not in row[name] and name != "plain":
            row[name] |= phases(compiled[f"stamps {name}"], events, h, heads, states)
    return row


def endure(
    layers: tuple[Any, list[Any]], width: int, launches: int, setting: str
) -> dict[str, Any]:
    """Runs the kernel many times. It would trap if a program were missing at a barrier."""
    graph, states = layers
    half = feed_forward.one_kernel(graph, Config(multiprocessors(), **SETTINGS[setting]))
    run = jax.jit(feed_forward.chain(half, CALLS // LAYERS))
    h = jax.random.normal(jax.random.key(0), (1, width), jnp.bfloat16)
    began, programs = time.perf_counter(), -(-launches // CALLS)
    first = last = run(h, None, states)
    for _ in range(programs):
        last = run(h, None, states)
    same = bool(jnp.array_equal(first, last))
    took = round(time.perf_counter() - began, 1)
    return {
        "setting": setting, "launches": programs * CALLS, "seconds": took, "same_result": same,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the second half of a layer in one kernel.")
    parser.add_argument("--models", nargs="*", default=["moonlight-16b", "v3-slice"])
    parser.add_argument("--weights", nargs="*", default=["bf16", "fp8"], choices=BYTES)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 2, 4, 8])
    choices = "without", "with"
    parser.add_argument("--o-proj", nargs="*", default=choices[:1], choices=choices)
    parser.add_argument("--settings", nargs="*", default=SETTINGS, choices=SETTINGS)
    parser.add_argument("--launches", type=int, default=1_000_000, help="launches without a hang")
    parser.add_argument("--time-limit", type=float, default=540, help="seconds, see above")
    parser.add_argument("--repeats", type=int, default=20, help="equal calls per check")
    parser.add_argument("--out", type=Path, help="JSON file; by default it is only printed")
    arguments = parser.parse_args()
    require_hopper()
    gbs = round(floor.bandwidth() / 1e9, 1)
    result: dict[str, Any] = description() | {"read_gbs": gbs, "rows": [], "not_run": []}

    def save() -> None:
        if arguments.out is not None:
            atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")

    began = time.monotonic()
    # Four layers of V3 do not fit in bfloat16.
    kinds = [
        (name, weights)
        for name in arguments.models
        for weights in arguments.weights
        if (name, weights) != ("v3-slice", "bf16")
    ]
    for name, weights in kinds:
        layers = None
        for tokens, o_proj in itertools.product(arguments.tokens, arguments.o_proj):
            late = time.monotonic() - began > arguments.time_limit
            if late or "trapped" in result:
                result["not_run"].append([name, weights, tokens, o_proj])
                continue
            try:
                layers = layers or random_layers(models.config(name), weights)
                row = measure(name, weights, tokens, o_proj, layers, arguments, gbs)
                result["rows"].append(row)
                print(json.dumps(row), flush=True)
                save()
                names = settings_for(arguments.settings, weights)
                if "endurance" not in result and arguments.launches and names:
                    width = models.config(name).hidden_size
                    result["endurance"] = endure(layers, width, arguments.launches, names[-1])
                    print(result["endurance"], flush=True)
            except NotImplementedError as refusal:
                result["not_run"].append([name, weights, tokens, o_proj, str(refusal)])
            except jax.errors.JaxRuntimeError as error:  # the process cannot use the GPU any more
                result["trapped"] = [name, weights, tokens, o_proj, str(error)]
            save()
    if "trapped" in result:
        sys.exit(f"a kernel trapped: {result['trapped']}")
    faults = [
        row
        for row in result["rows"]
        if any("wrong" in each for each in row.values() if isinstance(each, dict))
    ]
    if faults:
        sys.exit(f"{len(faults)} of {len(result['rows'])} cases are wrong")


if __name__ == "__main__":
    main()
