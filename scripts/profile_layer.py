"""What XLA makes of one decoder layer of DeepSeek-V3, by kernel, on the default device.

    python -m scripts.profile_layer [--weights bf16 fp8] [--experts 256] [--decode 1 128]
        [--cached 4096] [--prefill 4096] [--out benchmarks/results/layer_h200.json]

A layer with experts, of random weights in the published widths, runs as generation runs it: decode
steps of one token a row against a paged cache (absorbed attention), and a chunk of one prompt
(expanded). The profiler's kernel times are summed by kind: what a kernel computes is told by the
source lines that XLA notes for its operations, and a fusion goes to the kind that most of its
operations have. Kernels are traced one by one; ``wall`` is the time of a run as XLA runs it by
default, with CUDA graphs, many runs in flight. Without ``--experts`` bf16 weights take 23 GB.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import functools
import json
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax import presets
from dsv3_jax.config import BlockQuantization, ModelConfig
from dsv3_jax.kv_cache import PAGE_SIZE
from dsv3_jax.layers.attention import LayerCache
from dsv3_jax.layers.block import DecoderLayer
from dsv3_jax.layers.rope import rotation

RUNS = 10  # traced
WINDOWS, WINDOW_S = 5, 0.05
SHOWN = 25
SERIAL: dict[str, str | bool] = {"xla_gpu_graph_min_graph_size": "1000000"}
"""No CUDA graphs: the profiler would not say which operation a kernel of one belongs to."""

KINDS = (
    # (part of a source path, kind), the first that fits
    ("mla_decode/schedule", "schedule"),
    ("grouped_matmul/row_tiles", "schedule"),
    ("pallas_kernels/mla_", "attention"),
    ("pallas_kernels/softmax", "attention"),
    ("pallas_kernels/quantized_matmul", "dense matmul"),
    ("pallas_kernels/grouped_", "expert matmul"),
    ("pallas_kernels/block_quant", "dequantisation"),
    ("layers/router", "router"),
    ("layers/moe", "sort, permute, sum"),
    ("layers/norm", "norm"),
    ("layers/rope", "rope"),
    ("layers/linear", "dense matmul"),
    ("layers/mlp", "SwiGLU"),
    ("layers/attention", "around attention"),
    ("layers/block", "residual sum"),
    ("kv_cache", "cache write"),
)
_MATMUL = ("gemm", "cutlass", "nvjet", "triton_dot", "dot")


@dataclasses.dataclass(frozen=True)
class Step:
    """``tokens`` new tokens in each of ``rows`` rows, behind ``cached`` ones."""

    rows: int
    tokens: int
    cached: int

    @property
    def name(self) -> str:
        kind = "prefill" if self.tokens > 1 else "decode"
        return f"{kind} {self.rows} x {self.tokens}, {self.cached} cached"


# ---- the layer -----------------------------------------------------------------------------------


def random_layer(config: ModelConfig, weights: str, dtype: Any) -> tuple[Any, Any]:
    """The layer's graph and its state, filled on the device without float32 copies."""
    quantization = BlockQuantization() if weights == "fp8" else None
    graph, shapes = nnx.split(
        nnx.eval_shape(
            lambda: DecoderLayer(
                config, dense=False, rngs=nnx.Rngs(0), dtype=dtype, quantization=quantization
            )
        )
    )
    flat = list(nnx.to_flat_state(shapes))

    def fill(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(flat))
        return [
            _filled(path, variable.get_value(), k, config.initializer_range)
            for k, (path, variable) in zip(keys, flat, strict=True)
        ]

    values = jax.jit(fill)(jax.random.key(0, impl="rbg"))
    pairs = [
        (path, variable.replace(value))
        for (path, variable), value in zip(flat, values, strict=True)
    ]
    return graph, nnx.from_flat_state(pairs)


def _filled(path: Sequence[Any], want: Any, key: jax.Array, std: float) -> jax.Array:
    name, owner = str(path[-1]), str(path[-2])
    if "norm" in owner:
        return jnp.ones(want.shape, want.dtype)
    if name == "e_score_correction_bias":
        return jnp.zeros(want.shape, want.dtype)
    if name == "weight_scale_inv":
        return jnp.full(want.shape, std, want.dtype)
    values = jax.random.normal(key, want.shape, jnp.bfloat16)
    float8 = want.dtype == jnp.float8_e4m3fn
    return (values if float8 else values * std).astype(want.dtype)


