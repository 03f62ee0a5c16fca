"""Runs every back-end of every operation on a small input, and compares it with the reference."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_dtypes import bfloat16

# Results are at most 4 and may round differently in bfloat16. A wrong result is off by about 1.
_TOLERANCE = 5e-2


class Probe(NamedTuple):
    """A small input of an operation."""

    op: str
    """Name of the operation, a package in ``pallas_kernels``."""
    input: str
    """Description of the input."""
    arrays: tuple[np.ndarray, ...]
    """Positional arguments."""
    settings: dict[str, Any]
    """Keyword arguments."""


def examine() -> dict[str, str]:
    """Runs all probes.

    Returns:
      The outcome of each back-end, by ``"operation: back-end"``: "works" if the result agrees with
      the reference, "refused" with the back-end's reason, "wrong" with the difference, or "fails"
      with the exception.
    """
    outcomes: dict[str, str] = {}
    for probe in probes():
        backends = importlib.import_module(f"pallas_kernels.{probe.op}.api").BACKENDS
        try:
            expected = _run(backends["reference"], probe)
        except Exception as error:
            outcomes[f"{probe.op}: reference"] = _failure(error)
            continue
        for name, backend in backends.items():
            outcomes[f"{probe.op}: {name}"] = (
                "works" if name == "reference" else _outcome(backend, probe, expected)
            )
    return outcomes


def probes() -> list[Probe]:
    """Returns a probe for each operation with several back-ends, of a shape that all of them
    take."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, np.float32).astype(bfloat16)

    tables, lengths = np.arange(2, dtype=np.int32).reshape(1, 2), np.array([70], np.int32)
    start, count = np.zeros(1, np.int32), np.full(1, 8, np.int32)
    tokens, group_sizes = normal(128, 128), np.full(4, 32, np.int32)
    gate, up = (normal(4, 128, 128) * bfloat16(0.1) for _ in range(2))
    return [
        Probe(
            "mla_decode",
            "1 query of 16 heads, 70 cached tokens",
            (normal(1, 1, 16, 512), normal(1, 1, 16, 64), normal(2, 64, 576), tables, lengths),
            {"scale": 0.05},
        ),
        Probe(
            "mla_prefill",
            "8 tokens, 4 heads",
            (normal(1, 8, 4, 192), normal(1, 8, 4, 192), normal(1, 8, 4, 128), start, count),
            {"scale": 0.05},
        ),
        Probe("grouped_matmul", "4 groups of 32 rows, 128 x 128", (tokens, gate, group_sizes), {}),
        Probe(
            "grouped_swiglu", "4 groups of 32 rows, 128 x 128", (tokens, gate, up, group_sizes), {}
        ),
        Probe("block_quant", "4 x 256", (normal(4, 256),), {}),
    ]


def _outcome(backend: Callable[..., Any], probe: Probe, expected: list[np.ndarray]) -> str:
    try:
        got = _run(backend, probe)
    except NotImplementedError as refusal:
        return f"refused: {refusal}"
    except Exception as error:  # for example a broken driver or compiler, which doctor reports
        return _failure(error)
    worst = max(float(np.abs(a - b).max()) for a, b in zip(got, expected, strict=True))
    return "works" if worst < _TOLERANCE else f"wrong: differs from the reference by {worst:.2g}"


def _failure(error: Exception) -> str:
    return f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _run(backend: Callable[..., Any], probe: Probe) -> list[np.ndarray]:
    # Jitted as one program. Otherwise JAX would compile dozens, one for each operation.
    result = jax.jit(functools.partial(backend, **probe.settings))(*probe.arrays)
    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(result)]
