"""How long rows take to other devices and back, by each exchange, on the devices at hand.

    python -m scripts.bench_exchange [--tokens 16 32 64 128 256] [--exchanges all_to_all kernel]
        [--profile] [--time-limit 85] [--out benchmarks/results/exchange_h200.json]

Rows are DeepSeek-V3's: hidden size 7,168, each token to 8 of 256 experts chosen at random. Those
of dtype ``uint8`` are parcels in float8, as they travel to experts, those of ``bfloat16`` sums, as
they travel back. A row of the result is one exchange of such rows and one back, behind each other
in a loop on the device, so that no time of Python's is in it; ``bytes`` are what a device sends
others in both, without places that no token takes, except that all_to_all sends those too.

First what the kernel (``pallas_kernels.token_exchange``) delivers is compared, bit by bit, where
rows and counts change from each exchange to the next, and devices come late. If it is wrong,
nothing is timed. Devices that wait for each other for ever are ended by the time limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.decode.machine import description
from benchmarks.profile import trace
from dsv3_jax.cli.collectives import median_seconds
from dsv3_jax.files import atomic_write
from pallas_kernels import token_exchange
from pallas_kernels.token_exchange import mosaic_gpu
from pallas_kernels.token_exchange.mosaic_gpu import Config
from sharding.expert_parallel import default_capacity
from sharding.parcel import Parcel
from sharding.token_queues import Queues

EXPERTS, CHOSEN = 256, 8
PAIRS = 200  # of exchanges, in the program that is timed
RAGGED_PAIRS = 2  # XLA's ragged_all_to_all takes milliseconds
CHECKED = 100  # exchanges of each check
LATE = 20  # steps of a loop that a device may come late by
GATHER = "all_gather + psum_scatter"
EXCHANGES = ("all_to_all", "kernel", GATHER, "ragged_all_to_all")


@dataclasses.dataclass(frozen=True)
class Case:
    """One program that is timed."""

    exchange: str
    tokens: int
    """A device."""
    dtype: Any
    width: int
    config: Config | None = None
    """Of the kernel."""
    empty: bool = False
    """No row travels: what the kernel costs at least."""

    @property
    def pairs(self) -> int:
        return RAGGED_PAIRS if self.exchange == "ragged_all_to_all" else PAIRS

    @property
    def name(self) -> str:
        setting = f" {self.config.blocks} x {self.config.stores}" if self.config else ""
        return self.exchange + setting + " of no row" * self.empty


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """The most telling first: the time limit may cut the last."""
    hidden = arguments.hidden
    parcel = Parcel(hidden, CHOSEN, np.dtype(jnp.bfloat16), float8=True)
    pair = jax.ShapeDtypeStruct((1, CHOSEN), jnp.int32), jax.ShapeDtypeStruct((1, CHOSEN), "f4")
    row = jax.eval_shape(parcel.pack, jax.ShapeDtypeStruct((1, hidden), jnp.bfloat16), *pair)
    kinds = (jnp.bfloat16, hidden), (row.dtype, row.shape[1])
    for dtype, width in kinds:
        for tokens, exchange in itertools.product(arguments.tokens, arguments.exchanges):
            if exchange != GATHER or dtype == jnp.bfloat16:
                yield Case(exchange, tokens, dtype, width)
    if "kernel" in arguments.exchanges:
        tokens = 64 if 64 in arguments.tokens else arguments.tokens[0]
        yield Case("kernel", tokens, jnp.bfloat16, hidden, empty=True)
        for blocks, stores in arguments.configs:
            yield Case("kernel", tokens, jnp.bfloat16, hidden, Config(blocks, stores))


def counts_of(devices: int, tokens: int, capacity: int) -> np.ndarray:
    """Tokens from each device (first axis) for each, of experts chosen at random."""
    chosen = np.random.default_rng(tokens).permuted(
        np.tile(np.arange(EXPERTS), (devices * tokens, 1)), axis=1
    )[:, :CHOSEN]
    owner = jnp.asarray(chosen // (EXPERTS // devices), jnp.int32)
    count = jax.vmap(lambda owner: Queues.of(owner, devices).counts)
    return np.minimum(count(owner.reshape(devices, tokens, CHOSEN)), capacity)


def exchange_once(case: Case, rows: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows [n, C, W] there; with the second array it goes back."""
    n, C, W = rows.shape
    if case.exchange == "kernel":
        if case.config:
            return mosaic_gpu.token_exchange(rows, counts, axes=("x",), config=case.config)
        return token_exchange(rows, counts, axes=("x",), implementation="mosaic_gpu")
    if case.exchange == "all_to_all":
        return lax.all_to_all(rows, "x", 0, 0, tiled=True), counts
    # That counts are known on both sides is not in the time: they lie here as from, to.
    me = lax.axis_index("x")
    places, size = jnp.arange(n, dtype=jnp.int32) * C, jnp.int32(C)
    flat = lax.ragged_all_to_all(
        rows.reshape(n * C, W),
        jnp.zeros((n * C, W), rows.dtype),
        places,
        counts[me],
        jnp.full(n, me * size),
        counts[:, me],
        axis_name="x",
    )
    return flat.reshape(n, C, W), counts.T


