"""The JAX child process of the kernel benchmark: our kernels, XLA's lowering, and ceilings."""

from __future__ import annotations

import collections
import dataclasses
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
import numpy as np

import pallas_kernels
from benchmarks.kernels import checks, clock, hlo, inputs, jax_clock, layer_inputs
from benchmarks.kernels.inputs import Arrays
from benchmarks.kernels.layer_shapes import FeedForward
from benchmarks.kernels.report import EVERY_GROUP
from benchmarks.kernels.shapes import (
    CALLS,
    LATENT,
    WARM_S,
    WINDOW_S,
    WINDOWS,
    Case,
    Decode,
    Index,
    Prefill,
    SparseCase,
    check_key,
    decoded,
    guessed_us,
    key,
    rotation,
)
from benchmarks.kernels.workers import Reply, reason, serve

Call = Callable[[Arrays], checks.Checked]

MAX_PADDING = 4  # maximum size of a dense cache relative to its tokens
COMPILATIONS = 14  # concurrent compilations
IN_FLIGHT_BYTES = 8e9  # limit on the outputs of launched programs that are not yet released
UNTUNED: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""Compiler options of programs that are not timed: autotuning takes seconds."""


def call_of(case: Case, implementation: str) -> Call:
    """Returns a function that calls the case's op."""
    if isinstance(case, FeedForward):
        return layer_inputs.call(case, implementation)
    op = getattr(pallas_kernels, case.op)
    keywords = inputs.options(case) | {"implementation": implementation}

    def call(arrays: Arrays) -> checks.Checked:
        out = op(**arrays, **keywords)
        return out if isinstance(out, tuple) else (out, None)

    return call


def plan(case: Case, arrays: Arrays) -> dict[str, Any]:
    """Returns additional arguments of the op that a model computes once per step for all layers."""
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


