"""Say what this machine has and which back-ends work on it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dsv3_jax.checkpoint.load import DEMO
from dsv3_jax.cli import collectives, compile_cache

_PACKAGES = ("dsv3-jax", "jax", "jaxlib", "flax", "optax", "numpy", "safetensors", "tokenizers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="also time how tokens reach experts on other devices",
    )


def run(arguments: argparse.Namespace) -> None:
    found = examine()
    if arguments.collectives:
        found["collectives"] = collectives.measure()
    if arguments.json:
        print(json.dumps(found))
        return
    for title, rows in found.items():
        print(title)
        for name, value in rows.items():
            print(f"  {name:27} {value}")


def examine() -> dict[str, dict[str, Any]]:
    """Versions, devices, back-ends and caches, a section each."""
    return {
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "back-ends": _backends(),
        "files": {
            "compile cache": _folder(compile_cache.enable()),
            "demo checkpoint": _folder(DEMO),
        },
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def _devices() -> dict[str, str]:
    devices = jax.devices()
    memory = devices[0].memory_stats() or {}
    limit = memory.get("bytes_limit")
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": str(len(devices)),
        "memory each": f"{limit / 2**30:.1f} GiB" if limit else "not reported",
    }


def _backends() -> dict[str, str]:
    """Runs every back-end of every op on a small input and compares it with the reference."""
    out: dict[str, str] = {}
    for op, (arguments, keywords) in _small_inputs().items():
        api = importlib.import_module(f"pallas_kernels.{op}.api")
        expected = api.BACKENDS["reference"](*arguments, **keywords)
        for name, backend in api.BACKENDS.items():
            out[f"{op}: {name}"] = _try(backend, expected, arguments, keywords)
    return out


def _try(
    backend: Callable[..., Any], expected: Any, arguments: tuple, keywords: dict[str, Any]
) -> str:
    try:
        got = backend(*arguments, **keywords)
    except NotImplementedError as refusal:
        return f"not here: {refusal}"
    except Exception as error:  # a broken driver or compiler is what a doctor is asked about
        return f"fails: {type(error).__name__}: {str(error).splitlines()[0]}"
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    f32 = jnp.float32
    worst = max(float(jnp.max(jnp.abs(a.astype(f32) - b.astype(f32)))) for a, b in pairs)
    # Results of up to 4 in bfloat16, rounded in two ways; one that is wrong is off by about 1.
    return "works" if worst < 5e-2 else f"wrong: differs from the reference by {worst:.2g}"


def _small_inputs() -> dict[str, tuple[tuple, dict[str, Any]]]:
    key = jax.random.key(0)

    def normal(*shape: int) -> jax.Array:
        # What kernels take.
        return jax.random.normal(key, shape, jnp.bfloat16)

    qk = normal(1, 8, 4, 192)
    zero, eight = jnp.zeros(1, jnp.int32), jnp.full(1, 8, jnp.int32)
    tables, lengths = jnp.arange(2, dtype=jnp.int32).reshape(1, 2), jnp.array([70], jnp.int32)
    return {
        "mla_decode": (
            (normal(1, 1, 16, 512), normal(1, 1, 16, 64), normal(2, 64, 576), tables, lengths),
            {"scale": 0.05},
        ),
        "mla_prefill": ((qk, qk, normal(1, 8, 4, 128), zero, eight), {"scale": 0.05}),
        "grouped_matmul": (
            (normal(64, 128), normal(4, 128, 128) * 0.1, jnp.full(4, 16, jnp.int32)),
            {},
        ),
        "grouped_swiglu": (
            (
                normal(64, 128),
                normal(4, 128, 128) * 0.1,
                normal(4, 128, 128) * 0.1,
                jnp.full(4, 16, jnp.int32),
            ),
            {},
        ),
        "block_quant": ((normal(4, 256),), {}),
    }


def _folder(path: Path) -> str:
    if not path.is_dir():
        return f"{path} (not there yet)"
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    return f"{path} ({size / 1e6:.1f} MB)"
