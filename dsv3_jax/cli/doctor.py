"""``dsv3 doctor``: reports this machine's versions, devices and working back-ends."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import jax

from dsv3_jax import compile_cache
from dsv3_jax.checkpoint.find import DEMO
from dsv3_jax.cli import probes
from dsv3_jax.cli.output import print_json

_PACKAGES = ("dsv3-jax", "jax", "jaxlib", "flax", "optax", "numpy", "safetensors", "tokenizers")

_TITLES = {
    "probes": "probes: a small bfloat16 input for each operation",
    "allocator": "allocator: JAX's, on GPUs",
    "back-ends": "back-ends on these probes; one that refuses a small input may take a larger one",
    "chosen": "the back-end that each operation uses here on its probe",
}


def run(arguments: argparse.Namespace) -> None:
    report = examine(arguments.allocator)
    if arguments.collectives:
        report["collectives"] = probes.time_exchanges()
    if arguments.json:
        print_json(report)
        return
    for title, section in report.items():
        print(_TITLES.get(title, title))
        for name, value in section.items():
            print(f"  {name:29} {value}")


def examine(allocator: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Returns versions, devices, back-ends and caches, in one section each. ``allocator`` describes
    how the commands use the memory of GPUs."""
    cache = compile_cache.enable()
    outcomes = probes.examine(timed=jax.default_backend() != "cpu")
    return {
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "allocator": allocator,
        "probes": {probe.op: probe.input for probe in probes.probes()},
        "back-ends": outcomes,
        "chosen": probes.chosen(outcomes),
        "files": {
            "compile cache": "none" if cache is None else _describe_directory(cache),
            "demo checkpoint": _describe_directory(DEMO),
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


def _describe_directory(path: Path) -> str:
    if not path.is_dir():
        return f"{path} (does not exist yet)"
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    return f"{path} ({size / 1e6:.1f} MB)"