def run_of(
    config: ModelConfig, graph: Any, step: Step, dtype: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """One step of the layer, and the shapes of its arguments behind the state: the last of them
    is the cache, which the step returns longer and may overwrite."""
    form = "absorbed" if step.tokens == 1 else "expanded"
    B, T = step.rows, step.tokens
    per_row = -(-(step.cached + T) // PAGE_SIZE)

    def run(state, x, turn, tables, starts, valid, pages):
        layer = nnx.merge(graph, state)
        cache = LayerCache(pages, tables, starts, valid)
        out, pages, _ = layer.extend(x, turn, cache, form)
        return out, pages

    shape = jax.ShapeDtypeStruct
    positions = shape((B, T), jnp.int32)
    arguments = [
        shape((B, T, config.hidden_size), dtype),
        jax.eval_shape(functools.partial(rotation, config), positions),
        shape((B, per_row), jnp.int32),
        shape((B,), jnp.int32),
        shape((B, T), jnp.bool_),
        shape((B * per_row, PAGE_SIZE, config.latent_dim), dtype),
    ]
    return run, arguments


def values_of(config: ModelConfig, step: Step, arguments: list[Any]) -> list[Any]:
    """Random activations; pages in random order."""
    x, _, tables, starts, valid, pages = arguments
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 3)
    positions = jnp.broadcast_to(step.cached + jnp.arange(step.tokens), valid.shape)
    order = jax.random.permutation(keys[2], pages.shape[0])
    return [
        jax.random.normal(keys[0], x.shape, x.dtype),
        jax.jit(functools.partial(rotation, config))(positions),
        order.reshape(tables.shape).astype(tables.dtype),
        jnp.full(starts.shape, step.cached, starts.dtype),
        jnp.ones(valid.shape, valid.dtype),
        jax.random.normal(keys[1], pages.shape, pages.dtype),
    ]


# ---- what XLA says of its operations -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operation:
    """One of optimised HLO that launches kernels."""

    opcode: str
    name: str
    """As JAX traced it: jit(run)/.../dot_general."""
    kind: str


def operations(hlo: str) -> dict[str, Operation]:
    """Of a module's text, by the names that the profiler uses."""
    sources = _Sources(hlo)
    bodies: dict[str, list[tuple[str, str, str]]] = {}
    found: dict[str, tuple[str, str]] = {}
    body: list[tuple[str, str, str]] = []
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            body = bodies.setdefault(head[1], [])
        elif instruction := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line):
            name, rest = instruction.groups()
            opcode = re.search(r"(?<=[\s)}\]]) ?([a-z][\w\-]*)\(", " " + rest)
            body.append((name, opcode[1] if opcode else "", line))
            found[name] = (opcode[1] if opcode else "", line)

    def inside(line: str) -> Iterator[tuple[str, str]]:
        called = re.search(r"calls=%?([\w.\-]+)", line)
        for _, opcode, inner in bodies.get(called[1], ()) if called else ():
            yield opcode, inner
            yield from inside(inner)

    result = {}
    for name, (opcode, line) in found.items():
        lines = [(opcode, line), *inside(line)]
        result[name] = Operation(opcode, _traced_name(line), _kind(lines, sources))
    return result


class _Sources:
    """Which file an operation's metadata names: itself, or by way of the module's tables."""

    def __init__(self, hlo: str):
        self._tables: dict[str, dict[str, str]] = {}
        table: dict[str, str] | None = None
        for line in hlo.splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = self._tables.setdefault(line, {})
            elif table is not None and (row := re.match(r"(\d+) (.*)", line)):
                table[row[1]] = row[2]
            elif line and not line[0].isdigit():
                table = None

    def of(self, line: str) -> str:
        if direct := re.search(r'source_file="([^"]*)"', line):
            return direct[1]
        frame = re.search(r"stack_frame_id=(\d+)", line)
        location = _field(self._tables.get("StackFrames", {}), frame and frame[1], "location")
        file = _field(self._tables.get("FileLocations", {}), location, "name")
        return self._tables.get("FileNames", {}).get(file or "", "").strip('"')


def _field(table: dict[str, str], row: str | None, name: str) -> str | None:
    found = re.search(rf"file_{name}_id=(\d+)", table.get(row or "", ""))
    return found[1] if found else None


def _traced_name(line: str) -> str:
    found = re.search(r'op_name="([^"]*)"', line)
    return found[1] if found else ""


_PRODUCTS = ("attention", "expert matmul", "router")
_SILENT = {"parameter", "constant", "broadcast", "bitcast", "tuple", "get-tuple-element", "convert"}


def _kind(lines: Sequence[tuple[str, str]], sources: _Sources) -> str:
    """That of most operations that do something; products go before all else."""
    kinds = collections.Counter[str]()
    for opcode, line in lines:
        source = sources.of(line)
        kind = next((kind for part, kind in KINDS if part in source), "other")
        if opcode == "dot" or "__cublas" in line:
            return kind if kind in _PRODUCTS else "dense matmul"
        if kind != "other" and opcode not in _SILENT:
            kinds[kind] += 1
    if kinds:
        return kinds.most_common(1)[0][0]
    return "copies" if any(opcode.startswith("copy") for opcode, _ in lines) else "other"