@dataclasses.dataclass(frozen=True)
class Timed:
    """A compiled program with its arguments."""

    executable: Callable[..., tuple[list[jax.Array], list[jax.Array]]]
    arrays: list[Arrays]
    calls: int
    out_bytes: float

    def __call__(self) -> list[jax.Array]:
        """Runs the program without waiting; returns its two stamps, or results without a clock."""
        results, stamps = self.executable(self.arrays, *_start())
        return stamps or results

    def windows(self, warm_s: float = WARM_S) -> dict[str, Any]:
        """Times a call in windows of many programs, after a warm-up of ``warm_s`` seconds.

        The programs are enqueued one after the other, so that the GPU pauses only for launches.

        Returns:
          "us": microseconds per call in each window, by the GPU's clock or else by the host's.
          With the GPU's clock also "busy", the least share of a window in which a program ran, and
          "resolution_ns" of the clock.
        """
        jax.block_until_ready(self())
        began = time.perf_counter()
        jax.block_until_ready(self())
        once = time.perf_counter() - began
        programs = max(2, int(WINDOW_S / once) + 1)
        if not has_clock():
            return {"us": [self._host_us(programs) for _ in range(WINDOWS)]}
        at_once = max(2, min(programs, int(IN_FLIGHT_BYTES / self.out_bytes)))
        in_flight: collections.deque[list[jax.Array]] = collections.deque()

        def launch() -> list[jax.Array]:
            if len(in_flight) == at_once:
                jax.block_until_ready(in_flight.popleft())
            in_flight.append(self())
            return in_flight[-1]

        until = time.perf_counter() + warm_s
        while time.perf_counter() < until:
            launch()
        words = jax.device_get([launch() for _ in range(WINDOWS * programs)])
        stamps = [(int(begin[0]), int(end[0])) for begin, end in words]
        window_stamps = [stamps[i : i + programs] for i in range(0, len(stamps), programs)]
        return {
            "us": [clock.mean_us(each) / self.calls for each in window_stamps],
            "busy": min(map(clock.busy, window_stamps)),
            "resolution_ns": clock.resolution_ns(stamps),
        }

    def _host_us(self, programs: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready([self() for _ in range(programs)])
        return 1e6 * (time.perf_counter() - began) / (programs * self.calls)


def has_clock() -> bool:
    """Returns whether the device has a clock that programs can read."""
    return jax.default_backend() == "gpu"


def _start() -> tuple[jax.Array, ...]:
    """Returns a program's arguments besides its arrays."""
    return (_zeros(),) if has_clock() else ()


@functools.cache
def _zeros() -> jax.Array:
    return jnp.zeros(jax_clock.STAMP.shape, jax_clock.STAMP.dtype)


def program(
    call: Call, laps: int, stamp: Callable[[jax.Array], jax.Array] | None = None
) -> Callable[..., tuple[list[jax.Array], list[jax.Array]]]:
    """Builds a program that makes sequential calls, rotating ``laps`` times over the input sets.

    It returns every result, and each call depends on the previous one. Otherwise XLA would merge
    equal calls, drop unused ones, and run independent ones concurrently. With ``stamp``, the
    program takes a start value and also returns two stamps: the first call depends on the first
    stamp, and the second stamp depends on the last call.
    """
    one = jax.jit(call)  # lowered once for all calls

    def run(sets: list[Arrays], *start: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        results: list[jax.Array] = []
        stamps = [stamp(*start)] if stamp else []
        for _ in range(laps):
            for arrays in sets:
                before = results or stamps
                if before:
                    # All arguments depend on the previous call. XLA would compute anything that
                    # depends only on other arguments once for all laps.
                    arrays, before[-1] = jax.lax.optimization_barrier((arrays, before[-1]))
                results.append(one(arrays)[0])
        if stamp:
            results[-1], stamps[0] = jax.lax.optimization_barrier((results[-1], stamps[0]))
            stamps.append(stamp(stamps[0]))
        return results, stamps

    return run


def lower_ours(case: Case, call: Call, sets: int, laps: int) -> Any:
    one = inputs.structs(case)
    planned = jax.eval_shape(functools.partial(plan, case), one)
    return lowered_program(call, laps, [one | planned] * sets)


def lower_xla(case: Case, call: Call, sets: int) -> Any:
    one = inputs.structs(case)
    if isinstance(case, Decode):
        one = jax.eval_shape(_in_order, one)
    return lowered_program(call, 1, [one] * sets)


def lowered_program(call: Call, laps: int, sets: list[Any]) -> Any:
    """Lowers a program. ``sets``: input sets as arrays or as their shapes."""
    if not has_clock():
        return jax.jit(program(call, laps)).lower(sets)
    stamped = program(call, laps, jax.jit(jax_clock.stamp))
    return jax.jit(stamped).lower(sets, jax_clock.STAMP)


def compile_program(lowered: Any) -> Any:
    # Serialise the kernels of a captured graph, as in the streams that peers are captured from.
    serial: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
    return lowered.compile(compiler_options=serial if has_clock() else None)


def counted(
    lowered: Any, executable: Any, calls: int, *, kernels: bool, target: str = hlo.KERNELS
) -> Reply:
    """Counts the kernels of a program; returns {"kernels_a_call": ...} or {"error": reason}.

    It is an error if XLA has removed calls, or launches something outside the stamps.

    Args:
      kernels: whether each call must launch a kernel of ``target``.
    """
    stamps = 2 * has_clock()
    text = executable.as_text()
    asked = hlo.asked(lowered.as_text(), target) - stamps
    made, launched = (count - stamps for count in hlo.launched(text, target))
    if asked % calls or made < max(asked, calls * kernels):
        return {"error": f"wrong: {made} of {asked} kernels are left of {calls} calls"}
    if stamps and (strays := hlo.outside(text, clock.KERNEL)) != []:
        what = "a stamp is missing" if strays is None else strays[0][:80]
        return {"error": f"wrong: not all that runs is between the clock's two stamps: {what}"}
    return {"kernels_a_call": round(launched / calls, 2)}


# ---- XLA's own lowering --------------------------------------------------------------------------


def xla_call(case: Case) -> Call | str:
    """Returns what a JAX user would write without kernels, or the reason not to run it."""
    if isinstance(case, Decode):
        if case.dtype != "bf16":
            return "einsums over a quantized cache would dequantise all of it first"
        if case.rows * case.cached > MAX_PADDING * sum(case.lengths):
            return "a dense cache padded to the longest sequence would be almost empty"
        return functools.partial(_dense_decode, case)
    if isinstance(case, Prefill):
        return "all scores at once do not fit"
    if isinstance(case, FeedForward):
        return call_of(case, "reference")
    if isinstance(case, Index):
        return call_of(case, "blocked")
    if isinstance(case, SparseCase):
        if case.op == "sparse_mla_prefill":
            return "too slow here: it gathers the tokens of a few queries at a time"
        return call_of(case, "reference")
    if case.M * len(case.sizes) * case.columns * case.K > 4e12:
        return f"too slow here: {EVERY_GROUP}"
    if case.dtype != "bf16" and len(case.sizes) * case.columns * case.K > 2e9:
        return "dequantised matrices do not fit"
    return call_of(case, "reference")


def _in_order(arrays: Arrays) -> Arrays:
    """Returns the arrays with each sequence's pages contiguous and in order."""
    tables = arrays["block_tables"]
    return arrays | {
        "pages": arrays["pages"][tables.reshape(-1)],
        "block_tables": jnp.arange(tables.size, dtype=jnp.int32).reshape(tables.shape),
    }


def _dense_decode(case: Decode, arrays: Arrays) -> checks.Checked:
    """Two einsums over a dense cache, with pages in order (:func:`_in_order`)."""
    B, S = case.rows, case.cached
    cache = arrays["pages"].reshape(B, -1, arrays["pages"].shape[-1])[:, :S]
    q = jnp.concatenate([arrays["q_latent"], arrays["q_rope"]], axis=-1)
    f32 = jnp.float32
    scores = jnp.einsum("bthk,bsk->bths", q, cache, preferred_element_type=f32)
    visible_count = arrays["lengths"][:, None] - case.queries + 1 + jnp.arange(case.queries)
    visible = jnp.arange(S) < visible_count[:, :, None, None]
    scores = jnp.where(visible, scores * inputs.options(case)["scale"], -jnp.inf)
    p = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("bths,bsc->bthc", p, cache[..., :LATENT], preferred_element_type=f32)
    return out.astype(q.dtype), None


# ---- what is compiled ----------------------------------------------------------------------------


def make_set(case: Case, random: jax.Array, host: inputs.Host) -> tuple[Arrays, dict[str, Any]]:
    """Returns the arguments and :func:`plan`. To be traced."""
    arrays = inputs.build(case, random, host)
    return arrays, plan(case, arrays)


def errors_and_differences(
    case: Case, arrays: Arrays, first: jax.Array, *others: jax.Array
) -> tuple[Any, Any]:
    """Returns a result's errors, and how many values differ between equal calls. To be traced."""
    unequal = sum(checks.unequal((first, None), (x, None)) for x in others)
    return checks.spot(case, arrays, (first, None)), unequal


class Compiler:
    """Lowers the programs of a case in this thread, and compiles them in other threads.

    Everything is compiled before anything is timed, because XLA's autotuning runs kernels.
    """

    def __init__(self, implementation: str, most_calls: int):
        self._implementation = implementation
        self._most_calls = most_calls
        self._pool = ThreadPoolExecutor(COMPILATIONS)
        self._built: dict[tuple[str, str], Future[Any] | Exception] = {}

    def rotation(self, case: Case) -> tuple[int, int]:
        return rotation(case, guessed_us(case), self._most_calls)

    def start(self, case: Case, parts: Sequence[str]) -> None:
        """Starts those of "check", "ours" and "xla" in ``parts`` that have not been started."""
        if "check" in parts:
            for seed in checks.seeds(case):
                self._start(check_key(case), f"ragged {seed}", self._lower_ragged, case, seed)
                self._start(check_key(case), f"repeat {seed}", self._lower_repeat, case, seed)
        if "ours" in parts or "xla" in parts:
            self._start(key(case), "make", self._lower_make, case)
            self._start(key(case), "judge", self._lower_judge, case)
        if "ours" in parts:
            self._start(key(case), "ours", self._lower_ours, case)
        if "xla" in parts:
            self._start(key(case), "xla", self._lower_xla, case)

    def get(self, name: str, part: str) -> Any:
        """Returns a compiled program, or raises the error of its compilation."""
        built = self._built[name, part]
        if isinstance(built, Exception):
            raise built
        return built.result()

    def wait(self) -> None:
        """Waits for all compilations."""
        for built in self._built.values():
            if isinstance(built, Future):
                built.exception()

    def drop(self, name: str) -> None:
        """Forgets the programs of a case."""
        for place in [place for place in self._built if place[0] == name]:
            del self._built[place]

    def _start(self, name: str, part: str, lower: Callable[..., Any], *args: Any) -> None:
        if (name, part) in self._built:
            return
        try:
            self._built[name, part] = self._pool.submit(lower(*args))
        except Exception as error:
            self._built[name, part] = error

    def _lower_ragged(self, case: Case, seed: int) -> Callable[[], Any]:
        small = checks.ragged(case, seed)
        lowered = jax.jit(small.build).lower(inputs.random_key(seed), small.host)
        return lambda: lowered.compile(compiler_options=UNTUNED)

    def _lower_repeat(self, case: Case, seed: int) -> Callable[[], Any]:
        small, call = checks.ragged(case, seed), call_of(case, self._implementation)
        arrays, want = jax.eval_shape(small.build, inputs.random_key(seed), small.host)

        def repeat(arrays, first, differences, want):
            result = small.defined(call(arrays))
            errors = checks.errors(result, want)
            return result, differences + checks.unequal(result, first), errors

        first = jax.eval_shape(lambda arrays: small.defined(call(arrays)), arrays)
        differences = jax.ShapeDtypeStruct((), jnp.int32)
        lowered = jax.jit(repeat).lower(arrays, first, differences, want)
        blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), first)
        return lambda: (lowered.compile(compiler_options=UNTUNED), blank)

    def _lower_make(self, case: Case) -> Callable[[], Any]:
        lowered = jax.jit(functools.partial(make_set, case)).lower(
            inputs.random_key(0), inputs.host(case, 0)
        )
        return lambda: lowered.compile(compiler_options=UNTUNED)

    def _lower_judge(self, case: Case) -> Callable[[], Any]:
        arrays = inputs.structs(case)
        out = jax.eval_shape(call_of(case, "reference"), arrays)[0]
        lowered = jax.jit(functools.partial(errors_and_differences, case)).lower(
            arrays, out, out, out
        )
        return lambda: lowered.compile(compiler_options=UNTUNED)

    def _lower_ours(self, case: Case) -> Callable[[], Any]:
        sets, laps = self.rotation(case)
        call = call_of(case, self._implementation)
        lowered = lower_ours(case, call, sets, laps)

        def build() -> tuple[Any, Reply]:
            began = time.perf_counter()
            executable = compile_program(lowered)
            seconds = time.perf_counter() - began
            kernels = self._implementation == "mosaic_gpu"
            counts = counted(lowered, executable, sets * laps, kernels=kernels)
            return executable, {"compile_s": seconds} | counts

        return build

    def _lower_xla(self, case: Case) -> Callable[[], Any]:
        call = xla_call(case)
        if isinstance(call, str):
            raise NotImplementedError(call)
        sets = self.rotation(case)[0]
        lowered = lower_xla(case, call, sets)

        def build() -> tuple[Any, Reply]:
            executable = compile_program(lowered)
            return executable, counted(lowered, executable, sets, kernels=False)

        return build


