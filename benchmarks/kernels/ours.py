"""The child process of JAX: our kernels, XLA's own lowering, and JAX's share of the ceilings."""

from __future__ import annotations

import functools
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from benchmarks.kernels import checks, inputs
from benchmarks.kernels.inputs import Arrays
from benchmarks.kernels.shapes import (
    CALLS,
    LATENT,
    Case,
    Decode,
    Grouped,
    Prefill,
    decoded,
    encoded,
    guessed_us,
    key,
    rotation,
)
from benchmarks.kernels.workers import Reply, reason, serve

Call = Callable[[Arrays], checks.Checked]

WINDOWS, WINDOW_S = 7, 0.02
COMPILATIONS = 12  # at once
IN_FLIGHT_BYTES = 8e9  # of outputs that wait for nothing but their release
SHORT = "lengths", "group_sizes", "q"  # the arguments that a lap's first result stands before


def call_of(case: Case, implementation: str) -> Call:
    op = getattr(pallas_kernels, case.op)
    keywords = inputs.options(case) | {"implementation": implementation}

    def call(arrays: Arrays) -> checks.Checked:
        out = op(**arrays, **keywords)
        return out if isinstance(out, tuple) else (out, None)

    return call


def plan(case: Case, arrays: Arrays) -> dict[str, Any]:
    """What the op reads beside its inputs and a model makes once a step, for all its layers."""
    if not isinstance(case, Decode):
        return {}
    queries, heads = arrays["q_latent"].shape[1:3]
    made = pallas_kernels.mla_decode_schedule(
        arrays["lengths"],
        queries=queries,
        heads=heads,
        max_pages=arrays["block_tables"].shape[1],
    )
    return {"schedule": made}


# ---- timing --------------------------------------------------------------------------------------


def program(call: Call, laps: int) -> Callable[[list[Arrays]], list[jax.Array]]:
    """Calls one after the other, on each set in turn, ``laps`` times over.

    Every result is returned, and each call waits for the one before it: XLA would merge equal
    calls, drop those of no use, and run independent ones at once.
    """
    one = jax.jit(call)  # lowered once for all calls

    def run(sets: list[Arrays]) -> list[jax.Array]:
        results = []
        for _ in range(laps):
            for arrays in sets:
                if results:
                    name = next(n for n in SHORT if n in arrays)
                    short, results[-1] = jax.lax.optimization_barrier((arrays[name], results[-1]))
                    arrays = arrays | {name: short}
                results.append(one(arrays)[0])
        return results

    return run


