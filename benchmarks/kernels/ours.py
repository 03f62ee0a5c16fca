"""The JAX child process of the kernel benchmark: our kernels, XLA's lowering, and ceilings."""

from __future__ import annotations

import importlib.metadata
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import checks, clock, inputs
from benchmarks.kernels.compiler import Compiler
from benchmarks.kernels.inputs import Arrays
from benchmarks.kernels.jax_timing import (
    Timed,
    compile_program,
    has_clock,
    lowered_program,
    start_arguments,
)
from benchmarks.kernels.shapes import CALLS, Case, Decode, check_key, decoded, key
from benchmarks.kernels.workers import Reply, reason, serve
from benchmarks.kernels.xla_lowering import in_order


class Session:
    """Handles the requests of the parent process."""

    def __init__(self, implementation: str, most_calls: int = CALLS):
        self.implementation = implementation
        self._compiler = Compiler(implementation, most_calls)
        self._running: dict[str, Timed] = {}
        self._arrays: list[Arrays] = []

    def start(self) -> Reply:
        device = jax.devices()[0]
        versions = {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}
        name = clock.NAME if has_clock() else "time.perf_counter"
        return {"versions": versions, "gpu": device.device_kind, "clock": name}

    def compile(self, cases: Sequence[dict[str, Any]], parts: Sequence[Sequence[str]]) -> Reply:
        """Compiles ``parts`` of each case (see :meth:`Compiler.start`), and waits for it.

        Args:
          parts: of each case. "check" stands for the checks of its other parts.
        """
        for case, of_case in zip(map(decoded, cases), parts, strict=True):
            timed = [part for part in of_case if part != "check"]
            for part in timed if "check" in of_case else ():
                if part != "xla":
                    self._compiler.start_check(case, part)
            self._compiler.start(case, timed)
        self._compiler.wait()
        return {}

    def check(self, case: dict[str, Any], repeats: int, part: str = "ours") -> Reply:
        """Checks an op on ragged inputs; returns {"wrong": None or the reason}.

        Args:
          part: "ours" or the name of a variant.
        """
        return {"wrong": self._ragged(decoded(case), repeats, part)}

    def _ragged(self, case: Case, repeats: int, part: str) -> str | None:
        self._compiler.start_check(case, part)  # again, if an earlier case has ended the process
        for seed in checks.seeds(case):
            make = self._compiler.get(check_key(case), f"ragged {seed}")
            repeat, blank = self._compiler.get(check_key(case), f"repeat {part} {seed}")
            small = checks.ragged(case, seed)
            arrays, want = make(inputs.random_key(seed), small.host)
            first, _, errors = repeat(arrays, blank, jnp.int32(0), want)
            if wrong := checks.verdict(errors):
                return f"{wrong} (ragged inputs {seed})"
            if results_differ(repeat, arrays, first, want, repeats):
                return f"results differ between {repeats} equal runs (ragged inputs {seed})"
        return None

    def prepare(self, case: dict[str, Any], parts: Sequence[str]) -> Reply:
        """Makes inputs and checks the results of ``parts``: "ours", variants, and "xla".

        Returns a reply for each part. :meth:`time` can time those without an "error".
        """
        self.release()
        replies: Reply = {}
        for part in parts:
            try:
                if part == "xla":
                    replies[part] = self._prepare_xla(decoded(case))
                else:
                    replies[part] = self._prepare(decoded(case), part)
            except Exception as error:
                replies[part] = {"error": reason(error)}
        return replies

    def _prepare(self, case: Case, part: str) -> Reply:
        self._compiler.start(case, [part])
        sets, laps = self._compiler.rotation(case)
        executable, reply = self._compiler.get(key(case), part)
        reply = {"sets": sets} | reply
        if "error" in reply:
            return reply
        if not self._arrays:  # all parts but XLA share them
            make = self._compiler.get(key(case), "make")
            made = [make(inputs.random_key(seed), inputs.host(case, seed)) for seed in range(sets)]
            self._arrays = [of_op | planned for of_op, planned in made]
            self._of_op = made[0][0]
        arrays = self._arrays
        (results, _), (again, _) = (
            executable(arrays, *start_arguments()),
            executable(arrays, *start_arguments()),
        )
        judgement = self._compiler.get(key(case), "judge")(
            self._of_op, results[0], again[0], again[-sets]
        )
        if wrong := checks.verdict(judgement[0]):
            return reply | {"error": wrong}
        if int(judgement[1]):
            return reply | {"error": "wrong: equal calls gave different bits"}
        out_bytes = sum(x.nbytes for x in results)
        self._running[part] = Timed(executable, arrays, sets * laps, out_bytes)
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
        self._arrays.clear()
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