# ---- requests ------------------------------------------------------------------------------------


class Session:
    """Handles the requests of the parent process."""

    def __init__(self, implementation: str, most_calls: int = CALLS):
        self.implementation = implementation
        self._compiler = Compiler(implementation, most_calls)
        self._running: dict[str, Timed] = {}

    def start(self) -> Reply:
        device = jax.devices()[0]
        versions = {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}
        name = clock.NAME if has_clock() else "time.perf_counter"
        return {"versions": versions, "gpu": device.device_kind, "clock": name}

    def compile(self, cases: Sequence[dict[str, Any]], parts: Sequence[Sequence[str]]) -> Reply:
        """Compiles ``parts`` of each case (see :meth:`Compiler.start`), and waits for it."""
        for case, of_case in zip(map(decoded, cases), parts, strict=True):
            self._compiler.start(case, of_case)
        self._compiler.wait()
        return {}

    def check(self, case: dict[str, Any], repeats: int) -> Reply:
        """Checks an op on ragged inputs; returns {"wrong": None or the reason}."""
        return {"wrong": self._ragged(decoded(case), repeats)}

    def _ragged(self, case: Case, repeats: int) -> str | None:
        self._compiler.start(case, ["check"])  # again, if an earlier case has ended the process
        for seed in checks.seeds(case):
            make = self._compiler.get(check_key(case), f"ragged {seed}")
            repeat, blank = self._compiler.get(check_key(case), f"repeat {seed}")
            small = checks.ragged(case, seed)
            arrays, want = make(inputs.random_key(seed), small.host)
            first, _, errors = repeat(arrays, blank, jnp.int32(0), want)
            if wrong := checks.verdict(errors):
                return f"{wrong} (ragged inputs {seed})"
            if results_differ(repeat, arrays, first, want, repeats):
                return f"results differ between {repeats} equal runs (ragged inputs {seed})"
        return None

    def prepare(self, case: dict[str, Any], parts: Sequence[str]) -> Reply:
        """Makes inputs and checks the results of ``parts``, "ours" and "xla".

        Returns a reply for each part. :meth:`time` can time those without an "error".
        """
        self.release()
        prepares = {"ours": self._prepare, "xla": self._prepare_xla}
        replies: Reply = {}
        for part in parts:
            try:
                replies[part] = prepares[part](decoded(case))
            except Exception as error:
                replies[part] = {"error": reason(error)}
        return replies

    def _prepare(self, case: Case) -> Reply:
        self._compiler.start(case, ["ours"])
        sets, laps = self._compiler.rotation(case)
        executable, reply = self._compiler.get(key(case), "ours")
        reply = {"sets": sets} | reply
        if "error" in reply:
            return reply
        make = self._compiler.get(key(case), "make")
        made = [make(inputs.random_key(seed), inputs.host(case, seed)) for seed in range(sets)]
        arrays = [of_op | planned for of_op, planned in made]
        (results, _), (again, _) = executable(arrays, *_start()), executable(arrays, *_start())
        judgement = self._compiler.get(key(case), "judge")(
            made[0][0], results[0], again[0], again[-sets]
        )
        if wrong := checks.verdict(judgement[0]):
            return reply | {"error": wrong}
        if int(judgement[1]):
            return reply | {"error": "wrong: equal calls gave different bits"}
        out_bytes = sum(x.nbytes for x in results)
        self._running["ours"] = Timed(executable, arrays, sets * laps, out_bytes)
        return reply

    def _prepare_xla(self, case: Case) -> Reply:
        self._compiler.start(case, ["xla"])
        executable, reply = self._compiler.get(key(case), "xla")
        if "error" in reply:
            return reply
        make, judgement = (self._compiler.get(key(case), part) for part in ("make", "judge"))
        sets = self._compiler.rotation(case)[0]
        made = [make(inputs.random_key(i), inputs.host(case, i))[0] for i in range(sets)]
        arrays = [jax.jit(_in_order)(a) for a in made] if isinstance(case, Decode) else made
        results, _ = executable(arrays, *_start())
        errors, _ = judgement(made[0], *[results[0]] * 3)
        if wrong := checks.verdict(errors):
            return {"error": wrong}
        out_bytes = sum(x.nbytes for x in results)
        self._running["xla"] = Timed(executable, arrays, sets, out_bytes)
        return reply

    def time(self, names: Sequence[str], warm_s: float) -> Reply:
        """Times prepared parts; returns {name: result of :meth:`Timed.windows`}."""
        if missing := set(names) - set(self._running):
            return {"error": f"{', '.join(sorted(missing))}: nothing is prepared"}
        return {name: self._running[name].windows(warm_s) for name in names}

    def release(self) -> Reply:
        self._running.clear()
        return {}

    def drop(self, cases: Sequence[dict[str, Any]]) -> Reply:
        """Forgets the programs of completed cases."""
        for case in map(decoded, cases):
            self._compiler.drop(key(case))
        return {}

    def ceilings(self) -> Reply:
        """Measures bfloat16 and float8 matmuls of 8192^3, and a copy and a sum of 2 GiB."""
        n, words = (8192, 2**30) if jax.default_backend() == "gpu" else (256, 2**20)
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
        measured: Reply = {}

        def time_of(name: str, f: Callable[..., jax.Array], *args: jax.Array) -> float | None:
            try:
                sets = [dict(zip("ab", args, strict=False))]
                lowered = lowered_program(lambda arrays: (f(*arrays.values()), None), 1, sets)
                executable = compile_program(lowered)
                out = jax.eval_shape(f, *args)
                out_bytes = out.size * out.dtype.itemsize
                windows = Timed(executable, sets, 1, out_bytes).windows()["us"]
                return 1e-6 * statistics.median(windows)
            except Exception as error:
                measured[name] = reason(error)
                return None

        def product(a, b):
            return jax.lax.dot_general(
                a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
            )

        for name, dtype in (("bf16", jnp.bfloat16), ("fp8", jnp.float8_e4m3fn)):
            a, b = (jax.random.normal(k, (n, n), jnp.bfloat16).astype(dtype) for k in keys[:2])
            if seconds := time_of(f"xla_{name}", product, a, b):
                measured[f"xla_{name}_tflops"] = 2 * n**3 / seconds / 1e12
        x = jax.random.normal(keys[2], (words,), jnp.bfloat16)
        if seconds := time_of("xla_copy", lambda x: -x, x):
            measured["xla_copy_gbs"] = 2 * x.nbytes / seconds / 1e9
        if seconds := time_of("xla_sum", lambda x: jnp.sum(x, dtype=jnp.float32), x):
            measured["xla_read_sum_gbs"] = x.nbytes / seconds / 1e9
        return measured


def results_differ(
    repeat: Callable[..., Any], arrays: Arrays, first: Any, want: Any, repeats: int
) -> bool:
    differences = jnp.int32(0)
    for _ in range(repeats - 1):
        differences = repeat(arrays, first, differences, want)[1]
    return int(differences) > 0


def main() -> None:
    session = Session(sys.argv[1], int(sys.argv[2]))
    serve({
        "start": session.start, "compile": session.compile, "check": session.check,
        "prepare": session.prepare, "time": session.time, "release": session.release,
        "drop": session.drop, "ceilings": session.ceilings,
    })  # fmt: skip


if __name__ == "__main__":
    main()