# ---- the trace -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Kernel:
    name: str
    operation: str
    count: int = 0
    ns: float = 0.0


_SUMMARIES = ("XLA", "Steps", "Framework", "Source", "Launch", "TensorFlow")  # not a stream's line


def kernels(directory: Path) -> list[Kernel]:
    """All that ran on the device in a trace, by kernel and operation."""
    (path,) = directory.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))  # planes do not keep it alive
    on_device = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
    found: dict[tuple[str, str], Kernel] = {}
    for plane in on_device or data.planes:
        for line in plane.lines:
            for event in line.events:
                stats = {name: value for name, value in event.stats if name is not None}
                operation = str(stats.get("hlo_op", ""))
                if line.name.startswith(_SUMMARIES) or not (on_device or operation):
                    continue
                kernel = found.setdefault((event.name, operation), Kernel(event.name, operation))
                kernel.count += 1
                kernel.ns += event.duration_ns
    return list(found.values())


def traced(run: Callable[[], Any], runs: int) -> list[Kernel]:
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready([run() for _ in range(runs)])
        with warnings.catch_warnings():
            # jaxlib's, of its own types; as an error it would end the process.
            warnings.simplefilter("ignore", DeprecationWarning)
            return kernels(Path(directory))


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
    """Compiles at once, in other threads; runs later."""

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
        held = [pages]

        def run(executable: Any) -> Any:
            out, held[0] = executable(self._state, *others, held[0])
            return out

        wall = wall_us(lambda: run(fast))
        found = traced(lambda: run(serial), runs)
        return {"step": self._step.name, "wall_us": round(wall, 1)} | summed(
            found, operations(serial.as_text() or ""), runs
        )


def summed(found: Sequence[Kernel], by_name: dict[str, Operation], runs: int) -> dict[str, Any]:
    """Microseconds a run, by kind and by kernel. Loops are counted by what runs inside."""
    kinds: dict[str, float] = collections.defaultdict(float)
    rows = []
    for kernel in found:
        known = by_name.get(kernel.operation)
        if known and known.opcode in ("while", "conditional", "call"):
            continue
        us = kernel.ns / 1e3 / runs
        kind = _kind_of_kernel(kernel.name, known)
        kinds[kind] += us
        rows.append({
            "us": round(us, 2), "kind": kind, "launches": kernel.count / runs,
            "kernel": kernel.name, "operation": kernel.operation,
            "traced": known.name if known else "",
        })  # fmt: skip
    rows.sort(key=lambda row: -row["us"])
    total = sum(kinds.values())
    return {
        "kernels_us": round(total, 1),
        "launches": round(sum(row["launches"] for row in rows), 1),
        "kinds_us": {
            kind: round(us, 2) for kind, us in sorted(kinds.items(), key=lambda item: -item[1])
        },
        "kernels": rows,
    }


def _kind_of_kernel(name: str, known: Operation | None) -> str:
    if known is not None and known.kind != "other":
        return known.kind
    if "Memcpy" in name or "Memset" in name or "copy" in name.lower():
        return "copies"
    return "dense matmul" if any(part in name for part in _MATMUL) else "other"


def table(profile: dict[str, Any]) -> str:
    total = profile["kernels_us"] or 1.0
    lines = [
        f"{profile['weights']} {profile['step']}: wall {profile['wall_us']:.1f} us, kernels"
        f" {total:.1f} us in {profile['launches']:.0f} launches"
    ]
    for kind, us in profile["kinds_us"].items():
        lines.append(f"  {kind:20}{us:10.1f} us {100 * us / total:6.1f} %")
    for row in profile["kernels"][:SHOWN]:
        lines.append(
            f"    {row['us']:9.2f} us {row['launches']:5.1f}x {row['kind']:20}"
            f"{row['kernel'][:44]:45}{row['operation'][:28]:29}{row['traced'][-60:]}"
        )
    return "\n".join(lines)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One decoder layer, by kernel.")
    parser.add_argument("--model", default="deepseek-v3", help="a preset, or a path to config.json")
    parser.add_argument("--weights", nargs="+", default=["bf16", "fp8"], choices=("bf16", "fp8"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--experts", type=int, help="fewer of them, where memory is short")
    parser.add_argument("--decode", nargs="*", type=int, default=[1, 128], help="rows")
    parser.add_argument("--cached", type=int, default=4096, help="tokens a row, of decode steps")
    parser.add_argument("--prefill", nargs="*", type=int, default=[4096], help="tokens of a prompt")
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
                each.compile()  # all of them: XLA tries kernels on the device meanwhile
            for each in started:
                yield {"weights": weights} | each.measure(arguments.runs)
            layer = started = each = None  # before the next weights are made


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
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
