"""Profiles one decoder layer of DeepSeek-V3 by kernel, on the default device.

    python -m scripts.profile_layer [--weights bf16 fp8] [--experts 256] [--decode 1 128]
        [--cached 4096] [--prefill 4096] [--out benchmarks/results/layer_h200.json]

A layer with experts, with random weights of the published widths, runs as in generation: decode
steps of one token per sequence against a paged cache (absorbed attention), and a prefill chunk of
one prompt (expanded attention). The profiler's kernel times are summed by kind. The kind of a
kernel follows from the source lines that XLA records for its operations; a fusion has the kind of
most of its operations. Kernels are traced without CUDA graphs. ``wall`` is the time of a run with
XLA's defaults, including CUDA graphs, with many runs in flight. Without ``--experts``, bf16 weights
take 23 GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.decode import models
from benchmarks.profile.operations import operations
from benchmarks.profile.trace import SERIAL, kernels, summed, table, traced
from dsv3_jax import presets
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import atomic_write
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE, CacheSpec
from dsv3_jax.layers.block import DecoderLayer
from dsv3_jax.layers.paged_cache import LayerCache
from dsv3_jax.layers.rope import rotation_at

RUNS = 10  # traced runs
WINDOWS, WINDOW_S = 5, 0.05


@dataclasses.dataclass(frozen=True)
class Step:
    """A step with ``tokens`` new tokens in each of ``rows`` sequences, after ``cached`` tokens."""

    rows: int
    tokens: int
    cached: int

    @property
    def name(self) -> str:
        kind = "prefill" if self.tokens > 1 else "decode"
        return f"{kind} {self.rows} x {self.tokens}, {self.cached} cached"


# ---- the layer -----------------------------------------------------------------------------------


def random_layer(config: ModelConfig, weights: str, dtype: Any) -> tuple[Any, Any]:
    """Returns the layer's graph and random state, made on the device without float32 copies."""
    kwargs: Any = {"dtype": dtype, "quantization": models.WEIGHTS[weights]}
    shapes = nnx.eval_shape(lambda: DecoderLayer(config, dense=False, rngs=nnx.Rngs(0), **kwargs))
    return nnx.split(models.random_model(shapes))