def compile_program(case: Case, call: Call, sets: int, laps: int, extra: bool) -> Callable[[], Any]:
    """Lowers now; the returned function compiles."""
    one = inputs.structs(case)
    if extra:
        one |= jax.eval_shape(functools.partial(plan, case), one)
    lowered = jax.jit(program(call, laps)).lower([one] * sets)
    # Kernels of a captured graph one by one, as in the streams that the peers are captured from.
    options: dict[str, str | bool] = (
        {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
        if jax.default_backend() == "gpu"
        else {}
    )
    return lambda: lowered.compile(compiler_options=options)


def median_seconds(run: Callable[[], Any], calls: int, out_bytes: float) -> float:
    """A call's, in windows of many programs in flight."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    once = time.perf_counter() - began
    at_once = max(2, min(int(WINDOW_S / once) + 1, int(IN_FLIGHT_BYTES / out_bytes)))
    seconds = []
    for _ in range(WINDOWS):
        began = time.perf_counter()
        out = None
        for _ in range(at_once):
            out = run()
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - began) / (at_once * calls))
    return statistics.median(seconds)


# ---- XLA's own lowering --------------------------------------------------------------------------


def xla_call(case: Case) -> Call | str:
    """What a JAX user would write without kernels, or why it is not run."""
    if isinstance(case, Decode):
        return functools.partial(_dense_decode, case)
    if isinstance(case, Prefill):
        return "all scores at once do not fit"
    if case.M * len(case.sizes) * case.N * case.K > 4e12:
        return "XLA multiplies every row by every group's matrix: too slow here"
    if case.dtype != "bf16" and len(case.sizes) * case.N * case.K > 2e9:
        return "dequantised matrices do not fit"
    return call_of(case, "reference")


def _in_order(arrays: Arrays) -> Arrays:
    """The cache of each row as one, in the order of its tokens."""
    tables = arrays["block_tables"]
    return arrays | {
        "pages": arrays["pages"][tables.reshape(-1)],
        "block_tables": jnp.arange(tables.size, dtype=jnp.int32).reshape(tables.shape),
    }


def _dense_decode(case: Decode, arrays: Arrays) -> checks.Checked:
    """Two einsums over a dense cache, whose pages stand in order (:func:`_in_order`)."""
    B, S = case.rows, case.cached
    cache = arrays["pages"].reshape(B, -1, arrays["pages"].shape[-1])[:, :S]
    q = jnp.concatenate([arrays["q_latent"], arrays["q_rope"]], axis=-1)
    f32 = jnp.float32
    scores = jnp.einsum("bthk,bsk->bths", q, cache, preferred_element_type=f32)
    visible = jnp.arange(S) < S - case.queries + 1 + jnp.arange(case.queries)[:, None]
    scores = jnp.where(visible[:, None], scores * inputs.options(case)["scale"], -jnp.inf)
    p = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("bths,bsc->bthc", p, cache[..., :LATENT], preferred_element_type=f32)
    return out.astype(q.dtype), None


# ---- requests ------------------------------------------------------------------------------------


class Session:
    def __init__(self, implementation: str, most_calls: int = CALLS):
        self.implementation = implementation
        self._most_calls = most_calls
        self._pool = ThreadPoolExecutor(COMPILATIONS)
        self._programs: dict[str, Future[Any] | str] = {}

    def start(self) -> Reply:
        device = jax.devices()[0]
        versions = {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}
        return {"versions": versions, "gpu": device.device_kind}

    def compile(self, cases: Sequence[dict[str, Any]]) -> Reply:
        """Lowers all; their compilations go on behind."""
        for case in map(decoded, cases):
            sets, laps = rotation(case, guessed_us(case), self._most_calls)
            try:
                call = call_of(case, self.implementation)
                build = compile_program(case, call, sets, laps, True)
                self._programs[key(case)] = self._pool.submit(_timed, build)
            except Exception as error:
                self._programs[key(case)] = reason(error)
        return {}

    def check(self, case: dict[str, Any], repeats: int) -> Reply:
        """{"wrong": None}, or why the op is wrong on ragged inputs."""
        return {"wrong": self._ragged(decoded(case), repeats)}

    def _ragged(self, case: Case, repeats: int) -> str | None:
        for seed in range(2 if isinstance(case, Grouped) else 1):
            arrays, want, defined = checks.ragged(case, seed)
            run = jax.jit(call_of(case, self.implementation))
            first = defined(run(arrays))
            wrong = checks.verdict(first, want)
            if wrong:
                return f"{wrong} (ragged inputs {seed})"
            if self._differ(run, arrays, first, defined, repeats):
                return f"results differ between {repeats} equal runs (ragged inputs {seed})"
        return None

    def _differ(self, run, arrays, first, defined, repeats: int) -> bool:
        @jax.jit
        def differs(result, first):
            parts = zip(defined(result), first, strict=True)
            return sum(jnp.sum(~_same_bits(a, b)) for a, b in parts if b is not None)

        total = jnp.int32(0)
        for _ in range(repeats - 1):
            total = total + differs(run(arrays), first)
        return int(total) > 0

    def run(self, case: dict[str, Any], ours: bool, xla: bool) -> Reply:
        """Times our kernel, XLA's lowering, or both: {"us": ...} and {"xla": {"us": ...}}."""
        return self._run(decoded(case), ours, xla)

    def _run(self, case: Case, ours: bool, xla: bool) -> Reply:
        sets, laps = rotation(case, guessed_us(case), self._most_calls)
        arrays = [inputs.make(case, seed) for seed in range(sets)]
        reply: Reply = {"sets": sets}
        if ours:
            reply |= self._ours(case, arrays, laps)
        if xla:
            reply["xla"] = self._xla(case, arrays)
        return reply

    def _xla(self, case: Case, arrays: list[Arrays]) -> Reply:
        call = xla_call(case)
        if isinstance(call, str):
            return {"error": call}
        try:
            if isinstance(case, Decode):
                arrays = [jax.jit(_in_order)(a) for a in arrays]
            build = compile_program(case, call, len(arrays), 1, False)
            return self._time(case, build(), arrays, 1)
        except Exception as error:
            return {"error": reason(error)}

    def _ours(self, case: Case, arrays: list[Arrays], laps: int) -> Reply:
        if key(case) not in self._programs:  # lost with the process that a row before took along
            self.compile([encoded(case)])
        compiled = self._programs.pop(key(case))
        if isinstance(compiled, str):
            return {"error": compiled}
        try:
            planned = jax.jit(functools.partial(plan, case))  # one, or each set compiles its own
            with_plan = [a | planned(a) for a in arrays]
            executable, seconds = compiled.result()
            return self._time(case, executable, with_plan, laps) | {"compile_s": seconds}
        except Exception as error:
            return {"error": reason(error)}

    def _time(self, case: Case, executable: Any, arrays: list[Arrays], laps: int) -> Reply:
        calls = len(arrays) * laps
        results = executable(arrays)
        again = executable(arrays)
        wrong = checks.spot(case, arrays[0], (results[0], None))
        if wrong:
            return {"error": wrong}
        others = again[0], again[-len(arrays)]
        if not all(bool(jnp.all(_same_bits(results[0], x))) for x in others):
            return {"error": "wrong: equal calls gave other bits"}
        del again, others
        out_bytes = sum(x.nbytes for x in results)
        del results
        seconds = median_seconds(lambda: executable(arrays), calls, out_bytes)
        return {"us": seconds * 1e6}

    def ceilings(self) -> Reply:
        """bfloat16 and float8 products of 8192^3, a copy and a sum of 2 GiB."""
        n, words = (8192, 2**30) if jax.default_backend() == "gpu" else (256, 2**20)
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
        found: Reply = {}

        def time_of(name: str, f: Callable[..., jax.Array], *args: jax.Array) -> float | None:
            try:
                f = jax.jit(f)
                return median_seconds(lambda: f(*args), 1, f(*args).nbytes)
            except Exception as error:
                found[name] = reason(error)
                return None

        def product(a, b):
            return jax.lax.dot_general(
                a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
            )

        for name, dtype in (("bf16", jnp.bfloat16), ("fp8", jnp.float8_e4m3fn)):
            a, b = (jax.random.normal(k, (n, n), jnp.bfloat16).astype(dtype) for k in keys[:2])
            if seconds := time_of(f"xla_{name}", product, a, b):
                found[f"xla_{name}_tflops"] = 2 * n**3 / seconds / 1e12
        x = jax.random.normal(keys[2], (words,), jnp.bfloat16)
        if seconds := time_of("xla_copy", lambda x: -x, x):
            found["xla_copy_gbs"] = 2 * x.nbytes / seconds / 1e9
        if seconds := time_of("xla_sum", lambda x: jnp.sum(x, dtype=jnp.float32), x):
            found["xla_read_sum_gbs"] = x.nbytes / seconds / 1e9
        return found


def _timed(build: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return build(), time.perf_counter() - began


def _same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    """Equal values: NaN is equal to nothing, and no result may hold one."""
    return a == b


def main() -> None:
    session = Session(sys.argv[1], int(sys.argv[2]))
    serve({
        "start": session.start, "compile": session.compile, "check": session.check,
        "run": session.run, "ceilings": session.ceilings,
    })  # fmt: skip


if __name__ == "__main__":
    main()
