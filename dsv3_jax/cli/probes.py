"""Runs every back-end of every operation on a small input, and compares it with the reference; and
times every exchange that can bring tokens to their experts and back.

On an accelerator each call of a back-end is also timed. Such a small call mostly consists of its
launch: the times tell a back-end that works from one that is out of order, not how fast a model
runs.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from ml_dtypes import bfloat16

from pallas_kernels.block_quant import api as block_quant
from pallas_kernels.cross_entropy import api as cross_entropy
from pallas_kernels.grouped_matmul import api as grouped_matmul
from pallas_kernels.grouped_swiglu import api as grouped_swiglu
from pallas_kernels.mla_decode import api as mla_decode
from pallas_kernels.mla_prefill import api as mla_prefill
from pallas_kernels.sparse_index import api as sparse_index
from pallas_kernels.sparse_mla_decode import api as sparse_mla_decode
from pallas_kernels.top_k import api as top_k
from sharding import Exchange, make_layout, mix_experts

# Results are at most 4 and may round differently in bfloat16. A wrong result is off by about 1.
_TOLERANCE = 5e-2

_TIMED_CALLS = 20


class Probe(NamedTuple):
    """A small input of an operation."""

    op: str  # name of the operation
    backends: dict[str, Callable[..., Any]]  # by name, in the order of dispatch
    input: str  # description of the input
    arrays: tuple[np.ndarray, ...]  # positional arguments
    settings: dict[str, Any]  # keyword arguments


def examine(*, timed: bool = False) -> dict[str, str]:
    """Runs all probes. Returns the outcome of each back-end, by ``"operation: back-end"``: "works",
    with its time if ``timed``, if the result agrees with the reference, "refused" with the reason,
    "wrong" with the difference, or "fails" with the exception."""
    outcomes: dict[str, str] = {}
    for probe in probes():
        try:
            expected = _run(_jitted(probe.backends["reference"], probe), probe)
        except Exception as error:
            outcomes[f"{probe.op}: reference"] = _failure(error)
            continue
        for name, backend in probe.backends.items():
            outcomes[f"{probe.op}: {name}"] = _outcome(backend, probe, expected, timed)
    return outcomes


def chosen(outcomes: dict[str, str]) -> dict[str, str]:
    """Returns the back-end that each operation uses on its probe: the first of :func:`examine`, in
    the order of dispatch, that takes it."""
    used: dict[str, str] = {}
    for key, outcome in outcomes.items():
        op, _, backend = key.partition(": ")
        if op not in used and not outcome.startswith("refused"):
            used[op] = backend
    fastest = "reference, in plain JAX: no faster back-end takes the probe here"
    return {op: fastest if name == "reference" else name for op, name in used.items()}


def probes() -> list[Probe]:
    """Returns a probe for each operation with several back-ends, of a shape that all of them
    take."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, np.float32).astype(bfloat16)

    tables, lengths = np.arange(2, dtype=np.int32).reshape(1, 2), np.array([70], np.int32)
    tokens, group_sizes = normal(128, 128), np.full(4, 32, np.int32)
    gate, up = (normal(4, 128, 128) * bfloat16(0.1) for _ in range(2))
    index_weights = generator.standard_normal((1, 1, 8), np.float32) / 64
    scores = generator.standard_normal((2, 600), np.float32)
    # 64 of 70 tokens for the first query, and a single one for the second.
    selected = np.stack([np.arange(6, 70), np.full(64, -1)]).astype(np.int32)[None]
    selected[0, 1, 0] = 69
    return [
        Probe(
            "mla_decode",
            mla_decode.BACKENDS,
            "1 query of 16 heads, 70 cached tokens",
            (normal(1, 1, 16, 512), normal(1, 1, 16, 64), normal(2, 64, 576), tables, lengths),
            {"scale": 0.05},
        ),
        Probe(
            "mla_prefill",
            mla_prefill.BACKENDS,
            "600 tokens, 4 heads",
            tuple(normal(1, 600, 4, width) for width in (192, 192, 128)),
            {"scale": 0.05},
        ),
        Probe(
            "grouped_matmul",
            grouped_matmul.BACKENDS,
            "4 groups of 32 rows, 128 x 128",
            (tokens, gate, group_sizes),
            {},
        ),
        Probe(
            "grouped_swiglu",
            grouped_swiglu.BACKENDS,
            "4 groups of 32 rows, 128 x 128",
            (tokens, gate, up, group_sizes),
            {},
        ),
        Probe(
            "sparse_index",
            sparse_index.BACKENDS,
            "1 query of 8 heads, 70 cached keys of 128",
            (normal(1, 1, 8, 128), index_weights, normal(2, 64, 128), tables, lengths),
            {},
        ),
        Probe("top_k", top_k.BACKENDS, "64 of 600 scores, twice", (scores,), {"k": 64}),
        Probe(
            "sparse_mla_decode",
            sparse_mla_decode.BACKENDS,
            "2 queries of 16 heads, 64 and 1 of 70 cached tokens",
            (normal(1, 2, 16, 512), normal(1, 2, 16, 64), normal(2, 64, 576), tables, selected),
            {"scale": 0.05},
        ),
        Probe(
            "sparse_mla_prefill",
            sparse_mla_decode.PREFILL_BACKENDS,
            "2 queries of 16 heads, 64 and 1 of 70 tokens",
            (normal(1, 2, 16, 512), normal(1, 2, 16, 64), normal(1, 70, 576), selected),
            {"scale": 0.05},
        ),
        Probe(
            "cross_entropy",
            cross_entropy.BACKENDS,
            "2 rows of 512 logits",
            (normal(2, 512), np.array([0, 300], np.int32), np.ones(2, np.float32)),
            {},
        ),
        Probe("block_quant", block_quant.BACKENDS, "4 x 256", (normal(4, 256),), {}),
    ]