def run_of(
    config: ModelConfig, graph: Any, step: Step, dtype: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """Returns one step of the layer, and the shapes of its arguments after the state.

    The last argument is the cache, which the step updates and may donate.
    """
    form = "absorbed" if step.tokens == 1 else "expanded"
    B, T = step.rows, step.tokens
    per_row = -(-(step.cached + T) // DEFAULT_PAGE_SIZE)

    def run(state, x, rotation, tables, starts, valid, pages):
        layer = nnx.merge(graph, state)
        cache = LayerCache(pages, tables, starts, valid)
        out, pages, _ = layer.extend(x, rotation, cache, form)
        return out, pages

    shape = jax.ShapeDtypeStruct
    positions = shape((B, T), jnp.int32)
    arguments = [
        shape((B, T, config.hidden_size), dtype),
        jax.eval_shape(functools.partial(rotation_at, config), positions),
        shape((B, per_row), jnp.int32),
        shape((B,), jnp.int32),
        shape((B, T), jnp.bool_),
        {
            name: shape((B * per_row, *array.page_shape(DEFAULT_PAGE_SIZE, "gpu")), array.dtype)
            for name, array in CacheSpec.of_config(config, dtype).layers[0].items()
        },
    ]
    return run, arguments


def values_of(config: ModelConfig, step: Step, arguments: list[Any]) -> list[Any]:
    """Returns argument values: random activations, and pages in random order."""
    x, _, tables, starts, valid, pages = arguments
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 3)
    positions = jnp.broadcast_to(step.cached + jnp.arange(step.tokens), valid.shape)
    order = jax.random.permutation(keys[2], tables.size)
    return [
        jax.random.normal(keys[0], x.shape, x.dtype),
        jax.jit(functools.partial(rotation_at, config))(positions),
        order.reshape(tables.shape).astype(tables.dtype),
        jnp.full(starts.shape, step.cached, starts.dtype),
        jnp.ones(valid.shape, valid.dtype),
        {
            name: jax.random.normal(jax.random.fold_in(keys[1], i), array.shape, array.dtype)
            for i, (name, array) in enumerate(pages.items())
        },
    ]


def wall_us(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())
    began = time.perf_counter()
    jax.block_until_ready(run())
    count = max(2, int(WINDOW_S / (time.perf_counter() - began)))
    windows = []
    for _ in range(WINDOWS):
        began = time.perf_counter()
        jax.block_until_ready([run() for _ in range(count)])
        windows.append((time.perf_counter() - began) / count * 1e6)
    return statistics.median(windows)


# ---- a step's profile ----------------------------------------------------------------------------


class Profile:
    """Profile of a step. The constructor starts compiling; :meth:`measure` runs the step."""

    def __init__(
        self,
        config: ModelConfig,
        layer: tuple[Any, Any],
        step: Step,
        dtype: Any,
        pool: ThreadPoolExecutor,
    ):
        graph, state = layer
        self._config, self._state, self._step = config, state, step
        run, self._arguments = run_of(config, graph, step, dtype)
        lowered = jax.jit(run, donate_argnums=6).lower(state, *self._arguments)
        gpu = jax.default_backend() == "gpu"
        self._traced = pool.submit(lowered.compile, SERIAL if gpu else None)
        self._fast = pool.submit(lowered.compile) if gpu else self._traced

    def compile(self) -> None:
        self._traced.result()
        self._fast.result()

    def measure(self, runs: int) -> dict[str, Any]:
        serial, fast = self._traced.result(), self._fast.result()
        *others, pages = values_of(self._config, self._step, self._arguments)
        current_pages = [pages]

        def run(executable: Any) -> Any:
            out, current_pages[0] = executable(self._state, *others, current_pages[0])
            return out

        wall = wall_us(lambda: run(fast))
        times = kernels(traced(lambda: run(serial), runs))
        return {"step": self._step.name, "wall_us": round(wall, 1)} | summed(
            times, operations(serial.as_text() or ""), runs
        )


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Profile one decoder layer by kernel.")
    parser.add_argument("--model", default="deepseek-v3", help="a preset, or a path to config.json")
    parser.add_argument("--weights", nargs="+", default=["bf16", "fp8"], choices=("bf16", "fp8"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--experts", type=int, help="number of experts, if memory is short")
    parser.add_argument("--decode", nargs="*", type=int, default=[1, 128], help="batch sizes")
    parser.add_argument(
        "--cached", type=int, default=4096, help="cached tokens per sequence in decode steps"
    )
    parser.add_argument("--prefill", nargs="*", type=int, default=[4096], help="prompt lengths")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def profiles(config: ModelConfig, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    steps = [Step(rows, 1, arguments.cached) for rows in arguments.decode]
    steps += [Step(1, tokens, 0) for tokens in arguments.prefill]
    with ThreadPoolExecutor(8) as pool:
        for weights in arguments.weights:
            layer = random_layer(config, weights, arguments.dtype)
            started = [Profile(config, layer, step, arguments.dtype, pool) for step in steps]
            for each in started:
                each.compile()  # all of them first, because XLA's autotuning runs kernels
            for each in started:
                yield {"weights": weights} | each.measure(arguments.runs)
            layer = started = each = None  # free the memory before the next weights are generated


def main() -> None:
    arguments = parse(sys.argv[1:])
    path = Path(arguments.model)
    config = ModelConfig.from_hf(path) if path.exists() else presets.get(arguments.model)
    if arguments.experts:
        config = dataclasses.replace(config, n_routed_experts=arguments.experts)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "model": arguments.model,
        "experts": config.n_routed_experts,
        "runs": arguments.runs,
        "profiles": [],
    }
    for profile in profiles(config, arguments):
        print(table(profile), flush=True)
        result["profiles"].append(profile)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
