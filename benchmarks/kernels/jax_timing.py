"""Programs of many sequential calls of a JAX function, and their times by the GPU's clock."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.kernels import checks, clock, hlo
from benchmarks.kernels.inputs import Arrays
from benchmarks.kernels.shapes import WARM_S, WINDOW_S, WINDOWS
from benchmarks.kernels.workers import Reply
from pallas_kernels.hopper.ir import SCALAR, asm, i32, inline

Call = Callable[[Arrays], checks.Checked]

STAMP = jax.ShapeDtypeStruct((128,), jnp.int32)
IN_FLIGHT_BYTES = 8e9  # limit on the outputs of launched programs that are not yet released


@dataclasses.dataclass(frozen=True)
class Timed:
    """A compiled program with its arguments."""

    executable: Callable[..., tuple[list[Any], list[jax.Array]]]
    arrays: list[Arrays]
    calls: int
    out_bytes: float

    def __call__(self) -> list[Any]:
        """Runs the program without waiting; returns its two stamps, or results without a clock."""
        results, stamps = self.executable(self.arrays, *start_arguments())
        return stamps or results

    def windows(self, warm_s: float = WARM_S) -> dict[str, Any]:
        """Times a call in windows of many programs, after a warm-up of ``warm_s`` seconds.

        The programs are enqueued one after the other, so that the GPU pauses only for launches.

        Returns:
          "us": microseconds per call in each window, by the GPU's clock or else by the host's.
          With the GPU's clock also "busy", the least share of a window in which a program ran.
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
        }

    def _host_us(self, programs: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready([self() for _ in range(programs)])
        return 1e6 * (time.perf_counter() - began) / (programs * self.calls)


def has_clock() -> bool:
    """Returns whether the device has a clock that programs can read."""
    return jax.default_backend() == "gpu"


def start_arguments() -> tuple[jax.Array, ...]:
    """Returns a program's arguments besides its arrays."""
    return (_zeros(),) if has_clock() else ()


def stamp_after(after: jax.Array) -> jax.Array:
    """Returns the clock's value, in every element of ``STAMP``, after ``after`` is available."""

    @inline(returns=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def now() -> Any:
        word = asm(clock.INSTRUCTION, "=r", result=i32(), effects=True)
        return mgpu.FragmentedArray.splat(word, (), SCALAR.to_mgpu(), is_signed=True)

    def kernel(after_g: Any, out_g: Any) -> None:
        del after_g
        out_g[...] = jnp.broadcast_to(now(), STAMP.shape)

    kernel.__name__ = clock.KERNEL
    return plgpu.kernel(
        kernel,
        out_type=STAMP,
        grid=(1,),
        grid_names=("one",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(after)


@functools.cache
def _zeros() -> jax.Array:
    return jnp.zeros(STAMP.shape, STAMP.dtype)


def program(
    call: Call, laps: int, stamp: Callable[[jax.Array], jax.Array] | None = None
) -> Callable[..., tuple[list[Any], list[jax.Array]]]:
    """Builds a program that makes sequential calls, rotating ``laps`` times over the input sets.

    It returns every result, and each call depends on the previous one. Otherwise XLA would merge
    equal calls, drop unused ones, and run independent ones concurrently. With ``stamp``, the
    program takes a start value and also returns two stamps: the first call depends on the first
    stamp, and the second stamp depends on the last call.
    """
    one = jax.jit(call)  # lowered once for all calls

    def run(sets: list[Arrays], *start: jax.Array) -> tuple[list[Any], list[jax.Array]]:
        results: list[Any] = []
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


def lowered_program(call: Call, laps: int, sets: list[Any]) -> Any:
    """Lowers a program. ``sets``: input sets as arrays or as their shapes."""
    if not has_clock():
        return jax.jit(program(call, laps)).lower(sets)
    stamped = program(call, laps, jax.jit(stamp_after))
    return jax.jit(stamped).lower(sets, STAMP)


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
