"""Times each token exchange between the available devices, there and back.

    python -m scripts.bench_exchange [--tokens 16 32 64 128 256] [--exchanges all_to_all kernel]
        [--profile] [--time-limit 85] [--out benchmarks/results/exchange_h200.json]

The rows have DeepSeek-V3's sizes: hidden size 7,168, and each token goes to 8 of 256 experts chosen
at random. Rows of dtype ``uint8`` are packed float8 tokens, as sent to experts; rows of dtype
``bfloat16`` are sums, as sent back. A result is the time of one exchange there and one back, in a
loop on the device that excludes Python. ``bytes`` is what a device sends to others in both. Unused
slots count only for all_to_all, which sends them.

First the results of the kernel (``pallas_kernels.token_exchange``) are checked bit by bit, with
rows and counts that change between exchanges, and with devices that arrive late. If they are wrong,
nothing is timed. A deadlock ends at the time limit.
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
from sharding.dispatch_table import DispatchTable
from sharding.expert_parallel import default_capacity
from sharding.token_packer import TokenPacker

EXPERTS, CHOSEN = 256, 8
PAIRS = 200  # pairs of exchanges in the timed program
RAGGED_PAIRS = 2  # XLA's ragged_all_to_all takes milliseconds
CHECKED = 100  # exchanges per check
LATE = 20  # maximum delay of a device, in iterations of a loop
GATHER = "all_gather + psum_scatter"
EXCHANGES = ("all_to_all", "kernel", GATHER, "ragged_all_to_all")


@dataclasses.dataclass(frozen=True)
class Case:
    """A timed program."""

    exchange: str
    tokens: int
    """Tokens per device."""
    dtype: Any
    width: int
    config: Config | None = None
    """Setting of the kernel, or None for its default."""
    empty: bool = False
    """Whether to send no rows, which measures the kernel's fixed cost."""

    @property
    def pairs(self) -> int:
        return RAGGED_PAIRS if self.exchange == "ragged_all_to_all" else PAIRS

    @property
    def name(self) -> str:
        setting = f" {self.config.blocks} x {self.config.stores}" if self.config else ""
        return self.exchange + setting + " of no row" * self.empty


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yields the cases, the most important first, because the time limit may cut off the last."""
    hidden = arguments.hidden
    packer = TokenPacker(hidden, CHOSEN, np.dtype(jnp.bfloat16), float8=True)
    pair = jax.ShapeDtypeStruct((1, CHOSEN), jnp.int32), jax.ShapeDtypeStruct((1, CHOSEN), "f4")
    row = jax.eval_shape(packer.pack, jax.ShapeDtypeStruct((1, hidden), jnp.bfloat16), *pair)
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
    """Returns the number of tokens from each device (first axis) to each, for random experts."""
    chosen = np.random.default_rng(tokens).permuted(
        np.tile(np.arange(EXPERTS), (devices * tokens, 1)), axis=1
    )[:, :CHOSEN]
    owner = jnp.asarray(chosen // (EXPERTS // devices), jnp.int32)
    count = jax.vmap(lambda owner: DispatchTable.from_owners(owner, devices).counts)
    return np.minimum(count(owner.reshape(devices, tokens, CHOSEN)), capacity)


def exchange_once(case: Case, rows: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exchanges rows [n, C, W]. Returns the received rows, and the counts to send them back."""
    n, C, W = rows.shape
    if case.exchange == "kernel":
        if case.config:
            return mosaic_gpu.token_exchange(rows, counts, axes=("x",), config=case.config)
        return token_exchange(rows, counts, axes=("x",), implementation="mosaic_gpu")
    if case.exchange == "all_to_all":
        return lax.all_to_all(rows, "x", 0, 0, tiled=True), counts
    # The time excludes the exchange of counts, which both sides know here as [from, to].
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
    """Runs all pairs of exchanges of a case."""

    def pair(_: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        if case.exchange == GATHER:
            everyones = lax.all_gather(state[0], "x", tiled=True)
            return lax.psum_scatter(everyones, "x", scatter_dimension=0, tiled=True), counts
        return exchange_once(case, *exchange_once(case, *state))

    return lax.fori_loop(0, case.pairs, pair, (rows, counts))[0]


def built(case: Case, mesh: Mesh) -> tuple[Any, tuple[jax.Array, ...], int]:
    """Returns the lowered program, its arguments, and the bytes that a device sends per pair."""
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
    """Compiles a check. Calling it returns the number of wrong values in successive exchanges.

    What a device sends is a function of the step, the sender and the receiver, so that the receiver
    can compute what it must receive, and only the kernel synchronises the devices.
    """
    n = mesh.size

    def sent(step: Any, one: Any, other: Any) -> tuple[jax.Array, jax.Array]:
        """Returns rows [n, C, W] and counts [n] from ``one`` to ``other``; one of these is [n]."""
        seed = step * 7919 + one * 131 + other * 31
        place = jnp.arange(C)[:, None] * 1009 + jnp.arange(W)
        return (seed[:, None, None] + place).astype(dtype), seed % (C + 1)

    def local() -> jax.Array:
        me, others = lax.axis_index("x"), jnp.arange(n)

        def step(i: jax.Array, wrong: jax.Array) -> jax.Array:
            late = (me * 5 + i * 7) % LATE
            waited = lax.fori_loop(0, late, lambda _, v: v * 0.5 + 1, i.astype(jnp.float32))
            rows, counts = sent(
                i + (waited < 0), me, others
            )  # always false: only creates a dependency on the delay
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
            print(f"the kernel is skipped: {refusal}", flush=True)
            exchanges.remove("kernel")
            checks = {}
        for name, wrong in checks.items():
            errors = wrong()
            print(f"checked {name}: {errors} wrong ({time.monotonic() - began:.0f} s)", flush=True)
            if errors:
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
            print("the remaining cases are skipped: the time limit is near", flush=True)
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
    """Returns microseconds and launches of each kernel, per pair of exchanges and device."""
    lowered, given, _ = built(case, mesh)
    run = lowered.compile(compiler_options=trace.CAPTURED)
    kernels = trace.by_name(trace.traced(lambda: run(*given), 1), case.pairs * mesh.size)
    print(f"{case.name}, {case.tokens} tokens, by kernel:")
    for kernel in kernels[:8]:
        print(
            f"{kernel['us']:9.2f} us {kernel['launches']:6.2f} x {kernel['kernel'][:90]}",
            flush=True,
        )
    return {"exchange": case.name, "tokens": case.tokens, "kernels": kernels[: trace.SHOWN]}


def parse(words: Sequence[str]) -> argparse.Namespace:
    def config(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split("x")))

    parser = argparse.ArgumentParser(description="Time token exchanges between devices.")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--devices", type=int, help="number of devices; default: all")
    parser.add_argument("--exchanges", nargs="+", default=list(EXCHANGES[:3]), choices=EXCHANGES)
    parser.add_argument(
        "--configs",
        nargs="*",
        type=config,
        default=[],
        help="additional kernel settings, BLOCKSxSTORES",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also profile the first case of each exchange by kernel",
    )
    parser.add_argument("--time-limit", type=float, default=85, help="seconds for the whole run")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--here", action="store_true", help="run in this process, without a time limit"
    )
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
