"""The Hopper kernels beside the best of others, on one H100 or H200.

    python -m scripts.bench_kernels --peers PEERS [--ops mla_decode ...] [--shapes "h128 b64" ...]
        [--time-budget 560] [--repeats 1000] [--out benchmarks/results/kernels_h200.json]
        [--resume EARLIER.json]

Each op is checked before it is timed, through the functions of pallas_kernels: on ragged inputs
whose unused slots hold NaN, against float32 at full precision, ``--repeats`` runs equal bit by bit;
and on samples of every timed shape. One that is wrong is not timed. Then every shape: ours, XLA's
own lowering, and the peers out of the directory PEERS (``python -m benchmarks.kernels.pack_peers``
makes it) and of torch, each checked too, beside the ceilings of the same run. Inputs are random and
rotated, larger than the L2 cache where that takes no more than 32 sets.

All times are of the GPU's own clock (:mod:`benchmarks.kernels.clock`), ours, the peers' and XLA's:
from before the first kernel of a program of many calls, one after the other, to behind its last, by
the number of calls. JAX and torch run in two processes that take turns, two a shape, each on a GPU
that was busy with the same work just before; a time is the median of the windows of both turns,
``spread`` the largest less the smallest by the median. Where ours or the best peer's is above 10 %
the shape is timed again, behind more of the same work, three times at most; if it stays, or if XLA
multiplies more than was asked for, there is no ratio and ``no_ratio`` says why. Nothing compiles
and no other shape is prepared meanwhile.

``ratio`` is the best peer's time by ours: above 1 ours is faster. ``roof_fraction`` is the least
time by ours: that of the run's best product, or of reading at ``READ_GBS``. A row beyond it has no
time. ``kernels_a_call`` counts what one call launches: ours, and what XLA puts beside it; ``busy``
is how much of its windows a program ran in; ``event_us`` of a peer, to compare clocks, is a call
by CUDA events around many graphs.
What the time budget left undone is named in the result; ``--resume`` adds it in another run, whose
rows name it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ceiling import READ_GBS
from benchmarks.kernels import pack_peers, report
from benchmarks.kernels.shapes import (
    CALLS,
    OPS,
    WARM_S,
    Case,
    Grouped,
    cases,
    check_key,
    encoded,
    key,
    select,
)
from benchmarks.kernels.workers import Worker

BATCH = 32  # cases that compile at once, before the first of them is timed
TRIES = 3
AGAIN_WARM_S = 1.0  # of a turn of the second try and the third
TURNS = "peers", "ours", "ours", "peers"  # what the chip loses by warming is lost by both
CLOSE = 1.3  # peers slower than the best by this have one turn
FIRST_WARM_S = 1.0  # of a process that has not timed anything yet
COMPILE_S = 180
ROW_S = 60  # seconds for a case, after which its process is ended
CHECK_S = 180
WARM_WORKERS = 8
RIGHT = "right"


class Bench:
    """Runs cases, and keeps what was found so far in ``result``."""

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
            pack_peers.unpack(arguments.peers, unpacked)
            self._peer_command = ("benchmarks.kernels.peers", [str(unpacked)])
            self._peers = Worker(*self._peer_command, str(logs / "peers.txt"))
        print("logs in", logs, flush=True)
        earlier: dict[str, Any] = {}
        if arguments.resume is not None:
            earlier = json.loads(arguments.resume.read_text("utf-8"))
        self._kept = [row for row in earlier.get("rows", ()) if report.complete(row)]
        for row in self._kept:
            row.setdefault("run", len(earlier.get("earlier", ())))
        self.result: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
            "versions": {"python": platform.python_version()} | _tools(),
            "repeats": arguments.repeats,
            "checks": {},
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
        for who, worker in zip(("ours", "peers"), self._workers(), strict=False):
            self._note(who, worker.receive(120))
        self.save()
        for first in range(0, len(chosen), BATCH):
            self._batch(chosen[first : first + BATCH], chosen if first == 0 else ())
        self._time_xla([raw for raw in self._raw if isinstance(raw[0], Grouped)])

    def remaining(self, chosen: Sequence[Case]) -> list[Case]:
        """Those that an earlier run has not done."""
        kept = {report.key_of(row) for row in self._kept}
        return [case for case in chosen if key(case) not in kept]

    def _workers(self) -> list[Worker]:
        return [self._ours] + ([self._peers] if self._peers else [])

    def _batch(self, batch: Sequence[Case], to_warm: Sequence[Case]) -> None:
        if self.left() < 0:
            self.result["not_run"] += map(key, batch)
            self.save()
            return
        began = time.monotonic()
        parts = [["check", *_parts(case)] for case in batch]
        self._ours.send(_compilation(batch, parts))
        if to_warm:
            self._warm(to_warm)
        self._ours.receive(COMPILE_S)
        print(f"compiled {len(batch)} shapes in {time.monotonic() - began:.0f} s", flush=True)
        if to_warm:
            for worker in self._workers():
                self._measured |= worker.ask({"do": "ceilings"}, 120)
        self.save()
        for case in batch:
            if self.left() < 0:
                self.result["not_run"].append(key(case))
                continue
            began = time.monotonic()
            ours, peers = self._case(case)
            ours["seconds"] = round(time.monotonic() - began, 1)
            self._raw.append((case, ours, peers))
            line = report.row(case, ours, peers, report.ceilings(self._measured))
            print(report.table([line]).splitlines()[1], f"{self.left():.0f} s", flush=True)
            self.save()
        self._ours.ask({"do": "drop", "cases": [encoded(case) for case in batch]}, ROW_S)
        self.save()

    def _time_xla(self, rows: Sequence[tuple[Case, dict[str, Any], dict[str, Any]]]) -> None:
        """Of the cases where it is no peer: when all else is done."""
        for first in range(0, len(rows), BATCH // 2):
            batch = rows[first : first + BATCH // 2]
            cases = [case for case, _, _ in batch]
            if self.left() > 0:
                self._ours.ask(
                    _compilation(cases, [["xla"]] * len(cases)), self._patience(COMPILE_S)
                )
            for case, ours, _ in batch:
                if self.left() > 0:
                    ours["xla"] = self._xla(case)
            self._ours.ask({"do": "drop", "cases": [encoded(case) for case in cases]}, ROW_S)
            self.save()

    def _note(self, who: str, started: dict[str, Any]) -> None:
        self.result["versions"] |= started.get("versions", {})
        if "gpu" in started:
            self.result["gpu"] = started["gpu"]
        if "clock" in started:
            self.result.setdefault("clock", {})[who] = started["clock"]
        if "error" in started:
            self.result.setdefault("errors", {})[who] = started["error"]

    def _warm(self, chosen: Sequence[Case]) -> None:
        """While ours compile: DeepGEMM takes ten seconds a shape, so in several processes; the
        driver takes most of a minute for Marlin's kernels of a type, once."""
        grouped = [case for case in chosen if isinstance(case, Grouped)]
        compiled = [encoded(case) for case in grouped if case.dtype in ("bf16", "fp8")]
        count = min(WARM_WORKERS, len(compiled))
        shares = [compiled[i::count] for i in range(count)]
        for dtype in ("int8", "int4"):
            shares += [[encoded(case)] for case in grouped if case.dtype == dtype][:1]
        workers = [Worker(*self._peer_command, self._log) for _ in shares if self._peers]
        for worker, share in zip(workers, shares, strict=False):
            worker.send({"do": "warm", "cases": share})
        until = time.monotonic() + min(240, self._arguments.time_budget / 3)
        for worker in workers:
            worker.receive(until - time.monotonic())
            worker.stop()

    def _patience(self, seconds: float) -> float:
        return min(seconds, max(10.0, self.left() + 20))

    def _case(self, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
        """What :func:`report.row` takes: ours with XLA's, and the peers'."""
        if self._peers:
            self._peers.send({"do": "prepare", "case": encoded(case)})
        fault = self._check(case)
        request = {"do": "prepare", "case": encoded(case), "parts": _parts(case)}
        prepared = self._ours.ask(request, self._patience(ROW_S))
        lost = {"error": prepared.get("error", "not prepared")}
        ours: dict[str, Any] = prepared.get("ours", lost) | ({"error": fault} if fault else {})
        if "xla" in _parts(case):
            ours["xla"] = prepared.get("xla", lost)
        peers: dict[str, Any] = {}
        if self._peers:
            reply = self._peers.receive(self._patience(ROW_S))
            peers = reply.get("peers", {"torch": reply})
        self._time(ours, peers)
        for worker in self._workers():
            worker.ask({"do": "release"}, ROW_S)
        return ours, peers

    def _check(self, case: Case) -> str | None:
        """What is wrong on ragged inputs; cases that share the check share the answer."""
        checks, name = self.result["checks"], check_key(case)
        if name not in checks:
            request = {"do": "check", "case": encoded(case), "repeats": self._arguments.repeats}
            reply = self._ours.ask(request, self._patience(CHECK_S))
            checks[name] = reply.get("wrong") or reply.get("error") or RIGHT
        return None if checks[name] == RIGHT else checks[name]

    def _time(self, ours: dict[str, Any], peers: dict[str, Any]) -> None:
        """Adds "us", "spread" and more to those that were prepared, and "tries" to ours."""
        for attempt in range(1, TRIES + 1):
            self._try(ours, peers, attempt)
            ours["tries"] = attempt
            others = {**peers, "XLA": ours.get("xla", {})}
            if report.steady(ours, others) or self.left() < 0:
                return

    def _try(self, ours: dict[str, Any], peers: dict[str, Any], attempt: int) -> None:
        """All turns once, in the place of what an attempt before found."""
        in_jax = {"ours": ours} | ({"xla": ours["xla"]} if "xla" in ours else {})
        for who in TURNS:
            parts, worker = (in_jax, self._ours) if who == "ours" else (peers, self._peers)
            fresh = who not in self._warmed
            self._warmed.add(who)
            if names := _close({n: each for n, each in parts.items() if "error" not in each}):
                warm_s = FIRST_WARM_S if fresh else AGAIN_WARM_S if attempt > 1 else WARM_S
                request = {"do": "time", "names": names, "warm_s": warm_s}
                assert worker is not None
                reply = worker.ask(request, self._patience(ROW_S))
                for name in names:
                    _add(parts[name], reply.get(name, {"error": reply.get("error", "no time")}))
        for each in (*in_jax.values(), *peers.values()):
            each |= _summed(each.pop("windows", {}))

    def _xla(self, case: Case) -> dict[str, Any]:
        request = {"do": "prepare", "case": encoded(case), "parts": ["xla"]}
        reply = self._ours.ask(request, self._patience(ROW_S))
        found = reply.get("xla", reply)
        if "error" not in found:
            request = {"do": "time", "names": ["xla"], "warm_s": WARM_S}
            reply = self._ours.ask(request, self._patience(ROW_S))
            _add(found, reply.get("xla", reply))
            found |= _summed(found.pop("windows", {}))
        return found

    def save(self) -> None:
        best = report.ceilings(self._measured)
        said = self._measured | {f"best_{name}": value for name, value in best.items()}
        self.result["ceilings"] = {"read_gbs": READ_GBS} | {
            name: round(value, 1) if isinstance(value, float) else value
            for name, value in said.items()
        }
        rows = [*self._kept, *(report.row(*each, best) for each in self._raw)]
        order = {key(case): i for i, case in enumerate(cases())}
        self.result["rows"] = sorted(rows, key=lambda row: order.get(report.key_of(row), 0))
        out = self._arguments.out or Path(
            f"benchmarks/results/kernels_{_short_name(self.result.get('gpu', 'none'))}.json"
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(self.result, indent=1) + "\n")

    def stop(self) -> None:
        for worker in self._workers():
            worker.stop()


def _compilation(batch: Sequence[Case], parts: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {"do": "compile", "cases": [encoded(case) for case in batch], "parts": parts}


def _parts(case: Case) -> list[str]:
    """What of a case is timed in turns. XLA's grouped products multiply every row by every
    group's matrix, and are timed when all else is done."""
    return ["ours"] if isinstance(case, Grouped) else ["ours", "xla"]


def _close(parts: dict[str, dict[str, Any]]) -> list[str]:
    """The fastest, and those that may be it; ours, and all that were not timed yet."""
    medians = {
        name: statistics.median(each["windows"]["us"]) if "windows" in each else 0.0
        for name, each in parts.items()
    }
    least = min(medians.values(), default=0.0)
    return [name for name, us in medians.items() if name == "ours" or us <= CLOSE * least]


def _add(each: dict[str, Any], reply: dict[str, Any]) -> None:
    """A turn's windows to those of the turns before."""
    if "error" in reply:
        each["error"] = reply["error"]
        each.pop("windows", None)
        return
    windows = each.setdefault("windows", {})
    for name, values in reply.items():
        windows[name] = windows.get(name, []) + (values if isinstance(values, list) else [values])


def _summed(windows: dict[str, list[float]]) -> dict[str, float]:
    if not windows:
        return {}
    medians = {n: statistics.median(v) for n, v in windows.items() if n.endswith("us")}
    us = windows["us"]
    found = medians | {"spread": round((max(us) - min(us)) / medians["us"], 4)}
    if "busy" in windows:
        found["busy"] = round(min(windows["busy"]), 3)
    if "resolution_ns" in windows:
        found["resolution_ns"] = math.gcd(*map(int, windows["resolution_ns"]))
    return found


def _short_name(gpu: str) -> str:
    """h200 of "NVIDIA H200"."""
    found = re.search(r"[A-Za-z]+\d+", gpu)
    return found[0].lower() if found else "none"


def _tools() -> dict[str, str]:
    """Versions of the driver and of CUDA's compilers, where they can be asked."""
    versions = {}
    for name, command, pattern in (
        ("driver", ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"\S+"),
        ("ptxas", ["ptxas", "--version"], r"release \S+, V(\S+)"),
        ("nvcc", ["nvcc", "--version"], r"release \S+, V(\S+)"),
    ):
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        if found := re.search(pattern, said):
            versions[name] = found[found.re.groups]
    return versions


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hopper kernels beside their peers.")
    parser.add_argument("--ops", nargs="*", default=[], choices=OPS)
    parser.add_argument("--shapes", nargs="*", default=[], help="parts of 'op dtype shape'")
    parser.add_argument("--all", action="store_true", help="every shape, not the core alone")
    parser.add_argument("--peers", type=Path, help="directory of the packed peers; none without")
    parser.add_argument("--time-budget", type=float, default=3600, help="seconds in all")
    parser.add_argument("--repeats", type=int, default=20, help="equal runs of a check")
    parser.add_argument("--implementation", default="mosaic_gpu")
    parser.add_argument("--calls", type=int, default=CALLS, help="of our programs, at most")
    parser.add_argument("--resume", type=Path, help="a result whose rows are kept, if complete")
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
    for name, verdict in result["checks"].items():
        print(f"{name}: {verdict}")
    print(report.table(result["rows"]))
    if result["not_run"]:
        print("not run, for want of time:", ", ".join(result["not_run"]))


if __name__ == "__main__":
    main()