def many(case: Case, rows: jax.Array, counts: jax.Array) -> jax.Array:
    """The program that is timed."""

    def pair(_: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        if case.exchange == GATHER:
            everyones = lax.all_gather(state[0], "x", tiled=True)
            return lax.psum_scatter(everyones, "x", scatter_dimension=0, tiled=True), counts
        return exchange_once(case, *exchange_once(case, *state))

    return lax.fori_loop(0, case.pairs, pair, (rows, counts))[0]


def built(case: Case, mesh: Mesh) -> tuple[Any, tuple[jax.Array, ...], int]:
    """What is timed, lowered; its arguments; bytes that a device sends others in a pair."""
    n, T = mesh.size, case.tokens
    C = default_capacity(T, CHOSEN, n)
    counts = counts_of(n, T, C) * (0 if case.empty else 1)
    if case.exchange == GATHER:
        shape, sent = (n * T, case.width), 2 * (n - 1) * T
    else:
        shape, sent = (n * n, C, case.width), 2 * (n - 1) * C
        if case.exchange != "all_to_all":
            others = counts.sum() - np.trace(counts)
            sent = round(2 * others / n)
    everyones = case.exchange == "ragged_all_to_all"
    per_device = P() if everyones else P("x")
    ones = jax.jit(lambda: jnp.ones(shape, case.dtype), out_shardings=NamedSharding(mesh, P("x")))
    given = np.asarray(counts if everyones else counts.reshape(-1), np.int32)
    arguments = ones(), jax.device_put(given, NamedSharding(mesh, per_device))
    run = jax.shard_map(
        functools.partial(many, case),
        mesh=mesh,
        in_specs=(P("x"), per_device),
        out_specs=P("x"),
        check_vma=False,
    )
    lowered = jax.jit(run).lower(*arguments)
    return lowered, arguments, sent * case.width * jnp.dtype(case.dtype).itemsize


def check(mesh: Mesh, dtype: Any, C: int, W: int) -> Callable[[], int]:
    """How many values and counts are wrong in exchanges behind each other, all different.

    What a device sends in a step is a function of the step, of itself and of the other, so that the
    other knows what must come, and nothing but the kernel makes one wait for another.
    """
    n = mesh.size

    def sent(step: Any, one: Any, other: Any) -> tuple[jax.Array, jax.Array]:
        """[n, C, W] and [n] from each to each, where ``one`` or ``other`` are [n]."""
        seed = step * 7919 + one * 131 + other * 31
        place = jnp.arange(C)[:, None] * 1009 + jnp.arange(W)
        return (seed[:, None, None] + place).astype(dtype), seed % (C + 1)

    def local() -> jax.Array:
        me, others = lax.axis_index("x"), jnp.arange(n)

        def step(i: jax.Array, wrong: jax.Array) -> jax.Array:
            late = (me * 5 + i * 7) % LATE
            waited = lax.fori_loop(0, late, lambda _, v: v * 0.5 + 1, i.astype(jnp.float32))
            rows, counts = sent(i + (waited < 0), me, others)  # it is not: a wait, no more
            received, came = token_exchange(rows, counts, axes=("x",), implementation="mosaic_gpu")
            want, due = sent(i, others, me)
            there = jnp.arange(C) < due[:, None]
            return wrong + jnp.sum(there[..., None] & (received != want)) + jnp.sum(came != due)

        return lax.fori_loop(0, CHECKED, step, jnp.int32(0)).reshape(1)

    run = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P("x"), check_vma=False)
    compiled = jax.jit(run).lower().compile()
    return lambda: int(np.sum(compiled()))


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    devices = jax.devices()[: arguments.devices]
    mesh = Mesh(np.array(devices), ("x",))
    result: dict[str, Any] = description() | {"devices": len(devices), "rows": []}
    exchanges = list(arguments.exchanges)
    if "kernel" in exchanges:
        try:
            checks = {
                f"{jnp.dtype(dtype).name} {C} x {W}": check(mesh, dtype, C, W)
                for dtype, C, W in [
                    (jnp.uint8, 16, arguments.hidden + 288),
                    (jnp.uint16, 64, arguments.hidden),
                    (jnp.uint16, 3, 1032),
                ]
            }
        except NotImplementedError as refusal:
            print(f"the kernel is left out: {refusal}", flush=True)
            exchanges.remove("kernel")
            checks = {}
        for name, wrong in checks.items():
            found = wrong()
            print(f"checked {name}: {found} wrong ({time.monotonic() - began:.0f} s)", flush=True)
            if found:
                raise SystemExit("the kernel is wrong: nothing is timed")
    arguments.exchanges = exchanges
    chosen = [
        case
        for case in cases(arguments)
        if case.exchange != "ragged_all_to_all" or devices[0].platform != "cpu"
    ]
    programs = [built(case, mesh) for case in chosen]
    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(lambda program: program[0].compile(), programs))
    print(f"compiled {len(compiled)} programs ({time.monotonic() - began:.0f} s)", flush=True)
    for case, run, (_, given, sent) in zip(chosen, compiled, programs, strict=True):
        if time.monotonic() - began > 0.8 * arguments.time_limit:
            print("the rest is left out: no time", flush=True)
            break
        us = 1e6 * median_seconds(run, given) / case.pairs
        row = {
            "exchange": case.name,
            "devices": len(devices),
            "tokens": case.tokens,
            "dtype": jnp.dtype(case.dtype).name,
            "bytes": sent,
            "us": round(us, 2),
        }
        result["rows"].append(row)
        print("  ".join(f"{value!s:>12}" for value in row.values()), flush=True)
    if arguments.profile:
        result["profiles"] = [
            profile(next(case for case in chosen if case.exchange == exchange), mesh)
            for exchange in exchanges
        ]
    return result