def _outcome(
    backend: Callable[..., Any], probe: Probe, expected: list[np.ndarray], timed: bool
) -> str:
    call = _jitted(backend, probe)
    try:
        got = _run(call, probe)
    except NotImplementedError as refusal:
        return f"refused: {refusal}"
    except Exception as error:  # for example a broken driver or compiler, which doctor reports
        return _failure(error)
    worst = max(_difference(a, b) for a, b in zip(got, expected, strict=True))
    if not worst < _TOLERANCE:
        return f"wrong: differs from the reference by {worst:.2g}"
    return f"works, {1e6 * _seconds(call, probe):.0f} us a call" if timed else "works"


def _difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference. Equal infinities do not differ, and NaN differs from all."""
    with np.errstate(invalid="ignore"):
        return float(np.where(got == expected, 0, np.abs(got - expected)).max())


def _failure(error: Exception) -> str:
    return f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _jitted(backend: Callable[..., Any], probe: Probe) -> Callable[..., Any]:
    # Jitted as one program. Otherwise JAX would compile dozens, one for each operation.
    return jax.jit(functools.partial(backend, **probe.settings))


def _run(call: Callable[..., Any], probe: Probe) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(call(*probe.arrays))]


def _seconds(call: Callable[..., Any], probe: Probe) -> float:
    """Returns the mean time of a call. Calls are queued, so that the device is never idle."""
    arrays = jax.device_put(probe.arrays)
    jax.block_until_ready(call(*arrays))
    began = time.perf_counter()
    results = [call(*arrays) for _ in range(_TIMED_CALLS)]
    jax.block_until_ready(results)
    return (time.perf_counter() - began) / _TIMED_CALLS


_TOKENS = (8, 64, 512)  # per device: a small decode batch, a large one, and a prompt
_HIDDEN, _EXPERTS_PER_TOKEN = 7168, 8  # as in DeepSeek-V3
_HIDDEN_ON_CPU = 256  # simulated devices only show that it runs; their times mean nothing
_EXPERTS_PER_DEVICE = 8
_LAYERS, _REPEATS = 16, 5


def time_exchanges() -> dict[str, str]:
    """Returns the microseconds per layer of each exchange, and the fastest one, by tokens per
    device. They are bfloat16, on a CPU float32. Experts are chosen at random and return their
    input. Float8 dispatch is timed, but never proposed, because it changes results."""
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
                lambda inputs, rows, _sizes, _copies: (inputs[rows], Partial(lambda x: x)),
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
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times) / _LAYERS
