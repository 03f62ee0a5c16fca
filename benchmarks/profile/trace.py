"""Sums the device time of kernels in a profiler trace, by kind of operation."""

from __future__ import annotations

import collections
import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.profile.operations import Operation

SERIAL: dict[str, str | bool] = {"xla_gpu_graph_min_graph_size": "1000000"}
"""Disables CUDA graphs, in which the profiler does not report a kernel's operation."""

CAPTURED: dict[str, str | bool] = {"xla_enable_command_buffers_during_profiling": True}
"""Keeps CUDA graphs enabled. By default XLA launches every kernel separately when profiled."""

SHOWN = 25
TO_HOST = "MemcpyD2H"
_MATMUL = ("gemm", "cutlass", "nvjet", "triton_dot", "dot")


class Event(NamedTuple):
    """One kernel launch."""

    kernel: str
    operation: str
    start_ns: float
    ns: float


@dataclasses.dataclass
class Kernel:
    name: str
    operation: str
    count: int = 0
    ns: float = 0.0


_SUMMARIES = (
    "XLA",
    "Steps",
    "Framework",
    "Source",
    "Launch",
    "TensorFlow",
)  # trace lines that are not streams


def events(directory: Path) -> Iterator[Event]:
    """Yields everything that ran on the device in a trace."""
    (path,) = directory.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))  # keep a reference, because planes do not
    on_device = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
    for plane in on_device or data.planes:
        for line in plane.lines:
            for event in line.events:
                stats = {name: value for name, value in event.stats if name is not None}
                operation = str(stats.get("hlo_op", ""))
                if line.name.startswith(_SUMMARIES) or not (on_device or operation):
                    continue
                yield Event(event.name, operation, event.start_ns, event.duration_ns)


def traced(run: Callable[[], Any], runs: int) -> list[Event]:
    """Returns the events of ``runs`` runs, after one that is not traced."""
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready([run() for _ in range(runs)])
        with warnings.catch_warnings():
            # jaxlib warns about its own types, and as an error the warning would end the process.
            warnings.simplefilter("ignore", DeprecationWarning)
            return list(events(Path(directory)))


def kernels(events: Iterable[Event]) -> list[Kernel]:
    """Sums events by kernel and operation."""
    summed: dict[tuple[str, str], Kernel] = {}
    for event in events:
        names = event.kernel, event.operation
        kernel = summed.setdefault(names, Kernel(*names))
        kernel.count += 1
        kernel.ns += event.ns
    return list(summed.values())


def by_name(events: Iterable[Event], runs: int) -> list[dict[str, Any]]:
    """Returns the microseconds and launches per run of each kernel, over all operations."""
    sums: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        sums[event.kernel].append(event.ns)
    rows = [
        {"us": round(sum(ns) / 1e3 / runs, 2), "launches": len(ns) / runs, "kernel": name}
        for name, ns in sums.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def busy_fraction(events: Iterable[Event]) -> float:
    """Returns the share of the traced time during which some kernel ran.

    Nested events, such as those inside a loop's, count once.
    """
    spans = sorted((event.start_ns, event.start_ns + event.ns) for event in events)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / (end - spans[0][0])


def host_waits_us(events: Iterable[Event], runs: int) -> float:
    """Returns the microseconds per run in which the GPU waits for the host after a copy to it."""
    ordered = sorted(events, key=lambda event: event.start_ns)
    waited, end, last = 0.0, ordered[0].start_ns, ""
    for event in ordered:
        if event.start_ns > end and last == TO_HOST:
            waited += event.start_ns - end
        if event.start_ns + event.ns > end:
            end, last = event.start_ns + event.ns, event.kernel
    return waited / 1e3 / runs


def summed(kernels: Sequence[Kernel], by_name: dict[str, Operation], runs: int) -> dict[str, Any]:
    """Returns microseconds per run, by kind and by kernel. Loops count by their bodies."""
    kinds: dict[str, float] = collections.defaultdict(float)
    rows = []
    for kernel in kernels:
        operation = by_name.get(kernel.operation)
        if operation and operation.opcode in ("while", "conditional", "call"):
            continue
        us = kernel.ns / 1e3 / runs
        kind = _kind_of_kernel(kernel.name, operation)
        kinds[kind] += us
        rows.append({
            "us": round(us, 2), "kind": kind, "launches": kernel.count / runs,
            "kernel": kernel.name, "operation": kernel.operation,
            "traced": operation.name if operation else "",
        })  # fmt: skip
    rows.sort(key=lambda row: -row["us"])
    total = sum(kinds.values())
    return {
        "kernels_us": round(total, 1),
        "launches": round(sum(row["launches"] for row in rows), 1),
        "kinds_us": {
            kind: round(us, 2) for kind, us in sorted(kinds.items(), key=lambda item: -item[1])
        },
        "kernels": rows,
    }


def _kind_of_kernel(name: str, operation: Operation | None) -> str:
    if operation is not None and operation.kind != "other":
        return operation.kind
    if "Memcpy" in name or "Memset" in name or "copy" in name.lower():
        return "copies"
    return "dense matmul" if any(part in name for part in _MATMUL) else "other"


def table(profile: dict[str, Any]) -> str:
    """Formats a profile as text."""
    total = profile["kernels_us"] or 1.0
    lines = [
        f"{profile['weights']} {profile['step']}: wall {profile['wall_us']:.1f} us, kernels"
        f" {total:.1f} us in {profile['launches']:.0f} launches"
    ]
    for kind, us in profile["kinds_us"].items():
        lines.append(f"  {kind:20}{us:10.1f} us {100 * us / total:6.1f} %")
    for row in profile["kernels"][:SHOWN]:
        lines.append(
            f"    {row['us']:9.2f} us {row['launches']:5.1f}x {row['kind']:20}"
            f"{row['kernel'][:44]:45}{row['operation'][:28]:29}{row['traced'][-60:]}"
        )
    return "\n".join(lines)
