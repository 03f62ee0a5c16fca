"""The JAX child process of the kernel benchmark: our kernels, XLA's lowering, and ceilings."""

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

from benchmarks.kernels import checks, clock, inputs
from benchmarks.kernels.calls import call_of, in_order, plan, xla_call
from benchmarks.kernels.inputs import Arrays
from benchmarks.kernels.jax_timing import (
    Call,
    Timed,
    compile_program,
    counted,
    has_clock,
    lowered_program,
    start_arguments,
)
from benchmarks.kernels.shapes import CALLS, Case, Decode, decoded, guessed_us, key, rotation
from benchmarks.kernels.workers import Reply, reason, serve

COMPILATIONS = 14  # concurrent compilations
UNTUNED: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""Compiler options of programs that are not timed: autotuning takes seconds."""


def make_set(case: Case, random: jax.Array, host: inputs.Host) -> tuple[Arrays, dict[str, Any]]:
    """Returns the arguments and :func:`plan`. To be traced."""
    arrays = inputs.build(case, random, host)
    return arrays, plan(case, arrays)


def errors_and_differences(case: Case, arrays: Arrays, first: Any, *others: Any) -> tuple[Any, Any]:
    """Returns a result's errors, and how many values differ between equal calls. To be traced."""
    unequal = sum(checks.unequal((first, None), (x, None)) for x in others)
    return checks.spot(case, arrays, (first, None)), unequal


def lower_ours(case: Case, call: Call, sets: int, laps: int) -> Any:
    one = inputs.structs(case)
    planned = jax.eval_shape(functools.partial(plan, case), one)
    return lowered_program(call, laps, [one | planned] * sets)


def lower_xla(case: Case, call: Call, sets: int) -> Any:
    one = inputs.structs(case)
    if isinstance(case, Decode):
        one = jax.eval_shape(in_order, one)
    return lowered_program(call, 1, [one] * sets)


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
        """Starts those of ``parts`` that have not been started.

        Args:
          parts: "ours" and "xla".
        """
        self._start(key(case), "make", self._lower_make, case)
        self._start(key(case), "judge", self._lower_judge, case)
        for part in parts:
            lower = self._lower_xla if part == "xla" else self._lower_ours
            self._start(key(case), part, lower, case)

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
        """Compiles ``parts`` of each case (see :meth:`Compiler.start`), and waits for it.

        Args:
          parts: "ours" and "xla", of each case.
        """
        for case, of_case in zip(map(decoded, cases), parts, strict=True):
            self._compiler.start(case, of_case)
        self._compiler.wait()
        return {}

    def prepare(self, case: dict[str, Any], parts: Sequence[str]) -> Reply:
        """Makes inputs and checks the results of ``parts``: "ours" and "xla".

        Returns a reply for each part. :meth:`time` can time those without an "error".
        """
        self.release()
        replies: Reply = {}
        for part in parts:
            try:
                of_part = self._prepare_xla if part == "xla" else self._prepare_ours
                replies[part] = of_part(decoded(case))
            except Exception as error:
                replies[part] = {"error": reason(error)}
        return replies

    def _prepare_ours(self, case: Case) -> Reply:
        self._compiler.start(case, ["ours"])
        sets, laps = self._compiler.rotation(case)
        executable, reply = self._compiler.get(key(case), "ours")
        reply = {"sets": sets} | reply
        if "error" in reply:
            return reply
        make = self._compiler.get(key(case), "make")
        made = [make(inputs.random_key(seed), inputs.host(case, seed)) for seed in range(sets)]
        arrays = [of_op | planned for of_op, planned in made]
        results, _ = executable(arrays, *start_arguments())
        again, _ = executable(arrays, *start_arguments())
        judge = self._compiler.get(key(case), "judge")
        judgement = judge(made[0][0], results[0], again[0], again[-sets])
        if wrong := checks.verdict(judgement[0]):
            return reply | {"error": wrong}
        if int(judgement[1]):
            return reply | {"error": "wrong: equal calls gave different bits"}
        out_bytes = sum(x.nbytes for x in jax.tree.leaves(results))
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
        arrays = [jax.jit(in_order)(a) for a in made] if isinstance(case, Decode) else made
        results, _ = executable(arrays, *start_arguments())
        errors, _ = judgement(made[0], *[results[0]] * 3)
        if wrong := checks.verdict(errors):
            return {"error": wrong}
        out_bytes = sum(x.nbytes for x in jax.tree.leaves(results))
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
        """Measures bfloat16 and float8 matmuls of 8192^3."""
        n = 8192 if jax.default_backend() == "gpu" else 256
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
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
            a, b = (jax.random.normal(k, (n, n), jnp.bfloat16).astype(dtype) for k in keys)
            if seconds := time_of(f"xla_{name}", product, a, b):
                measured[f"xla_{name}_tflops"] = 2 * n**3 / seconds / 1e12
        return measured


def main() -> None:
    session = Session(sys.argv[1], int(sys.argv[2]))
    serve({
        "start": session.start, "compile": session.compile,
        "prepare": session.prepare, "time": session.time, "release": session.release,
        "drop": session.drop, "ceilings": session.ceilings,
    })  # fmt: skip


if __name__ == "__main__":
    main()
