"""Compiles the programs of the kernel benchmark's JAX process in other threads."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from benchmarks.kernels import checks, inputs
from benchmarks.kernels.calls import call_of, in_order, plan, xla_call
from benchmarks.kernels.inputs import Arrays
from benchmarks.kernels.jax_timing import Call, compile_program, counted, lowered_program
from benchmarks.kernels.shapes import Case, Decode, guessed_us, key, rotation
from benchmarks.kernels.workers import Reply

COMPILATIONS = 14  # concurrent compilations
UNTUNED: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""Compiler options of programs that are not timed: autotuning takes seconds."""


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
