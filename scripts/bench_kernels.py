"""Benchmarks the Hopper kernels against other libraries' kernels, on one H100 or H200.

    python -m scripts.bench_kernels --peers PEERS [--ops mla_decode ...] [--shapes "h128 b64" ...]
        [--time-budget 560] [--out benchmarks/results/kernels_h200.json]
        [--resume EARLIER.json]

Before a shape is timed, samples of its result are compared with float32 references, and equal calls
must give equal bits. Wrong results are not timed. Then, for every shape, ours, XLA's own lowering
(of attention's gradient, cuDNN's) and the peers are timed; their results are checked too. Peers
come from the directory PEERS (made by ``python -m benchmarks.kernels.pack_peers``) and from torch;
``--peers torch`` needs no directory. The same run measures the ceiling of matmul throughput. Inputs
are random, and calls rotate over enough input sets (at most 32) to exceed the L2 cache.

All times are measured by the GPU's clock (:mod:`benchmarks.kernels.clock`), from before the first
kernel of a program of many sequential calls to after its last one, and divided by the number of
calls. JAX and torch run in two processes that alternate, two turns each per shape, after a warm-up
with the same work. A time is the median over the windows of both turns, and ``spread`` is
(max - min) / median. If the spread of ours or of the best peer exceeds 10 %, the shape is timed
again after a longer warm-up, three times at most. If it still does, there is no ratio, and
``no_ratio`` gives the reason. Nothing is compiled or prepared while a shape is timed.

``ratio`` is the best peer's time divided by ours: above 1, ours is faster. ``roof_fraction`` is the
roofline time divided by ours. The roofline is the larger of the arithmetic at the run's best matmul
throughput and the traffic at the GPU's bandwidth (:mod:`benchmarks.machine`); a result beyond it is
reported as an error.
``kernels_a_call`` counts the kernels that one call launches, including XLA's own. ``busy`` is the
share of a window in which a program ran.

Shapes for which the time budget did not suffice are listed in the result. ``--resume`` measures
them in another run, and each row records its run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels import pack_peers, report
from benchmarks.kernels.cases import cases, select
from benchmarks.kernels.report import append_windows, names_to_time, summary
from benchmarks.kernels.shapes import CALLS, OPS, WARM_S, Case, Grouped, Index, encoded, key
from benchmarks.kernels.workers import Worker
from benchmarks.machine import short_name
from dsv3_jax.files import atomic_write

BATCH = 32  # cases that are compiled together, before the first of them is timed
TRIES = 3
AGAIN_WARM_S = 1.0  # warm-up of each turn in the second and third try
# Symmetric, so that thermal throttling affects both equally.
TURNS = "peers", "ours", "ours", "peers"
FIRST_WARM_S = 1.0  # warm-up of a process that has not timed anything yet
COMPILE_S = 180
ROW_S = 60  # seconds for a case, after which its process is killed
WARM_WORKERS = 8
TORCH_ALONE = Path("torch")


class Bench:
    """Runs cases and collects their results in ``result``."""

    def __init__(self, arguments: argparse.Namespace):
        self._arguments = arguments
        self._began = time.monotonic()
        logs = Path(tempfile.mkdtemp(prefix="bench_kernels_"))
        self._log = str(logs / "log.txt")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        name = arguments.implementation
        self._ours = Worker(
            "benchmarks.kernels.ours", [name, str(arguments.calls)], str(logs / "ours.txt")
        )
        self._peers: Worker | None = None
        if arguments.peers is not None:
            unpacked = Path(tempfile.gettempdir()) / "dsv3_kernel_peers"
            if arguments.peers != TORCH_ALONE:
                pack_peers.unpack(arguments.peers, unpacked)
            self._peer_command = ("benchmarks.kernels.peers", [str(unpacked)])
            self._peers = Worker(*self._peer_command, str(logs / "peers.txt"))
        print("logs in", logs, flush=True)
        earlier: dict[str, Any] = {}
        if arguments.resume is not None:
            earlier = json.loads(arguments.resume.read_text("utf-8"))
        self._completed = [row for row in earlier.get("rows", ()) if report.complete(row)]
        for row in self._completed:
            row.setdefault("run", len(earlier.get("earlier", ())))
        self.result: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
            "versions": {"python": platform.python_version()},
            "ceilings": {},
            "rows": [],
            "not_run": [],
        }
        if earlier:
            self.result["earlier"] = [*earlier.pop("earlier", ()), report.header(earlier)]
        self._measured: dict[str, Any] = {}
        self._warmed: set[str] = set()
        self._raw: list[tuple[Case, dict[str, Any], dict[str, Any]]] = []

    def left(self) -> float:
        return self._arguments.time_budget - (time.monotonic() - self._began)

    def run(self, chosen: Sequence[Case]) -> None:
        chosen = self.remaining(chosen)
        for worker in self._workers():
            worker.send({"do": "start"})
        for side, worker in zip(("ours", "peers"), self._workers(), strict=False):
            self._note(side, worker.receive(120))
        self._measured = self._ours.ask({"do": "ceilings"}, 120)
        self.save()
        for first in range(0, len(chosen), BATCH):
            self._batch(chosen[first : first + BATCH], chosen if first == 0 else ())

    def remaining(self, chosen: Sequence[Case]) -> list[Case]:
        """Returns the cases that the resumed run has not completed."""
        completed = {report.key_of(row) for row in self._completed}
        return [case for case in chosen if key(case) not in completed]

    def _workers(self) -> list[Worker]:
        return [self._ours] + ([self._peers] if self._peers else [])

    def _batch(self, batch: Sequence[Case], cases_to_warm: Sequence[Case]) -> None:
        if self.left() < 0:
            self.result["not_run"] += map(key, batch)
            self.save()
            return
        began = time.monotonic()
        parts = [_parts(case) for case in batch]
        compilation = {"do": "compile", "cases": [encoded(case) for case in batch], "parts": parts}
        self._ours.send(compilation)
        if cases_to_warm:
            self._warm(cases_to_warm)
        self._ours.receive(COMPILE_S)
        print(f"compiled {len(batch)} shapes in {time.monotonic() - began:.0f} s", flush=True)
        for case in batch:
            if self.left() < 0:
                self.result["not_run"].append(key(case))
                continue
            began = time.monotonic()
            ours, peers = self._case(case)
            ours["seconds"] = round(time.monotonic() - began, 1)
            self._raw.append((case, ours, peers))
            row = report.row(case, ours, peers, self._best())
            print(f"{report.line(row)}; {self.left():.0f} s left", flush=True)
            self.save()
        self._ours.ask({"do": "drop", "cases": [encoded(case) for case in batch]}, ROW_S)
        self.save()

    def _note(self, side: str, started: dict[str, Any]) -> None:
        self.result["versions"] |= started.get("versions", {})
        if "gpu" in started:
            self.result["gpu"] = started["gpu"]
        if "clock" in started:
            self.result.setdefault("clock", {})[side] = started["clock"]
        if "error" in started:
            self.result.setdefault("errors", {})[side] = started["error"]

    def _warm(self, chosen: Sequence[Case]) -> None:
        """Lets the peers compile their kernels, while ours are compiled.

        DeepGEMM takes ten seconds per shape, so several processes share the shapes. The driver
        takes most of a minute for Marlin's kernels of each integer type, once.
        """
        grouped = [case for case in chosen if isinstance(case, Grouped)]
        compiled = [encoded(case) for case in grouped if case.dtype in ("bf16", "fp8")]
        compiled += [encoded(case) for case in chosen if isinstance(case, Index)]
        count = min(WARM_WORKERS, len(compiled))
        shares = [compiled[i::count] for i in range(count)]
        for dtype in ("int8", "int4"):
            shares += [[encoded(case)] for case in grouped if case.dtype == dtype][:1]
        workers = [Worker(*self._peer_command, self._log) for _ in shares if self._peers]
        for worker, share in zip(workers, shares, strict=False):
            worker.send({"do": "warm", "cases": share})
        until = time.monotonic() + min(240, max(30, self._arguments.time_budget / 3))
        for worker in workers:
            worker.receive(until - time.monotonic())
            worker.stop()

    def _patience(self, seconds: float) -> float:
        return min(seconds, max(10.0, self.left() + 20))

    def _case(self, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
        """Measures a case. Returns the results of ours (with XLA's) and of the peers."""
        if self._peers:
            self._peers.send({"do": "prepare", "case": encoded(case)})
        parts = _parts(case)
        request = {"do": "prepare", "case": encoded(case), "parts": parts}
        prepared = self._ours.ask(request, self._patience(ROW_S))
        lost = {"error": prepared.get("error", "not prepared")}
        ours = {**prepared.get("ours", lost)}
        if "xla" in parts:
            ours["xla"] = prepared.get("xla", lost)
        peers: dict[str, Any] = {}
        if self._peers:
            reply = self._peers.receive(self._patience(ROW_S))
            peers = reply.get("peers", {"torch": reply})
        self._time(ours, peers)
        for worker in self._workers():
            worker.ask({"do": "release"}, ROW_S)
        return ours, peers

    def _time(self, ours: dict[str, Any], peers: dict[str, Any]) -> None:
        """Adds "us", "spread" and more to the prepared implementations, and "tries" to ours."""
        for attempt in range(1, TRIES + 1):
            self._try(ours, peers, attempt)
            ours["tries"] = attempt
            others = {**peers, "XLA": ours.get("xla", {})}
            if report.steady(ours, others) or self.left() < 0:
                return

    def _try(self, ours: dict[str, Any], peers: dict[str, Any], attempt: int) -> None:
        """Runs all turns once, and replaces the results of an earlier attempt."""
        in_jax = {"ours": ours} | ({"xla": ours["xla"]} if "xla" in ours else {})
        for side in TURNS:
            parts, worker = (in_jax, self._ours) if side == "ours" else (peers, self._peers)
            is_first = side not in self._warmed
            self._warmed.add(side)
            if names := names_to_time(
                {n: entry for n, entry in parts.items() if "error" not in entry}
            ):
                warm_s = FIRST_WARM_S if is_first else AGAIN_WARM_S if attempt > 1 else WARM_S
                request = {"do": "time", "names": names, "warm_s": warm_s}
                assert worker is not None
                reply = worker.ask(request, self._patience(ROW_S))
                for name in names:
                    append_windows(
                        parts[name], reply.get(name, {"error": reply.get("error", "no time")})
                    )
        for entry in (*in_jax.values(), *peers.values()):
            entry |= summary(entry.pop("windows", {}))

    def _best(self) -> dict[str, float]:
        return report.ceilings(self._measured, self.result.get("gpu", "none"))

    def save(self) -> None:
        best = self._best()
        ceilings = self._measured | {
            name if name == "read_gbs" else f"best_{name}": value for name, value in best.items()
        }
        self.result["ceilings"] = {
            name: round(value, 1) if isinstance(value, float) else value
            for name, value in ceilings.items()
        }
        rows = [report.row(*entry, best) for entry in self._raw] + self._completed
        order = {name: i for i, name in enumerate(map(key, cases()))}
        self.result["rows"] = sorted(rows, key=lambda row: order.get(report.key_of(row), 0))
        out = self._arguments.out or Path(
            f"benchmarks/results/kernels_{short_name(self.result.get('gpu', 'none'))}.json"
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, json.dumps(self.result, indent=1) + "\n")

    def stop(self) -> None:
        for worker in self._workers():
            worker.stop()


def _parts(case: Case) -> list[str]:
    """Returns what is timed in JAX, alternately with the peers.

    XLA's grouped matmuls multiply every row by every group's matrix, so they are no peers.
    """
    return ["ours"] if isinstance(case, Grouped) else ["ours", "xla"]


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Benchmark the Hopper kernels against other libraries."
    )
    parser.add_argument("--ops", nargs="*", default=[], choices=OPS)
    parser.add_argument("--shapes", nargs="*", default=[], help="substrings of 'op dtype shape'")
    parser.add_argument("--all", action="store_true", help="all shapes instead of the core shapes")
    parser.add_argument(
        "--peers",
        type=Path,
        help="directory of the packed peers, or 'torch' for torch's alone; by default no peers",
    )
    parser.add_argument("--time-budget", type=float, default=3600, help="seconds for the whole run")
    parser.add_argument(
        "--implementation",
        default="mosaic_gpu",
        help="back-end that is timed as ours",
    )
    parser.add_argument("--calls", type=int, default=CALLS, help="maximum calls per timed program")
    parser.add_argument("--resume", type=Path, help="earlier result whose complete rows are kept")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main() -> None:
    arguments = parse(sys.argv[1:])
    chosen = select(cases(), arguments.ops, arguments.shapes, everything=arguments.all)
    bench = Bench(arguments)
    print(len(chosen), "shapes", flush=True)
    try:
        bench.run(chosen)
    finally:
        bench.stop()
        bench.save()
    result = bench.result
    print("\n" + json.dumps({k: result[k] for k in ("versions", "ceilings")}))
    print(*map(report.line, result["rows"]), sep="\n")
    if result["not_run"]:
        print("not run, because the time budget was spent:", ", ".join(result["not_run"]))


if __name__ == "__main__":
    main()