def profile(case: Case, mesh: Mesh) -> dict[str, Any]:
    """Microseconds and launches of each kernel, a pair of exchanges on a device."""
    lowered, given, _ = built(case, mesh)
    run = lowered.compile(compiler_options=trace.CAPTURED)
    found = trace.by_name(trace.traced(lambda: run(*given), 1), case.pairs * mesh.size)
    print(f"{case.name}, {case.tokens} tokens, by kernel:")
    for kernel in found[:8]:
        print(
            f"{kernel['us']:9.2f} us {kernel['launches']:6.2f} x {kernel['kernel'][:90]}",
            flush=True,
        )
    return {"exchange": case.name, "tokens": case.tokens, "kernels": found[: trace.SHOWN]}


def parse(words: Sequence[str]) -> argparse.Namespace:
    def config(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split("x")))

    parser = argparse.ArgumentParser(description="Exchanges of rows between devices, timed.")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--devices", type=int, help="how many; default: all")
    parser.add_argument("--exchanges", nargs="+", default=list(EXCHANGES[:3]), choices=EXCHANGES)
    parser.add_argument(
        "--configs", nargs="*", type=config, default=[], help="BLOCKSxSTORES of the kernel, also"
    )
    parser.add_argument("--profile", action="store_true", help="by kernel, the first of each")
    parser.add_argument("--time-limit", type=float, default=85, help="seconds for all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help="in this process, without a limit")
    return parser.parse_args(words)


def main() -> None:
    arguments = parse(sys.argv[1:])
    if not arguments.here:
        command = [sys.executable, "-m", "scripts.bench_exchange", *sys.argv[1:], "--here"]
        try:
            sys.exit(subprocess.run(command, timeout=arguments.time_limit).returncode)
        except subprocess.TimeoutExpired:
            sys.exit(f"ended after {arguments.time_limit:.0f} s")
    result = bench(arguments)
    if arguments.out:
        atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
